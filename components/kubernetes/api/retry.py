"""Call the API again while it is unreachable, up to a deadline."""

from __future__ import annotations

import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import TypeVar

import tenacity

from components.kubernetes.api.client import RefusedError, SilentOperatorError, UnreachableError
from trainer.errors import TransientError

log = logging.getLogger(__name__)
MAX_BACKOFF_SECONDS = 10.0
_Result = TypeVar("_Result")


def with_retry(
    call: Callable[[], _Result],
    seconds: float,
    sleep: Callable[[float], None],
    operator: float = 0.0,
) -> _Result:
    """Return the result of `call`, retried while the API does not answer.

    Args:
        call: may raise `UnreachableError`; any other exception propagates.
        seconds: how long to retry; 0: without end.
        sleep: waits between two attempts, and may raise to stop them.
        operator: the same for what the training operator has to judge; 0: `seconds`.

    Raises:
        TransientError: the API, or the operator, did not answer in time.
    """
    backoff = tenacity.wait_random_exponential(multiplier=0.5, max=MAX_BACKOFF_SECONDS)

    def stop(state: tenacity.RetryCallState) -> bool:
        error = state.outcome.exception() if state.outcome else None
        limit = (isinstance(error, SilentOperatorError) and operator) or seconds
        return bool(limit) and (state.seconds_since_start or 0.0) >= limit

    def pause(state: tenacity.RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        return max(backoff(state), getattr(error, "retry_after", 0.0))

    def warn(state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        silent = isinstance(error, SilentOperatorError)
        who = "training operator does not answer" if silent else "Kubernetes API is unreachable"
        log.warning("the %s, retrying: %s", who, error)

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(UnreachableError),
        wait=pause,
        stop=stop,
        sleep=sleep,
        before_sleep=warn,
        reraise=True,
    )
    try:
        return retrying(call)
    except SilentOperatorError as error:
        raise TransientError(silent_operator(operator or seconds, str(error))) from None
    except UnreachableError as error:
        raise TransientError(unreachable(seconds, str(error))) from None


_OPERATOR = (
    "kubectl get deployments --all-namespaces --selector control-plane=kubeflow-training-operator"
)


def refused(error: RefusedError) -> str:
    """Return the message for a request that the API refuses, with the remedy."""
    return "; ".join(filter(None, [f"the Kubernetes API refuses: {error}", _remedy(error)]))


def _remedy(error: RefusedError) -> str:
    if error.is_unserved:
        return (
            "this cluster does not serve TFJobs: the training operator, or its CRD "
            "tfjobs.kubeflow.org, is not installed; flotilla doctor shows how to install it"
        )
    if error.is_missing:
        return "correct the namespace: flotilla doctor shows which one is missing"
    if error.code == HTTPStatus.FORBIDDEN and " cannot " in str(error):
        return "deploy/ holds the permissions that the step's service account needs"
    return ""


def deleted_by_another(job: str) -> str:
    """Return the message for a job that is gone, and that this launcher has not deleted."""
    return (
        f"the job {job} was deleted by someone else, which ends the run; Retry in the KFP UI, or "
        "flotilla run --resume, trains on from its newest checkpoint"
    )


def silent_operator(seconds: float, detail: str) -> str:
    """Return the message for an operator that has left a job alone for so many seconds."""
    return (
        f"the training operator has not reacted for {seconds:g} s "
        f"(cluster.kubernetes.deadlines.operator): {detail}; is it running? {_OPERATOR}"
    )


def unreachable(seconds: float, detail: str) -> str:
    """Return the message for an API that has not answered for so many seconds."""
    return (
        f"the Kubernetes API has not answered for {seconds:g} s "
        f"(cluster.kubernetes.deadlines.unreachable): {detail}"
    )

"""Call the API again while it is unreachable, up to a deadline."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import tenacity

from components.tfjob.client import RefusedError, UnreachableError
from trainer.errors import TransientError

log = logging.getLogger(__name__)
MAX_BACKOFF_SECONDS = 10.0
_Result = TypeVar("_Result")


def with_retry(
    call: Callable[[], _Result], seconds: float, sleep: Callable[[float], None]
) -> _Result:
    """Return the result of `call`, retried while the API does not answer.

    Args:
        call: may raise `UnreachableError`; any other exception propagates.
        seconds: how long to retry; 0: without end.
        sleep: waits between two attempts, and may raise to stop them.

    Raises:
        TransientError: the API did not answer in time.
    """
    stop = tenacity.stop_after_delay(seconds) if seconds else tenacity.stop_never
    backoff = tenacity.wait_random_exponential(multiplier=0.5, max=MAX_BACKOFF_SECONDS)

    def pause(state: tenacity.RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        return max(backoff(state), getattr(error, "retry_after", 0.0))

    def warn(state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        log.warning("the Kubernetes API is unreachable, retrying: %s", error)

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
    except UnreachableError as error:
        raise TransientError(unreachable(seconds, str(error))) from None


def refused(error: RefusedError) -> str:
    """Return the message for a request that the API refuses, with the remedy."""
    remedy = "deploy/ holds the permissions that the step's service account needs"
    if error.is_missing:
        remedy = (
            "install the training operator (kubeflow.org/v1 tfjobs), or correct the namespace: "
            "flotilla doctor shows which of them is missing"
        )
    return f"the Kubernetes API refuses: {error}; {remedy}"


def unreachable(seconds: float, detail: str) -> str:
    """Return the message for an API that has not answered for so many seconds."""
    return (
        f"the Kubernetes API has not answered for {seconds:g} s "
        f"(cluster.kubernetes.deadlines.unreachable): {detail}"
    )

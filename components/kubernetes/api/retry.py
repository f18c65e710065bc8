"""Retries API calls while the API is unreachable, up to a deadline."""

from __future__ import annotations

import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import TypeVar

import tenacity

from flotilla.components.kubernetes.api.client import (
    RefusedError,
    SilentControllerError,
    UnreachableError,
)
from flotilla.components.kubernetes.names import JobKind
from flotilla.trainer.runtime.errors import TransientError

log = logging.getLogger(__name__)
MAX_BACKOFF_SECONDS = 10.0
_Result = TypeVar("_Result")


def call_with_retry(
    call: Callable[[], _Result],
    seconds: float,
    sleep: Callable[[float], None],
    kind: JobKind | None = None,
    silent_seconds: float = 0.0,
) -> _Result:
    """Make an API call, retry it while the API does not respond, and return the result.

    Args:
        call: the request; it is retried only after an `UnreachableError`.
        seconds: how long to retry; 0 means forever.
        sleep: waits between two attempts, and may raise an exception to stop retrying.
        kind: kind of the job in the request, for the error message.
        silent_seconds: how long to retry while the controller's webhook is silent; 0: `seconds`.

    Raises:
        TransientError: the API or the controller did not respond in time.
    """
    backoff = tenacity.wait_random_exponential(multiplier=0.5, max=MAX_BACKOFF_SECONDS)

    def stop(state: tenacity.RetryCallState) -> bool:
        limit = (isinstance(_error(state), SilentControllerError) and silent_seconds) or seconds
        return bool(limit) and (state.seconds_since_start or 0.0) >= limit

    def pause(state: tenacity.RetryCallState) -> float:
        return max(backoff(state), getattr(_error(state), "retry_after", 0.0))

    def warn(state: tenacity.RetryCallState) -> None:
        is_silent = isinstance(_error(state), SilentControllerError)
        what = "the controller does not respond" if is_silent else "the API is unreachable"
        log.warning("%s; retrying: %s", what, _error(state))

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
    except SilentControllerError as error:
        raise TransientError(
            silent_controller(kind, silent_seconds or seconds, str(error))
        ) from None
    except UnreachableError as error:
        raise TransientError(unreachable(seconds, str(error))) from None


def _error(state: tenacity.RetryCallState) -> BaseException | None:
    return state.outcome.exception() if state.outcome else None


def describe_refusal(error: RefusedError, kind: JobKind) -> str:
    """Return the message for a request that the API refused, with a suggested fix."""
    remedy = _remedy(error, kind)
    return "; ".join(filter(None, [f"the Kubernetes API refused a request: {error}", remedy]))


def _remedy(error: RefusedError, kind: JobKind) -> str:
    if error.is_unserved:
        return kind.remedy
    if error.is_of_unknown_fields:
        return kind.outdated
    if error.is_missing:
        return "correct the namespace; `flotilla doctor` shows which one does not exist"
    if error.code == HTTPStatus.FORBIDDEN and " cannot " in str(error):
        return "grant the step's service account the permissions in deploy/"
    return ""


def describe_foreign_deletion(job: str) -> str:
    """Return the message for a job that was deleted by someone other than this launcher."""
    return (
        f"another user or program deleted the job {job}, which ended the run; to continue from its "
        "newest checkpoint, use Retry in the KFP UI or `flotilla run --resume`"
    )


def silent_controller(kind: JobKind | None, seconds: float, detail: str) -> str:
    """Return the message for a controller that has ignored a job for `seconds`."""
    look = f"; check whether it is running: {kind.show}" if kind else ""
    return (
        f"the {kind.controller if kind else 'controller'} has not reacted for {seconds:g} s "
        f"(cluster.kubernetes.deadlines.operator): {detail}{look}"
    )


def unreachable(seconds: float, detail: str) -> str:
    """Return the message for an API that has been unreachable for `seconds`."""
    return (
        f"the Kubernetes API has not answered for {seconds:g} s "
        f"(cluster.kubernetes.deadlines.unreachable): {detail}"
    )

"""Try a call again while the API is out of reach, up to a deadline."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import tenacity

from components.tfjob.client import RefusedError, UnreachableError
from trainer.errors import UserError

log = logging.getLogger(__name__)
LONGEST_PAUSE = 10.0
_Given = TypeVar("_Given")


def with_retry(
    call: Callable[[], _Given], seconds: float, sleep: Callable[[float], None]
) -> _Given:
    """Return what `call` gives, however long the API takes to answer.

    Args:
        call: may raise `UnreachableError`; what else it raises comes through.
        seconds: how long to try; 0: for ever.
        sleep: waits between two attempts, and may raise to give up.

    Raises:
        UserError: the API did not answer in time.
    """
    stop = tenacity.stop_after_delay(seconds) if seconds else tenacity.stop_never
    backoff = tenacity.wait_random_exponential(multiplier=0.5, max=LONGEST_PAUSE)

    def pause(state: tenacity.RetryCallState) -> float:
        asked = state.outcome.exception() if state.outcome else None
        return max(backoff(state), getattr(asked, "wait", 0.0))

    def tell(state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        log.warning("the Kubernetes API is out of reach: %s", error)

    trying = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(UnreachableError),
        wait=pause,
        stop=stop,
        sleep=sleep,
        before_sleep=tell,
        reraise=True,
    )
    try:
        return trying(call)
    except UnreachableError as error:
        raise UserError(unreachable(seconds, str(error))) from None


def refused(error: RefusedError) -> str:
    """Return the line that says what the API refuses, and what to do."""
    return (
        f"the Kubernetes API refuses: {error}; deploy/ holds the permissions that the step's "
        "service account needs"
    )


def unreachable(seconds: float, last: str) -> str:
    """Return the line that says that the API has not answered for so long."""
    return (
        f"the Kubernetes API has not answered for {seconds:g} s "
        f"(cluster.kubernetes.deadlines.unreachable): {last}"
    )

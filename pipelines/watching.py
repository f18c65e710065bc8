"""Follow a run on a KFP instance until it ends, or until the person goes away."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from pipelines.instance import Client, ask
from pipelines.instance_errors import InstanceError
from pipelines.remote_run import RemoteRun, view
from trainer.errors import RunInterruptedError, UserError

LOOK_SECONDS = 3.0
# An instance may be upgraded under a run that lasts hours; it goes on without us meanwhile.
PATIENCE_SECONDS = 120.0


class LeftError(RunInterruptedError):
    """The person has gone away from a run that goes on.

    Attributes:
        run_id: the run, empty where it is not known yet.
    """

    def __init__(self, message: str, run_id: str) -> None:
        """Keep the line and the run."""
        super().__init__(message)
        self.run_id = run_id


def watch(
    client: Client,
    run_id: str,
    look: Callable[[RemoteRun], None],
    say: Callable[[str], None],
) -> RemoteRun:
    """Return the run once it has ended; `look` is called with what it is at each look.

    Raises:
        UserError: the instance gave no answer for `PATIENCE_SECONDS`, or a final one.
    """
    failing: float | None = None
    while True:
        try:
            run = view(ask(client.get_run, run_id=run_id))
            failing = None
            look(run)
            if run.has_ended:
                return run
        except InstanceError as error:
            now = time.monotonic()
            if failing is None:
                failing = now
                say(f"no news of the run: {error}")
            if not error.passing or now - failing >= PATIENCE_SECONDS:
                again = command(client, "status", run_id)
                raise UserError(f"{error}; the run goes on without us, see: {again}") from None
        time.sleep(LOOK_SECONDS)


@contextmanager
def leaving(left: Callable[[], tuple[str, str]]) -> Iterator[None]:
    """End this block at once at SIGINT or SIGTERM.

    Raises:
        LeftError: with the line and the run that `left` returns then.
    """
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, _interrupt) for number in numbers}
    try:
        yield
    except KeyboardInterrupt:
        raise LeftError(*left()) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def goes_on(client: Client, run_id: str) -> tuple[str, str]:
    """Return what a person who stops looking has to know, and the run."""
    cancel = command(client, "cancel", run_id)
    return f"interrupted; the run {run_id} goes on; cancel it with: {cancel}", run_id


def command(client: Client, verb: str, run_id: str) -> str:
    """Return the command line that does something with a run of this instance."""
    namespace = client.access.namespace
    where = f" --namespace {namespace}" if namespace else ""
    return f"flotilla {verb} {run_id} --endpoint {client.access.endpoint}{where}"


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt

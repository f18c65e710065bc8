"""Follow a run on a KFP instance until it ends, or until the person goes away.

Write the logs of a run on a KFP instance as they come.

The instance gives a log as a whole: each look asks for it again and shows what is new.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from pipelines.cli.commands import output
from pipelines.runs.kfp_client import Client, InstanceError, ask
from pipelines.runs.kfp_run import RemoteRun, Step, log_of, remedy, view
from trainer.errors import RunInterruptedError, UserError, nearest

LOOK_SECONDS = 3.0
# An instance may be upgraded under a run that lasts hours; it goes on without us meanwhile.
RETRY_SECONDS = 120.0


class DetachedError(RunInterruptedError):
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
            if not error.passing or now - failing >= RETRY_SECONDS:
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
        raise DetachedError(*left()) from None
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


_BEGUN = ("RUNNING", "SUCCEEDED", "FAILED", "CANCELING", "CANCELED")
_OVER = ("SUCCEEDED", "FAILED", "CANCELED", "SKIPPED")


class Follower:
    """What was shown of each log so far."""

    def __init__(self, client: Client, only: str) -> None:
        """Show the step `only`, or all when it is empty."""
        self._client = client
        self._only = only
        self._shown: dict[str, int] = {}
        self._done: set[str] = set()
        self._current = ""
        self.refused: dict[str, tuple[Step, InstanceError]] = {}

    def look(self, run: RemoteRun) -> None:
        """Show what is new in a run."""
        for step in run.steps:
            wanted = self._only in ("", step.name)
            if not wanted or step.name in self._done:
                continue
            if step.cached:
                self._done.add(step.name)
                # It was looked for while the instance had not skipped its pod yet.
                self.refused.pop(step.name, None)
                _say(f"{step.name} was taken from KFP's cache: it did not run and has no log")
            elif step.state in _BEGUN:
                over = step.state in _OVER or run.has_ended
                self._show(run, step, over)
                if over:
                    self._done.add(step.name)

    def _show(self, run: RemoteRun, step: Step, over: bool) -> None:
        try:
            text = log_of(self._client, run, step)
        except InstanceError as error:
            if error.status in (401, 403):
                raise
            # The pod may not be there yet.
            self.refused[step.name] = (step, error)
            return
        self.refused.pop(step.name, None)
        if not over:
            # The last line is still being written.
            text = text[: text.rfind("\n") + 1]
        seen = self._shown.get(step.name, 0)
        # A step that was tried again has another log.
        fresh = text[seen:] if len(text) >= seen else text
        self._shown[step.name] = len(text)
        if not fresh:
            return
        if self._current != step.name:
            self._current = step.name
            sys.stderr.write(f"--- {step.name}\n")
            sys.stderr.flush()
        with output():
            sys.stdout.write(fresh if fresh.endswith("\n") else f"{fresh}\n")

    @property
    def has_shown(self) -> bool:
        """Whether there was any log."""
        return bool(self._shown)


def follow_remote(client: Client, run: RemoteRun, only: str, follow: bool) -> RemoteRun:
    """Write the logs of a run; return the run as it was seen last.

    Args:
        client: of the instance.
        run: as it stands.
        only: the one step to show, or empty.
        follow: whether to go on until the run has ended.

    Raises:
        UserError: there is no such step, or the instance gives no log at all.
    """
    names = [step.name for step in run.steps]
    if only and only not in names and (run.has_ended or not follow):
        known = nearest(only, names) or f"; it has {_listed(names)}"
        raise UserError(f"the run {run.run_id} has no step {only!r}{known}")
    follower = Follower(client, only)
    if follow and not run.has_ended:
        last = watch(client, run.run_id, follower.look, _say)
    else:
        follower.look(run)
        last = run
    for step, error in follower.refused.values():
        how = remedy(client, step)
        _say(f"no log of {step.name}: {error}; where the pod is still there: {how}")
    if follower.refused and not follower.has_shown:
        first, _ = next(iter(follower.refused.values()))
        raise UserError(
            f"{client.access.endpoint} gives no log of the run {run.run_id}: "
            f"read it by {remedy(client, first)}, or in the store where logs are archived"
        )
    return last


def _say(text: str) -> None:
    sys.stderr.write(f"flotilla: {text}\n")
    sys.stderr.flush()


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none yet"

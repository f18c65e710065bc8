"""Follow a run on a KFP instance: its steps and its logs, until it ends.

The instance returns a log as a whole: each look reads it again and passes on what is new.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from pipelines.runs.kfp_access import Access, Instance
from pipelines.runs.kfp_client import Client, InstanceError, ask, connect
from pipelines.runs.kfp_outcome import result_of
from pipelines.runs.kfp_run import ENDED, RemoteRun, Step, log_of, remedy, run_of, view
from pipelines.runs.outcome import RunResult
from trainer.errors import UserError, nearest

LOOK_SECONDS = 3.0
# An instance may be upgraded while a run lasts for hours; the run continues meanwhile.
RETRY_SECONDS = 120.0

OnChange = Callable[[RemoteRun], None]
OnText = Callable[[str, str], None]
OnNote = Callable[[str], None]


def follow(
    run: str,
    *,
    instance: Instance | None = None,
    on_change: OnChange | None = None,
    on_note: OnNote | None = None,
) -> RunResult:
    """Wait for the end of a run on a KFP instance. Interrupting it leaves the run running.

    Args:
        run: id or name of the run.
        instance: the KFP instance; from the environment when left out.
        on_change: called at every look with the run and its steps.
        on_note: called with one line while the instance does not answer.

    Raises:
        UserError: there is no such run, or the instance cannot be reached.
    """
    client = connect((instance or Instance()).access())
    run_id = run_of(client, run).run_id
    last = watch(client, run_id, on_change or _ignore, on_note or _ignore)
    return result_of(client, last)


def watch(client: Client, run_id: str, on_change: OnChange, on_note: OnNote) -> RemoteRun:
    """Return the run once it has ended; `on_change` and `on_note` as in `follow`.

    Raises:
        UserError: the instance did not answer for `RETRY_SECONDS`, or refused for good.
    """
    failing: float | None = None
    while True:
        try:
            run = view(ask(client.get_run, run_id=run_id))
            failing = None
            on_change(run)
            if run.has_ended:
                return run
        except InstanceError as error:
            now = time.monotonic()
            if failing is None:
                failing = now
                on_note(f"no news of the run: {error}")
            if not error.passing or now - failing >= RETRY_SECONDS:
                again = command(client.access, "status", run_id)
                raise UserError(f"{error}; the run continues without us, see: {again}") from None
        time.sleep(LOOK_SECONDS)


def command(access: Access, verb: str, run: str) -> str:
    """Return the command line that does something with a run of an instance."""
    where = f" --namespace {access.namespace}" if access.namespace else ""
    return f"flotilla {verb} {run} --endpoint {access.endpoint}{where}"


_BEGUN = ("RUNNING", "SUCCEEDED", "FAILED", "CANCELING", "CANCELED")


class LogFollower:
    """Passes on what is new in the logs of a run."""

    def __init__(self, client: Client, only: str, on_text: OnText, on_note: OnNote) -> None:
        """Follow the step `only`, or all when it is empty."""
        self._client = client
        self._only = only
        self._on_text = on_text
        self._on_note = on_note
        self._lengths: dict[str, int] = {}
        self._done: set[str] = set()
        self.refused: dict[str, tuple[Step, InstanceError]] = {}

    def look(self, run: RemoteRun) -> None:
        """Read the logs of the steps that have begun."""
        for step in run.steps:
            wanted = self._only in ("", step.name)
            if not wanted or step.name in self._done:
                continue
            if step.cached:
                self._done.add(step.name)
                # It was looked for while the instance had not skipped its pod yet.
                self.refused.pop(step.name, None)
                self._on_note(
                    f"{step.name} was taken from KFP's cache: it did not run and has no log"
                )
            elif step.state in _BEGUN:
                over = step.state in ENDED or run.has_ended
                self._read(run, step, over)
                if over:
                    self._done.add(step.name)

    def _read(self, run: RemoteRun, step: Step, over: bool) -> None:
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
        seen = self._lengths.get(step.name, 0)
        # A step that was retried has another log.
        fresh = text[seen:] if len(text) >= seen else text
        self._lengths[step.name] = len(text)
        if fresh:
            self._on_text(step.name, fresh if fresh.endswith("\n") else f"{fresh}\n")

    @property
    def has_found(self) -> bool:
        """Whether there was any log."""
        return bool(self._lengths)


def follow_logs(
    client: Client, run: RemoteRun, only: str, *, wait: bool, on_text: OnText, on_note: OnNote
) -> RemoteRun:
    """Pass on the logs of a run; return the run as it was seen last.

    Args:
        client: of the instance.
        run: the run.
        only: the one step to read, or empty.
        wait: whether to continue until the run has ended.
        on_text: called with the name of a step and new whole lines of its log.
        on_note: called with a line on what has no log.

    Raises:
        UserError: there is no such step, or the instance gives no log at all.
    """
    names = [step.name for step in run.steps]
    if only and only not in names and (run.has_ended or not wait):
        known = nearest(only, names) or f"; it has {', '.join(names) or 'none yet'}"
        raise UserError(f"the run {run.run_id} has no step {only!r}{known}")
    follower = LogFollower(client, only, on_text, on_note)
    if wait and not run.has_ended:
        last = watch(client, run.run_id, follower.look, on_note)
    else:
        follower.look(run)
        last = run
    for step, error in follower.refused.values():
        how = remedy(client, step)
        on_note(f"no log of {step.name}: {error}; where the pod is still there: {how}")
    if follower.refused and not follower.has_found:
        first, _ = next(iter(follower.refused.values()))
        raise UserError(
            f"{client.access.endpoint} gives no log of the run {run.run_id}: "
            f"read it by {remedy(client, first)}, or in the store where logs are archived"
        )
    return last


def _ignore(_seen: object) -> None:
    pass

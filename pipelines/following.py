"""Write the logs of a run on a KFP instance as they come.

The instance gives a log as a whole: each look asks for it again and shows what is new.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from pipelines import watching
from pipelines.commands import output
from pipelines.instance import Client
from pipelines.instance_errors import InstanceError
from pipelines.remote_logs import log_of, remedy
from pipelines.remote_run import RemoteRun, Step
from trainer.errors import UserError, nearest

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
        last = watching.watch(client, run.run_id, follower.look, _say)
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

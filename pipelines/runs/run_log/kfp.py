"""The logs of a run's steps on a KFP instance.

The log of the training step includes the lines of the training tasks, which the launcher relays.
"""

from __future__ import annotations

from collections.abc import Callable

from flotilla.components.records.run_store import STEPS
from flotilla.pipelines.runs.kfp_client import Client, InstanceError
from flotilla.pipelines.runs.kfp_nodes import Step, read_log
from flotilla.pipelines.runs.kfp_run import ENDED, RemoteRun
from flotilla.pipelines.runs.kfp_watch import OnNote, watch
from flotilla.pipelines.runs.run_log.text import LogText
from flotilla.pipelines.runs.run_log.view import LogLine, LogView
from flotilla.trainer import storage
from flotilla.trainer.runtime.errors import UserError, nearest

OnLine = Callable[[LogLine], None]

_BEGUN = ("RUNNING", "SUCCEEDED", "FAILED")


class LogFollower:
    """Reads new lines from the logs of a run."""

    def __init__(
        self, client: Client, only: str, view: LogView, on_line: OnLine, on_note: OnNote
    ) -> None:
        """Follow the step `only`, or all steps if it is empty."""
        self._client = client
        self._only = only
        self._view, self._on_line = view, on_line
        self._on_note = on_note
        # The parser of each pod's log, and the length that was already read.
        self._texts: dict[str, LogText] = {}
        self._lengths: dict[str, int] = {}
        self._done: set[str] = set()
        self.refused: dict[str, tuple[Step, InstanceError]] = {}

    def look(self, run: RemoteRun) -> None:
        """Read the logs of the steps that have begun."""
        for step in run.steps:
            wanted = self._only in ("", step.name)
            if not wanted or step.name in self._done:
                continue
            if step.state in _BEGUN:
                over = step.state in ENDED or run.has_ended
                self._read_step(run, step, over)
                if over:
                    self._done.add(step.name)

    def _read_step(self, run: RemoteRun, step: Step, over: bool) -> None:
        try:
            if not step.pod:
                raise InstanceError(f"{step.name} has no pod yet")
            text = read_log(self._client, run.run_id, run.created, step.pod)
        except InstanceError as error:
            if error.status in (401, 403):
                raise
            self.refused[step.name] = (step, error)
            return
        self.refused.pop(step.name, None)
        if not over:
            # Leave out the last line, which may be incomplete.
            text = text[: text.rfind("\n") + 1]
        seen = self._lengths.get(step.pod, 0)
        # If the log is shorter than before, Kubernetes has started a new file.
        fresh = text[seen:] if len(text) >= seen else text
        self._lengths[step.pod] = len(text)
        text_of = self._texts.setdefault(step.pod, LogText(utc=True))
        self._view.enter(step.name)
        for line in fresh.rstrip("\n").split("\n") if fresh else ():
            for each in self._view.take(text_of.take(line)):
                self._on_line(each)
        for each in self._view.end() if over else self._view.flush():
            self._on_line(each)

    @property
    def has_found(self) -> bool:
        """Whether any log was read."""
        return bool(self._lengths)


def follow_logs(
    client: Client,
    run: RemoteRun,
    only: str,
    view: LogView,
    *,
    follow: bool = False,
    on_line: OnLine,
    on_note: OnNote,
) -> RemoteRun:
    """Pass the logs of a run, or of its step `only`, to `on_line`, and return the run's last state.

    `on_note` is called with a message about each missing log. Raises `UserError`.
    """
    names = [step.name for step in run.steps]
    # If the run has a step for each stage, as in earlier versions, read only that step.
    only = next((each for each in view.stages if view.stages == (each,) and each in names), only)
    if only and only not in names and (run.has_ended or not follow):
        known = nearest(only, names) or f"; it has {', '.join(names) or 'none yet'}"
        raise UserError(f"the run {run.run_id} has no step {only!r}{known}")
    follower = LogFollower(client, only, view, on_line, on_note)
    if follow and not run.has_ended:
        last = watch(client, run.run_id, follower.look, on_note)
    else:
        follower.look(run)
        last = run
    for step, error in follower.refused.values():
        on_note(f"cannot read the log of {step.name}: {error}; {_instead(client, last, step)}")
    if last.impasse:
        on_note(last.impasse)
    if follower.refused and not follower.has_found:
        step, _ = next(iter(follower.refused.values()))
        raise UserError(
            f"{client.access.endpoint} returns no log of the run {run.run_id}; "
            f"{_instead(client, last, step)}"
        )
    view.require_task(run.run_id, sorted(each for each in view.labels if each[-1:].isdigit()))
    return last


def _instead(client: Client, run: RemoteRun, step: Step) -> str:
    """Return where to find the content of a log that the instance does not return."""
    namespace = client.access.namespace or "kubeflow"
    if run.has_ended:
        records = storage.join(run.at, STEPS) if run.at else ""
        where = f"the step's records are below {records}" if records else "see `flotilla status`"
        return f"KFP removes the pods and logs of a run some time after the run ends; {where}"
    return f"read it with `kubectl logs -n {namespace} {step.pod or '-'} -c main`"

"""Follows a run on a KFP instance until it ends, and reads the logs of its steps.

The log of the training step includes the lines of the training tasks, which the launcher relays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from flotilla.components.records.run_store import STEPS
from flotilla.components.records.step_record import StepRecord
from flotilla.pipelines.runs import kfp_outcome
from flotilla.pipelines.runs.kfp_access import Access, Instance
from flotilla.pipelines.runs.kfp_client import Client, InstanceError, connect
from flotilla.pipelines.runs.kfp_outcome import LOST_SECONDS
from flotilla.pipelines.runs.kfp_run import ENDED, RemoteRun, Step, find_run, read_log, refresh_run
from flotilla.pipelines.runs.log_view import LogText, LogView, OnLine
from flotilla.pipelines.runs.outcome import RunResult
from flotilla.trainer import storage
from flotilla.trainer.runtime.errors import UserError, nearest

LOOK_SECONDS = 3.0
# Seconds between two reads of the stages' records, normally and after a failed read.
STAGE_SECONDS, UNREAD_SECONDS = 10.0, 300.0
# Longest tolerated outage, in seconds. The instance may be upgraded while a long run continues.
RETRY_SECONDS = 120.0
# Seconds after which a pod that does not start is considered to block the run. Until then, the
# registry may become available again, or the user may push the image.
START_SECONDS = 60.0
# Seconds between two checks whether the pods of a run exist.
LOSS_SECONDS = 15.0
# Seconds without a running pod after which a failed run is considered stalled. Argo and KFP take
# some seconds to start the next pod.
STALL_SECONDS = 60.0

OnChange = Callable[[RemoteRun], None]
OnNote = Callable[[str], None]


def follow(
    run: str,
    *,
    instance: Instance | None = None,
    on_change: OnChange | None = None,
    on_note: OnNote | None = None,
) -> RunResult:
    """Wait until a run on a KFP instance has ended or cannot continue.

    Interrupting this call does not stop the run. A run that cannot continue is left unchanged,
    because the cause may be temporary.

    Args:
        run: the id or the name of the run.
        instance: the KFP instance; from the environment by default.
        on_change: called at every poll with the run and its steps.
        on_note: called with a message if the instance does not respond or a pod does not start.

    Raises:
        UserError: there is no such run, or the instance is unreachable.

    Example:
        flotilla.follow(flotilla.submit("configs/digits.yaml").run_id).metrics
    """
    client = connect((instance or Instance()).access())
    run_id = find_run(client, run).run_id
    last = watch(client, run_id, on_change or ignore, on_note or ignore)
    return kfp_outcome.judge_run(client, last)


def watch(client: Client, run_id: str, on_change: OnChange, on_note: OnNote) -> RemoteRun:
    """Follow a run as `follow` does, and return it once it has ended or cannot continue."""
    outage, obstacles, stages = Outage(on_note), _Obstacles(on_note), _Stages(client)
    loss = _Loss(client)
    while True:
        try:
            run = refresh_run(client, run_id)
            outage.end()
            on_change(stages.look(run))
            if run.has_ended:
                return run
            if words := loss.look(run):
                return replace(run, impasse=words)
            if words := obstacles.look(run):
                cancel = command(client.access, "cancel", run_id)
                return replace(run, impasse=f"{words}; the run continues; to cancel it: {cancel}")
        except InstanceError as error:
            if not outage.may_pass(error):
                again = command(client.access, "status", run_id)
                raise UserError(f"{error}; the run continues; follow it with: {again}") from None
        time.sleep(LOOK_SECONDS)


class Outage:
    """Measures how long an instance has not responded."""

    def __init__(self, on_note: OnNote) -> None:
        """Store the function that receives a message when an outage begins or ends."""
        self._on_note = on_note
        self._since: float | None = None

    def end(self) -> None:
        """Record that the instance has responded."""
        if self._since is not None:
            self._on_note("the state of the run can be read again")
        self._since = None

    def may_pass(self, error: InstanceError) -> bool:
        """Record a failure, and return whether the next request may succeed."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
            self._on_note(f"the state of the run cannot be read: {error}")
        return error.passing and now - self._since < RETRY_SECONDS


class _Stages:
    """Polls the current stages of the running steps."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._next = 0.0
        self._doing: Mapping[str, StepRecord] = {}

    def look(self, run: RemoteRun) -> RemoteRun:
        """Return the run with the current stages of its steps, if known."""
        is_running = any(step.state == "RUNNING" for step in run.steps)
        if is_running and time.monotonic() >= self._next:
            found = kfp_outcome.find_running_stages(self._client, run)
            # Retry rarely, because records that are unreadable from here usually remain unreadable.
            pause = STAGE_SECONDS if found is not None else UNREAD_SECONDS
            self._next = time.monotonic() + pause
            self._doing = found or {}
        return replace(run, doing=self._doing)


class _Loss:
    """Detects that the pods of a run no longer exist, although the instance reports no end."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._next = 0.0
        self._since: float | None = None
        self._has_seen = False

    def look(self, run: RemoteRun) -> str:
        """Return why the end of the run will not be reported, or an empty string."""
        now = time.monotonic()
        if now < self._next:
            return ""
        self._next = now + LOSS_SECONDS
        found = kfp_outcome.find_pods(self._client, run)
        # Trust a negative answer only after a positive one, because the endpoint may lack access.
        self._has_seen = self._has_seen or found is True
        words = kfp_outcome.explain_loss(self._client, run, found if self._has_seen else None)
        if not words:
            self._since = None
            return ""
        if self._since is None:
            self._since = now
        return words if now - self._since >= LOST_SECONDS else ""


class _Obstacles:
    """Detects obstacles to a run and reports each cause once."""

    def __init__(self, on_note: OnNote) -> None:
        self._on_note = on_note
        self._since: dict[str, float] = {}
        self._said: set[tuple[str, str]] = set()

    def look(self, run: RemoteRun) -> str:
        """Return why the run cannot continue, or an empty string if it can."""
        if run.state != "RUNNING":
            return ""
        found: dict[str, str] = {}
        for pod in kfp_outcome.waiting_pods(run.nodes):
            cause = kfp_outcome.explain_message(pod.message)
            if cause and cause.at_once:
                return kfp_outcome.explain_pod(pod)
            if cause and cause.blocks:
                found[pod.name] = kfp_outcome.explain_pod(pod)
            if cause and (pod.name, cause.pattern) not in self._said:
                self._said.add((pod.name, cause.pattern))
                self._on_note(kfp_outcome.explain_pod(pod))
        failed = kfp_outcome.find_failed_pods(run.nodes)
        if failed and not kfp_outcome.is_busy(run.nodes):
            found[""] = (
                f"{kfp_outcome.explain_pod(failed[0])}; no pod of the run has started since then"
            )
        now = time.monotonic()
        self._since = {each: self._since.get(each, now) for each in found}
        for each, since in self._since.items():
            if now - since >= (START_SECONDS if each else STALL_SECONDS):
                return found[each]
        return ""


def command(access: Access, verb: str, run: str) -> str:
    """Return the command line for an action on a remote run."""
    where = f" --namespace {access.namespace}" if access.namespace else ""
    return f"flotilla {verb} {run} --endpoint {access.endpoint}{where}"


def ignore(_seen: object) -> None:
    """Do nothing. The default for a function that is called with news."""


class LogFollower:
    """Reads new lines from the logs of a run."""

    def __init__(self, client: Client, only: str, view: LogView, on_line: OnLine) -> None:
        """Follow the step `only`, or all steps if it is empty."""
        self._client, self._only = client, only
        self._view, self._on_line = view, on_line
        # The parser of each pod's log, and the length that was already read.
        self._texts: dict[str, LogText] = {}
        self.lengths: dict[str, int] = {}
        self._done: set[str] = set()
        self.refused: dict[str, tuple[Step, InstanceError]] = {}

    def look(self, run: RemoteRun) -> None:
        """Read the logs of the steps that have begun."""
        for step in run.steps:
            if self._only not in ("", step.name) or step.name in self._done:
                continue
            if step.state in ("RUNNING", "SUCCEEDED", "FAILED"):
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
        seen = self.lengths.get(step.pod, 0)
        # If the log is shorter than before, Kubernetes has started a new file.
        fresh = text[seen:] if len(text) >= seen else text
        self.lengths[step.pod] = len(text)
        text_of = self._texts.setdefault(step.pod, LogText(utc=True))
        self._view.enter(step.name)
        for line in fresh.rstrip("\n").split("\n") if fresh else ():
            for each in self._view.take(text_of.take(line)):
                self._on_line(each)
        for each in self._view.end() if over else self._view.flush():
            self._on_line(each)


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
    follower = LogFollower(client, only, view, on_line)
    if follow and not run.has_ended:
        last = watch(client, run.run_id, follower.look, on_note)
    else:
        follower.look(run)
        last = run
    for step, error in follower.refused.values():
        on_note(f"cannot read the log of {step.name}: {error}; {_instead(client, last, step)}")
    if last.impasse:
        on_note(last.impasse)
    if follower.refused and not follower.lengths:
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

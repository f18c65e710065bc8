"""Follow a run on a KFP instance: its steps and its logs, until it ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from pipelines.runs.kfp_access import Access, Instance
from pipelines.runs.kfp_client import Client, InstanceError, connect
from pipelines.runs.kfp_nodes import Step, log_of
from pipelines.runs.kfp_outcome import (
    cause_of,
    explained,
    failed_pods,
    is_busy,
    result_of,
    waiting_pods,
)
from pipelines.runs.kfp_run import ENDED, RemoteRun, run_of, seen
from pipelines.runs.outcome import RunResult
from trainer import storage
from trainer.errors import UserError, nearest

LOOK_SECONDS = 3.0
# An instance may be upgraded while a run lasts for hours; the run continues meanwhile.
RETRY_SECONDS = 120.0
# A registry may be away for a moment, and an image may be pushed while its pod waits.
START_SECONDS = 60.0
# Between the end of a pod and the next one Argo and KFP take some seconds.
STALL_SECONDS = 60.0

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
    """Wait for the end of a run on a KFP instance, or until it cannot go on.

    Interrupting it leaves the run running; so does a run that cannot go on, since its cause may
    pass.

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
    """Return the run once it has ended or cannot go on, as `follow` does; raises `UserError`."""
    failing: float | None = None
    obstacles = _Obstacles(on_note)
    while True:
        try:
            run = seen(client, run_id)
            failing = None
            on_change(run)
            if run.has_ended:
                return run
            if words := obstacles.look(run):
                cancel = command(client.access, "cancel", run_id)
                return replace(
                    run, impasse=f"{words}; the run is left as it is, cancel it: {cancel}"
                )
        except InstanceError as error:
            now = time.monotonic()
            if failing is None:
                failing = now
                on_note(f"no news of the run: {error}")
            if not error.passing or now - failing >= RETRY_SECONDS:
                again = command(client.access, "status", run_id)
                raise UserError(f"{error}; the run continues without us, see: {again}") from None
        time.sleep(LOOK_SECONDS)


class _Obstacles:
    """Watches what keeps a run from going on, and says each cause once."""

    def __init__(self, on_note: OnNote) -> None:
        self._on_note = on_note
        self._since: dict[str, float] = {}
        self._said: set[tuple[str, str]] = set()

    def look(self, run: RemoteRun) -> str:
        """Return why the run cannot go on; empty while it may."""
        if run.state != "RUNNING":
            return ""
        found: dict[str, str] = {}
        for pod in waiting_pods(run.nodes):
            cause = cause_of(pod.message)
            if cause and cause.at_once:
                return explained(pod)
            if cause and cause.blocks:
                found[pod.name] = explained(pod)
            if cause and (pod.name, cause.pattern) not in self._said:
                self._said.add((pod.name, cause.pattern))
                self._on_note(explained(pod))
        failed = failed_pods(run.nodes)
        if failed and not is_busy(run.nodes):
            found[""] = f"{explained(failed[0])}; no pod of the run has begun since then"
        now = time.monotonic()
        self._since = {each: self._since.get(each, now) for each in found}
        for each, since in self._since.items():
            if now - since >= (START_SECONDS if each else STALL_SECONDS):
                return found[each]
        return ""


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
            if not step.pod:
                raise InstanceError(f"{step.name} has no pod yet")
            text = log_of(self._client, run.run_id, run.created, step.pod)
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
    """Pass on the logs of a run, or `only` of one step; return the run as it was seen last.

    `on_text` is called with the name of a step and new whole lines, `on_note` with what has no log.
    Raises `UserError`.
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
        on_note(f"no log of {step.name}: {error}; {_instead(client, last, step)}")
    if last.impasse:
        on_note(last.impasse)
    if follower.refused and not follower.has_found:
        step, _ = next(iter(follower.refused.values()))
        raise UserError(
            f"{client.access.endpoint} gives no log of the run {run.run_id}; "
            f"{_instead(client, last, step)}"
        )
    return last


def _instead(client: Client, run: RemoteRun, step: Step) -> str:
    """Return where a person finds what a log that the instance does not return would say."""
    namespace = client.access.namespace or "kubeflow"
    if run.has_ended:
        record = storage.join(run.at, "steps", f"{step.name}.json") if run.at else ""
        where = f"what the step reported is in {record}" if record else "see `flotilla status`"
        return f"KFP removes pods with their logs an hour after the end; {where}"
    return f"read it by `kubectl logs -n {namespace} {step.pod or '-'} -c main`"


def _ignore(_seen: object) -> None:
    pass

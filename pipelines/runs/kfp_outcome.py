"""The result of a run on a KFP instance, from the records of its stages or from its nodes.

KFP reports whether a run has ended, and the records below its root tell how its stages ended. The
records are read with this machine's credentials, or through the user interface. If the records
cannot be read, the states of the nodes tell which step failed, but not whether the model was
promoted. Argo's messages tell why a pod failed or does not start.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import UTC, datetime

from flotilla.components import table
from flotilla.components.records.run_store import STEPS as FOLDER
from flotilla.components.records.run_store import record_uri
from flotilla.components.records.step_record import StepRecord, read_records
from flotilla.pipelines.runs.kfp_client import ABSENT, Client, InstanceError, ask, one_line
from flotilla.pipelines.runs.kfp_run import (
    Nodes,
    Pod,
    RemoteRun,
    Step,
    has_pod,
    read_log,
    read_object,
)
from flotilla.pipelines.runs.outcome import RunResult, join_reasons
from flotilla.trainer.runtime.errors import DONE, FAILED, INTERRUPTED, REFUSED, USAGE, UserError
from flotilla.trainer.runtime.json_records import read_record
from flotilla.trainer.storage.store import shorter_retry

DATA, TRAINER = table.find_maker("validation"), table.find_maker("checkpoint")
GATE, REGISTRY = table.find_maker("decision"), table.find_maker("registration")
_Rows = Mapping[str, Sequence[StepRecord]]
# Status, exit code and message.
_Verdict = tuple[str, int, str]
# Steps of earlier versions that are now stages.
_OLD_STEPS = {stage.name for stage in table.STAGES} - {step.name for step in table.STEPS}
# How long requests to a store are retried, in seconds. A result can be returned without the store.
STORE_SECONDS = 10.0
# A step's termination message as Argo reports it, with the stage and the cause.
# `flotilla.components.records.record` writes it.
_TERMINATED = re.compile(r"main: Error \(exit code (?P<code>\d+)\): (?P<words>[a-z_]+: .+)")
# Argo's message for a node whose pod waits. It starts with the reason of the kubelet or scheduler.
# Other messages tell why Argo could not create the pod.
_OF_A_POD = re.compile(r"[A-Z][A-Za-z]+(: |$)")
# Seconds without a pod after which a run is considered lost. Argo may be restarting until then.
LOST_SECONDS = 300.0
# The status of a step for each of its states in `kfp_run`.
_STATUS = {"SUCCEEDED": "done", "FAILED": "failed", "RUNNING": "running", "PENDING": "waiting"}


@dataclass(frozen=True, kw_only=True)
class _Published:
    """The published records of a run's steps. `unread` tells why they could not be read."""

    records: Mapping[str, StepRecord] = field(default_factory=dict)
    unread: str = ""


WORKFLOW_GONE = (
    "the Workflow and the pods of the run were deleted, so the instance will never report its end; "
    "archive and delete the run in the user interface, and start it again with `flotilla submit`"
)


def judge_run(client: Client, run: RemoteRun) -> RunResult:
    """Return the result of a run, or its progress."""
    published = _read_published(client, run.at) if run.steps or run.has_ended else _Published()
    rows = _rows(run, published)
    if run.has_ended:
        status, code, message = _judge_ended(client, run, published, rows)
    else:
        status, code, message = _judge_active(client, run)
    return RunResult(
        run_id=run.run_id,
        status=status,
        exit_code=code,
        message=message,
        steps=tuple(each for of_step in rows.values() for each in of_step),
        state=run.state,
        states={step.name: step.state for step in run.steps},
        page=client.page(f"runs/details/{run.run_id}"),
    )


def find_running_stages(client: Client, run: RemoteRun) -> Mapping[str, StepRecord] | None:
    """Return the record of each running step's current stage, or None if unreadable."""
    published = _read_published(client, run.at)
    if published.unread:
        return None
    rows = _rows(run, published)
    at = {step.name: rows[step.name][-1] for step in run.steps if step.state == "RUNNING"}
    return {name: record for name, record in at.items() if published.records.get(record.step)}


def _judge_active(client: Client, run: RemoteRun) -> _Verdict:
    if run.impasse:
        return "failed", FAILED, run.impasse
    found = find_pods(client, run)
    # A single negative answer may mean that this client cannot see the pods.
    words = explain_loss(client, run, found if run.state == "CANCELING" else found or None)
    if words and (run.state == "CANCELING" or _is_orphan(client, run)):
        return "failed", FAILED, words
    return "running", DONE, words or _obstacle(run)


def find_pods(client: Client, run: RemoteRun) -> bool | None:
    """Return whether any active pod of a run exists, or None if that is unknown."""
    active = [pod for pod in run.nodes.pods if pod.state in ("PENDING", "RUNNING")]
    found = [_exists(client, run, pod) for pod in active]
    if True in found:
        return True
    return None if None in found or not found else False


def explain_loss(client: Client, run: RemoteRun, found: bool | None) -> str:
    """Return why the end of a run will perhaps never be reported, or an empty string.

    If the Workflow of a run was deleted, the instance keeps the last reported state. Deleting a
    schedule may also delete the Workflows of its runs. `found` is the result of `find_pods`.
    """
    if found:
        return ""
    if _is_orphan(client, run):
        return f"the schedule {run.schedule_id} was deleted: {WORKFLOW_GONE}"
    is_idle = not is_busy(run.nodes) and _idle_seconds(run) >= LOST_SECONDS
    if found is False or is_idle:
        return f"if this run does not end within minutes, {WORKFLOW_GONE}"
    return ""


def _is_orphan(client: Client, run: RemoteRun) -> bool:
    return bool(run.schedule_id) and _is_deleted(client, run.schedule_id)


def _idle_seconds(run: RemoteRun) -> float:
    """Return the time since the last step ended, or 0 if no step has ended."""
    ended = [step.ended for step in run.steps if step.ended]
    return (datetime.now(UTC) - max(ended)).total_seconds() if ended else 0.0


def _is_deleted(client: Client, schedule_id: str) -> bool:
    try:
        ask(client.get_recurring_run, schedule_id)
    except InstanceError as error:
        return error.status == ABSENT
    return False


def _exists(client: Client, run: RemoteRun, pod: Pod) -> bool | None:
    """Return whether an active pod exists, or None if that is unknown."""
    if pod.state == "PENDING" and not _OF_A_POD.match(pod.message):
        # Argo has perhaps not created the pod yet, for example because a quota is exceeded.
        return None
    found = has_pod(client, pod.name)
    if found is not None or pod.state == "PENDING":
        return found
    try:
        read_log(client, run.run_id, run.created, pod.name)
    except InstanceError as error:
        return False if error.status == ABSENT else None
    return True


def _obstacle(run: RemoteRun) -> str:
    return next(map(explain_pod, waiting_pods(run.nodes)), "")


def _read_published(client: Client, at: str) -> _Published:
    if not at:
        return _Published(unread="the storage root of the run is unknown")
    try:
        with shorter_retry(STORE_SECONDS):
            found = read_records(at)
    except UserError as error:
        found = _read_through_page(client, at)
        if not found:
            unread = f"this machine cannot read the run's metrics below {at}: {error}"
            return _Published(unread=unread)
    return _Published(records={each.step: each for each in found})


def _read_through_page(client: Client, at: str) -> list[StepRecord]:
    """Read the records through the user interface, if the endpoint serves it."""
    found: list[StepRecord] = []
    if not client.page(""):
        return found
    stages = (each.name for row in (*table.STEPS, *table.SWEEP_STEPS) for each in row.stages)
    for name in dict.fromkeys(stages):
        try:
            data = read_object(client, record_uri(at, FOLDER, name))
        except InstanceError as error:
            if error.status != ABSENT:
                return []
            continue
        if record := read_record(StepRecord, data):
            found.append(record)
    return sorted(found, key=lambda record: record.began)


def _rows(run: RemoteRun, published: _Published) -> _Rows:
    """Return the records of each step's stages. KFP's state tells how the step itself ended."""
    if not run.steps:
        return {name: [record] for name, record in published.records.items()}
    is_old = _has_old_steps(run)
    return {
        step.name: _make_rows(step, (step.name,) if is_old else _list_stages(step.name), published)
        for step in run.steps
    }


def _has_old_steps(run: RemoteRun) -> bool:
    """Return whether each stage is a separate step, as in earlier versions."""
    return any(step.name in _OLD_STEPS for step in run.steps)


def _list_stages(step: str) -> tuple[str, ...]:
    try:
        return tuple(stage.name for stage in table.find_step(step).stages)
    except LookupError:
        return (step,)


def _make_rows(step: Step, stages: Sequence[str], published: _Published) -> list[StepRecord]:
    """Return the stages of a step up to the current one, or one row for the step itself.

    A recreated pod starts again with the first stage. Until it rewrites the records of later
    stages, they belong to an earlier attempt.
    """
    found = [record for name in stages if (record := published.records.get(name))]
    if not found or step.state not in ("RUNNING", "SUCCEEDED", "FAILED"):
        return [_row(step, step.name)]
    at = max(found, key=lambda each: (each.began, stages.index(each.step)))
    done = stages[: stages.index(at.step)]
    rows = [_done(step, name, published) for name in done]
    later = stages[len(done) + 1 :]
    if not later or table.ends_run(at.step, at.metrics.get("decision")):
        later = ()
    if step.state == "SUCCEEDED":
        return [*rows, *(_done(step, name, published) for name in (at.step, *later))]
    if at.ended is None:
        status = "running" if step.state == "RUNNING" else "failed"
        until = step.ended.timestamp() if step.ended else time.time()
        return [*rows, replace(at, status=status, seconds=round(max(until - at.began, 0.0), 2))]
    if step.state == "RUNNING" or at.status != "done":
        return [*rows, at]
    if later:
        return [*rows, at, _row(step, later[0])]
    return [*rows, replace(at, status="failed")]


def _done(step: Step, stage: str, published: _Published) -> StepRecord:
    """Return the record of a finished stage, without results if they were not published."""
    said = published.records.get(stage)
    if said and said.ended is not None and said.status == "done":
        return said
    return replace(_row(step, stage), status="done")


def _row(step: Step, name: str) -> StepRecord:
    """Make the record of a step, or of one of its stages, from the state of the step's node."""
    return StepRecord(
        step=name,
        status=_STATUS.get(step.state, "skipped"),
        began=step.began.timestamp() if step.began else 0.0,
        seconds=step.seconds,
    )


def _judge_ended(client: Client, run: RemoteRun, published: _Published, rows: _Rows) -> _Verdict:
    if run.state == "CANCELED":
        return "canceled", INTERRUPTED, "the run was cancelled"
    if run.state != "SUCCEEDED":
        return "failed", *_failure(client, run, published, rows)
    return _judge_decision(run, published)


def _judge_decision(run: RemoteRun, published: _Published) -> _Verdict:
    """Determine the result of a successful run from the results of its stages."""
    if not run.steps and published.unread:
        return _unknown("the decisions of its steps", DATA, published)
    if not _has_run(run, published, GATE):
        return _judge_untrained(run, published)
    if _has_run(run, published, REGISTRY):
        return _judge_registration(published)
    gate = published.records.get(GATE.name)
    if gate and gate.metrics.get("decision") == GATE.accepts:
        return "failed", FAILED, f"the model was {GATE.accepts}, but {REGISTRY.name} did not run"
    reasons = _reasons(gate)
    return "refused", REFUSED, reasons or _and("the gate refused the model", published.unread)


def _has_run(run: RemoteRun, published: _Published, stage: table.StageSpec) -> bool:
    """Return whether a successful run ran a stage, by the state of its step or by its record."""
    if not run.steps:
        return published.records.get(stage.name) is not None
    name = stage.name if _has_old_steps(run) else table.find_step_of_stage(stage.name).name
    return any((step.name, step.state) == (name, "SUCCEEDED") for step in run.steps)


def _judge_untrained(run: RemoteRun, published: _Published) -> _Verdict:
    for row in table.STAGES:
        if (said := published.records.get(row.name)) and table.ends_well(
            row.name, said.metrics.get("decision")
        ):
            return row.completes, DONE, _reasons(said)
    if _has_run(run, published, TRAINER) or not _has_run(run, published, DATA):
        return "done", DONE, ""
    said = published.records.get(DATA.name)
    if said and said.metrics.get("decision") == DATA.accepts:
        message = f"the data was {DATA.accepts}, but {TRAINER.name} did not run"
        return "failed", FAILED, message
    if said:
        return "refused", REFUSED, _reasons(said) or "the data was refused"
    return _unknown("the reason why it did not train", DATA, published)


def _judge_registration(published: _Published) -> _Verdict:
    registry = published.records.get(REGISTRY.name)
    decision = registry.metrics.get("decision") if registry else None
    if decision == REGISTRY.accepts:
        return "blessed", DONE, ""
    if decision == "refused":
        return "refused", REFUSED, _reasons(registry) or "the registry refused the model"
    return _unknown("the decision of the registry", REGISTRY, published)


def _unknown(what: str, row: table.StageSpec, published: _Published) -> _Verdict:
    why = published.unread or f"{row.name} recorded no decision"
    return "unknown", FAILED, f"the run has finished, but {what} cannot be read: {why}"


def _reasons(record: StepRecord | None) -> str:
    return join_reasons((record.metrics.get("reasons") or ()) if record else ())


def _and(message: str, more: str) -> str:
    return f"{message}; {more}" if more else message


def _failure(client: Client, run: RemoteRun, published: _Published, rows: _Rows) -> tuple[int, str]:
    """Return the exit code and the cause from the first failed step, or from KFP."""
    pods = find_failed_pods(run.nodes)
    # Prefer a step other than the exit step, which may fail because of an earlier failure.
    first = next((pod for pod in pods if pod.step != table.EXIT_STEP.name), next(iter(pods), None))
    if first is None:
        said = next((each for each in published.records.values() if each.error), None)
        if said:
            return _exit_code(said), f"{said.step}: {said.error}"
        return FAILED, _and(run.error or "KFP gives no reason for the failure", published.unread)
    if first.is_driver:
        return FAILED, explain_pod(first, _last_words(client, run, first))
    at = next(reversed(rows.get(first.step, ())), None)
    if at and at.error:
        # If the step was stopped, KFP's message tells more than the record.
        more = first.message if at.exit_code == INTERRUPTED else ""
        return _exit_code(at), _and(f"{at.step}: {at.error}", more)
    if left := _TERMINATED.fullmatch(first.message):
        # The record could not be written, but the pod's termination message states the cause.
        return USAGE if int(left["code"]) == USAGE else FAILED, left["words"]
    pod = replace(first, step=at.step) if at else first
    return FAILED, _and(explain_pod(pod), published.unread)


def _exit_code(record: StepRecord) -> int:
    return USAGE if record.exit_code == USAGE else FAILED


def _last_words(client: Client, run: RemoteRun, pod: Pod) -> str:
    """Return the last line of the driver's log, which states the cause, or "" if unreadable."""
    try:
        lines = read_log(client, run.run_id, run.created, pod.name).splitlines()
    except InstanceError:
        return ""
    return next((one_line(line) for line in reversed(lines) if line.strip()), "")


_IMAGE = (
    "pass an existing image with `flotilla upload --image` or `flotilla submit --image`, or check "
    "the pull secret (`flotilla upload --pull-secret`, or the secret of the service account)"
)
_DRIVER = (
    "check the service account, the pipeline root and its credentials, and the settings of "
    "the pods, such as `flotilla upload --cpu`"
)


@dataclass(frozen=True)
class Cause:
    """The meaning of an Argo message.

    Attributes:
        blocks: whether a pod with this message usually does not start until the cause is fixed.
        at_once: whether such a pod never starts, so waiting does not help.
        of_image: whether the image cannot be pulled.
    """

    pattern: str
    remedy: str
    _: KW_ONLY
    blocks: bool = False
    at_once: bool = False
    of_image: bool = False


CAUSES = (
    Cause(
        r"^(InvalidImageName|ErrImageNeverPull)", _IMAGE, blocks=True, at_once=True, of_image=True
    ),
    Cause(
        r"^(ErrImagePull|ImagePullBackOff|ImageInspectError|RegistryUnavailable)"
        r"|due to (ErrImagePull|ImagePullBackOff|InvalidImageName)",
        _IMAGE,
        blocks=True,
        of_image=True,
    ),
    Cause(
        r"^(CreateContainerConfigError|CreateContainerError|RunContainerError)",
        "create the secret that the message names, or upload with another --store-secret",
        blocks=True,
    ),
    Cause(
        r"persistentvolumeclaim \S+ (not found|is being deleted)",
        "create the claim in the namespace of the steps, or upload with another --mount",
        blocks=True,
    ),
    Cause(
        r"unbound immediate PersistentVolumeClaims",
        "its persistent volume claim has no volume: see `kubectl describe pvc`",
        blocks=True,
    ),
    Cause(
        r"Usage of EmptyDir volume .* exceeds the limit",
        "its temporary files exceeded the size limit: upload with a larger --scratch",
    ),
    Cause(
        r"^Unschedulable",
        "no node has enough capacity: upload with less --cpu, --memory or --gpus, or add a node",
    ),
    Cause(
        r"serviceaccount \S+ not found",
        "create the service account, or pass an existing one with --service-account",
    ),
    Cause(
        r"exceeded quota",
        "ask for a larger quota for the namespace, or upload with less --cpu and --memory",
    ),
    Cause(r"is forbidden", "ask the owner of the namespace for permission"),
    Cause(r"OOMKilled", "it ran out of memory: upload with more --memory"),
    Cause(
        r"longer than (the )?specified deadline|exceeded its deadline",
        "it exceeded the deadline of the step",
    ),
)


def explain_message(message: str) -> Cause | None:
    """Return the known cause of an Argo message, or None if it is unknown."""
    return next((each for each in CAUSES if re.search(each.pattern, message)), None)


def explain_pod(pod: Pod, more: str = "") -> str:
    """Return a message about a failed or waiting pod. `more` is the end of its log."""
    cause, step = explain_message(pod.message), pod.step or "the run"
    what = "its KFP driver failed" if pod.is_driver else "its pod failed"
    if pod.state == "PENDING":
        what = "its pod cannot start" if cause and cause.blocks else "its pod is waiting"
    if cause and cause.of_image and pod.image:
        what = f"the image {pod.image} cannot be pulled"
    words = "; ".join(filter(None, (pod.message, more))) or "KFP gives no more details"
    remedy = cause.remedy if cause else (_DRIVER if pod.is_driver else "")
    return f"{step}: {what} ({words})" + (f": {remedy}" if remedy else "")


def find_failed_pods(nodes: Nodes) -> tuple[Pod, ...]:
    """Return the failed pods in the order of their start."""
    return tuple(pod for pod in nodes.pods if pod.state == "FAILED")


def waiting_pods(nodes: Nodes) -> tuple[Pod, ...]:
    """Return the pods that have not started and for which Argo gives a reason."""
    return tuple(pod for pod in nodes.pods if pod.state == "PENDING" and pod.message)


def is_busy(nodes: Nodes) -> bool:
    """Return whether a pod is running or will start, perhaps after a pause of minutes."""
    return nodes.is_pausing or any(pod.state in ("PENDING", "RUNNING") for pod in nodes.pods)

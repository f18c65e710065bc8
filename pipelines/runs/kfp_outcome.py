"""The result of a run on a KFP instance: from the records of its steps, else from its nodes.

KFP says whether a run has ended; the records below its root say how its steps ended. They are read
with the keys of this machine, else by way of the user interface. Without them the states of the
nodes show which step failed, but not whether the model was promoted. Argo's messages say why a pod
failed or does not start.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from components.records.step_record import StepRecord, published_records
from components.table import EXIT_STEP, STEPS, UNCHANGED, maker_of
from pipelines.runs.kfp_client import Client, InstanceError, one_line
from pipelines.runs.kfp_nodes import Nodes, Pod, Step, log_of, object_at
from pipelines.runs.kfp_run import RemoteRun
from pipelines.runs.outcome import RunResult, joined
from trainer import storage
from trainer.errors import DONE, FAILED, INTERRUPTED, REFUSED, UserError
from trainer.json_records import record_in
from trainer.storage.retry import shorter_retry

DATA, TRAINER = maker_of("validation"), maker_of("checkpoint")
GATE, REGISTRY = maker_of("decision"), maker_of("registration")
# So long a store may fail; there is an answer without it.
STORE_SECONDS = 10.0
_ABSENT = 404
_STATUS = {
    "SUCCEEDED": "done",
    "CANCELED": "interrupted",
    "FAILED": "failed",
    "RUNNING": "running",
    "PENDING": "waiting",
    "CANCELING": "ending",
    "PAUSED": "paused",
}


@dataclass(frozen=True, kw_only=True)
class _Published:
    """What the steps of a run have published; `unread` says why that is not known, else empty."""

    records: Mapping[str, StepRecord] = field(default_factory=dict)
    unread: str = ""

    def of(self, step: str) -> StepRecord | None:
        return self.records.get(step)


def result_of(client: Client, run: RemoteRun) -> RunResult:
    """Return the result of a run, or how far it has come."""
    if run.has_ended:
        published = _published(client, run.at)
        records = _records(run, published)
        status, code, message = _ended(client, run, published)
    else:
        records = tuple(map(_record, run.steps))
        status, code, message = "running", DONE, _obstacle(run)
        if run.impasse:
            status, code, message = "failed", FAILED, run.impasse
    return RunResult(
        run_id=run.run_id,
        status=status,
        exit_code=code,
        message=message,
        steps=records,
        state=run.state,
        states={step.name: step.state for step in run.steps},
        page=client.page(f"runs/details/{run.run_id}"),
    )


def _obstacle(run: RemoteRun) -> str:
    return next(map(explained, waiting_pods(run.nodes)), "")


def _published(client: Client, at: str) -> _Published:
    if not at:
        return _Published(unread="where the run publishes is not known")
    try:
        with shorter_retry(STORE_SECONDS):
            found = published_records(at)
    except UserError as error:
        found = _by_the_page(client, at)
        if not found:
            unread = f"its metrics are below {at}, which cannot be read here: {error}"
            return _Published(unread=unread)
    return _Published(records={each.step: each for each in found})


def _by_the_page(client: Client, at: str) -> list[StepRecord]:
    """Return the records by way of the user interface, where the endpoint is its address."""
    found: list[StepRecord] = []
    if not client.page(""):
        return found
    for row in STEPS:
        try:
            data = object_at(client, storage.join(at, "steps", f"{row.name}.json"))
        except InstanceError as error:
            if error.status != _ABSENT:
                return []
            continue
        if record := record_in(StepRecord, data):
            found.append(record)
    return sorted(found, key=lambda record: record.began)


def _record(step: Step) -> StepRecord:
    """Return the record of a step as far as its state tells it."""
    return StepRecord(
        step=step.name,
        status="cached" if step.cached else _STATUS.get(step.state, "skipped"),
        began=step.began.timestamp() if step.began else 0.0,
        seconds=step.seconds,
    )


def _records(run: RemoteRun, published: _Published) -> tuple[StepRecord, ...]:
    if not run.steps:
        # An instance without nodes.
        return tuple(published.records.values())
    return tuple(_known(step, published) for step in run.steps)


def _known(step: Step, published: _Published) -> StepRecord:
    """Return what is known of a step. KFP decides how it ended."""
    record, said = _record(step), published.of(step.name)
    if said is None or said.ended is None:
        return record
    if record.status == "done" and said.status != "done":
        # The record is that of an earlier try.
        return record
    return replace(said, status=record.status)


def _ended(client: Client, run: RemoteRun, published: _Published) -> tuple[str, int, str]:
    if run.state == "CANCELED":
        return "canceled", INTERRUPTED, "the run was cancelled"
    if run.state != "SUCCEEDED":
        return "failed", FAILED, _failure(client, run, published)
    states = {step.name: step.state for step in run.steps}
    # Without nodes, a step of a run that succeeded has succeeded where it has a record.
    states = states or dict.fromkeys(published.records, "SUCCEEDED")
    if states.get(GATE.name, "SKIPPED") == "SKIPPED":
        return _without_gate(states, published)
    if states.get(REGISTRY.name) == "SUCCEEDED":
        return _judged(published)
    gate = published.of(GATE.name)
    if gate and gate.metrics.get("decision") == GATE.accepts:
        return "failed", FAILED, f"the model was {GATE.accepts}, but {REGISTRY.name} was not run"
    reasons = _reasons(gate)
    return "refused", REFUSED, reasons or _and("the gate refused the model", published.unread)


def _without_gate(states: Mapping[str, str], published: _Published) -> tuple[str, int, str]:
    first = published.of(STEPS[0].name)
    is_unchanged = first and first.metrics.get("decision") == UNCHANGED
    if states.get(DATA.name) == "SKIPPED" or (is_unchanged and DATA.name not in states):
        return UNCHANGED, DONE, _reasons(first)
    if DATA.name not in states or states.get(TRAINER.name, "SKIPPED") != "SKIPPED":
        return "done", DONE, ""
    said = published.of(DATA.name)
    if said and said.metrics.get("decision") == DATA.accepts:
        message = f"the data was {DATA.accepts}, but {TRAINER.name} was not run"
        return "failed", FAILED, message
    reasons = _reasons(said)
    return "refused", REFUSED, reasons or _and("the data was refused", published.unread)


def _judged(published: _Published) -> tuple[str, int, str]:
    registry = published.of(REGISTRY.name)
    decision = registry.metrics.get("decision") if registry else None
    if decision == REGISTRY.accepts:
        return "blessed", DONE, ""
    if decision == "refused":
        return "refused", REFUSED, _reasons(registry) or "the registry refused the model"
    why = published.unread or f"{REGISTRY.name} has left no record of its decision"
    message = f"the run is done, but what the registry decided cannot be read: {why}"
    return "unknown", FAILED, message


def _reasons(record: StepRecord | None) -> str:
    return joined((record.metrics.get("reasons") or ()) if record else ())


def _and(message: str, more: str) -> str:
    return f"{message}; {more}" if more else message


def _failure(client: Client, run: RemoteRun, published: _Published) -> str:
    """Return the cause of a failure: what the first step that failed says, else what KFP says."""
    pods = failed_pods(run.nodes)
    # The exit step runs after the failure and may fail because of it.
    first = next((pod for pod in pods if pod.step != EXIT_STEP.name), next(iter(pods), None))
    if first is None:
        said = (each for each in published.records.values() if each.error)
        own = next((f"{each.step}: {each.error}" for each in said), "")
        return own or _and(run.error or "KFP does not say why it failed", published.unread)
    record = published.of(first.step)
    if record and record.error and not first.is_driver:
        # KFP's words add to what a step says of being stopped, and to nothing else.
        more = first.message if record.exit_code == INTERRUPTED else ""
        return _and(f"{first.step}: {record.error}", more)
    if first.is_driver:
        return explained(first, _last_words(client, run, first))
    return _and(explained(first), published.unread)


def _last_words(client: Client, run: RemoteRun, pod: Pod) -> str:
    """Return the last line of the log of KFP's driver, which alone has the cause; or nothing."""
    try:
        lines = log_of(client, run.run_id, run.created, pod.name).splitlines()
    except InstanceError:
        return ""
    return next((one_line(line) for line in reversed(lines) if line.strip()), "")


_IMAGE = (
    "name one that is there by --image of `flotilla upload` or `flotilla submit`, or check "
    "the pull secret: that of `flotilla upload --pull-secret`, or of the service account"
)
_DRIVER = (
    "check the service account, the pipeline root and its keys, and the settings of "
    "the pods, such as --cpu of `flotilla upload`"
)


@dataclass(frozen=True, kw_only=True)
class Cause:
    """What a message of Argo means.

    Attributes:
        blocks: whether a pod that waits for this does not start by itself as a rule.
        at_once: whether that is certain, so that nobody has to wait for it.
        of_image: whether it is the image that cannot be had.
    """

    pattern: str
    remedy: str
    blocks: bool = False
    at_once: bool = False
    of_image: bool = False


CAUSES = (
    Cause(
        pattern=r"^(InvalidImageName|ErrImageNeverPull)",
        remedy=_IMAGE,
        blocks=True,
        at_once=True,
        of_image=True,
    ),
    Cause(
        pattern=r"^(ErrImagePull|ImagePullBackOff|ImageInspectError|RegistryUnavailable)"
        r"|due to (ErrImagePull|ImagePullBackOff|InvalidImageName)",
        remedy=_IMAGE,
        blocks=True,
        of_image=True,
    ),
    Cause(
        pattern=r"^(CreateContainerConfigError|CreateContainerError|RunContainerError)",
        remedy="create the secret or config map that it names, or fix the run parameter",
        blocks=True,
    ),
    Cause(
        pattern=r"persistentvolumeclaim \S+ (not found|is being deleted)",
        remedy="create the claim in the namespace of the steps, or upload with another --mount",
        blocks=True,
    ),
    Cause(
        pattern=r"unbound immediate PersistentVolumeClaims",
        remedy="its claim has no volume: look at it with kubectl describe pvc",
        blocks=True,
    ),
    Cause(
        pattern=r"Usage of EmptyDir volume .* exceeds the limit",
        remedy="its temporary files were more than its limit: upload with a higher --scratch",
    ),
    Cause(
        pattern=r"^Unschedulable",
        remedy="no node has the room: lower step_cpu, step_memory or step_gpus, or add a node",
    ),
    Cause(
        pattern=r"serviceaccount \S+ not found",
        remedy="create this service account, or name one that is there by --service-account",
    ),
    Cause(
        pattern=r"exceeded quota",
        remedy="ask for a larger quota of the namespace, or lower step_cpu and step_memory",
    ),
    Cause(pattern=r"is forbidden", remedy="ask the owner of the namespace for the permission"),
    Cause(pattern=r"OOMKilled", remedy="its memory was not enough: raise step_memory"),
    Cause(
        pattern=r"longer than (the )?specified deadline|exceeded its deadline",
        remedy="it took longer than the deadline of the step",
    ),
)


def cause_of(message: str) -> Cause | None:
    """Return what a message means, None where that is not known."""
    return next((each for each in CAUSES if re.search(each.pattern, message)), None)


def explained(pod: Pod, more: str = "") -> str:
    """Return the line for a pod that failed or waits; `more` is what its log ends with."""
    cause, step = cause_of(pod.message), pod.step or "the run"
    what = "KFP's own driver of it failed" if pod.is_driver else "its pod failed"
    if pod.state == "PENDING":
        what = "its pod cannot start" if cause and cause.blocks else "its pod waits"
    if cause and cause.of_image and pod.image:
        what = f"the image {pod.image} cannot be pulled"
    words = "; ".join(filter(None, (pod.message, more))) or "KFP says nothing more"
    remedy = cause.remedy if cause else (_DRIVER if pod.is_driver else "")
    return f"{step}: {what} ({words})" + (f": {remedy}" if remedy else "")


def failed_pods(nodes: Nodes) -> tuple[Pod, ...]:
    """Return the pods that failed, in the order in which they began."""
    return tuple(pod for pod in nodes.pods if pod.state == "FAILED")


def waiting_pods(nodes: Nodes) -> tuple[Pod, ...]:
    """Return the pods that do not start, for a reason that Argo names."""
    return tuple(pod for pod in nodes.pods if pod.state == "PENDING" and pod.message)


def is_busy(nodes: Nodes) -> bool:
    """Return whether a pod is running or about to, if need be after a pause of minutes."""
    return nodes.is_pausing or any(pod.state in ("PENDING", "RUNNING") for pod in nodes.pods)

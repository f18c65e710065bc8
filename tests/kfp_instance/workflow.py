"""The nodes, pod logs and records of a run, as KFP 2.17 and Argo 4.0.5 write them.

KFP configures Argo so that every template has a retry strategy. Each task therefore has a node `x`
and a node `x(0)` for its first try. A step consists of a task `x-driver` and a task `x`, which
contains a task `executor`; the step's pod is the pod of `executor(0)`. A node's ID consists of the
workflow's name and the FNV-1a hash of the node's name; in the pod's name, the template's name is
between the two. The API's list of nodes does not contain pod names.

Each group of steps, including the root, also has a driver. The nodes form the graph of Flotilla's
pipeline: all steps after the first are in a conditional group, and the export is in a nested group.

The code of a step writes the records of its stages below the root of the run. KFP deletes the
pods some time after the run ends; from then on, the logs are in the archive and the nodes in the
database.
"""

import itertools
import json
import logging
from datetime import UTC, datetime, timedelta
from typing import Any

from flotilla.components.records.step_record import PublishedRecord
from flotilla.components.table import EXPORT, PREPARE, ends_run, find_step_of_stage
from flotilla.trainer import events, storage
from flotilla.trainer.events import Event, StepBegin, StepEnd

WORKFLOW = "flotilla-training-x7z2p"
BEGIN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
# KFP compiles one template for each combination of the numbers of pod annotations and labels.
EXECUTOR = "metadata-0-6-retry-system-container-executor"
IMPLEMENTATION = "metadata-0-6-retry-system-container-impl"
IMAGE = "registry.example/flotilla:1"
# Names that the SDK gives the nested conditional groups.
CONDITIONS = ("condition-2", "condition-3")
Node = dict[str, Any]


def moment(second: int) -> str:
    return f"{BEGIN + timedelta(seconds=second):%Y-%m-%dT%H:%M:%SZ}"


def fnv(name: str) -> int:
    value = 0x811C9DC5
    for byte in name.encode():
        value = (value ^ byte) * 0x01000193 % 2**32
    return value


class Workflow:
    """The nodes of one run; each change happens one second after the previous one.

    Methods that take a step also accept the name of any of its stages.

    Attributes:
        has_old_steps: whether each stage is a separate step, as in older pipelines.
        logs, archive: the logs of existing pods, and of deleted pods.
        disk: URI of the folder with the buckets of a store that only the instance can read.
        is_gone: whether the workflow was deleted; the API still returns its last reported state.
    """

    def __init__(
        self, run_id: str, *, pipeline_root: str = "", storage_root: str = "", disk: str = ""
    ) -> None:
        self.run_id = run_id
        self.nodes: list[Node] = []
        self.logs: dict[str, str] = {}
        self.archive: dict[str, str] = {}
        self.active_deadline: int | None = None
        self.pods_go = False
        self.is_gone = False
        self.has_old_steps = False
        self._pipeline_root = pipeline_root or "minio://mlpipeline/v2/artifacts"
        self._storage_root = storage_root
        self.disk = disk
        self.root = storage_root or f"{self._pipeline_root}/flotilla"
        self._seconds = itertools.count()
        self._records: dict[str, PublishedRecord] = {}
        self._outer = self._tried(WORKFLOW, "entrypoint", "DAG")
        self._pod_of(f"{self._outer}.root-driver", "system-dag-driver", "Succeeded")
        self._outer = self._tried(f"{self._outer}.root", "root", "DAG")
        self._handler = f"{self._outer}.exit-handler-1"
        self._outer = self._enter(self._handler)

    def begin(self, step: str, *, image: str = IMAGE) -> None:
        """Start the step of a stage, unless it has started; its code writes nothing yet."""
        if self._has(step):
            return
        self._drive(step)
        executor = f"{self._group(step)}(0).executor"
        self._pod_of(executor, IMPLEMENTATION, "Running")
        self._last(step)["inputs"] = self._pod_spec(step, image)
        self.logs[self.pod(step)] = ""

    def wait(self, step: str, message: str, *, image: str = IMAGE) -> None:
        if not self._has(step):
            self.begin(step, image=image)
            del self.logs[self.pod(step)]
        self._last(step).update(phase="Pending", message=message)

    def write(self, step: str, text: str) -> None:
        self.logs[self.pod(step)] += text

    def say_begin(self, stage: str) -> None:
        self.write(stage, log_of(StepBegin(step=stage)))
        folder = self.root
        if not folder.startswith("file://"):
            folder = f"{self.disk}/{self.root.partition('://')[2]}" if self.disk else ""
        if not folder:
            return
        at = storage.join(folder, self.run_id)
        self._records[stage] = PublishedRecord(stage, at)
        self._records[stage].begin()

    def say_progress(self, stage: str, **metrics: Any) -> None:
        self._records[stage].progress(metrics)

    def end(self, stage: str, state: str = "SUCCEEDED", **record: Any) -> None:
        """End a stage with an outcome; its step ends after its last stage or after a failure."""
        status = "done" if state == "SUCCEEDED" else "failed"
        whole = {"status": status, "exit_code": 0 if status == "done" else 1, "seconds": 1.5}
        self.say_begin(stage)
        ended = StepEnd(step=stage, **{**whole, **record})
        self.write(stage, log_of(ended))
        if stage in self._records:
            self._records[stage].end(ended)
        last = self.has_old_steps or stage == find_step_of_stage(stage).stages[-1].name
        if last or status == "failed" or ends_run(stage, ended.metrics.get("decision")):
            self.stop(stage, state)

    def stop(self, step: str, state: str, message: str = "") -> None:
        """End a step that wrote no record; KFP has only its pod's message."""
        failed = state == "FAILED"
        said = message or ("main: Error (exit code 1)" if failed else "")
        self._close(self._group(step), "Failed" if failed else "Succeeded", pod_message=said)

    def lose_pod(self, step: str, pause: str = "1 minutes 0 seconds") -> None:
        """Delete the pod of a step; Argo waits before it creates the next one."""
        last = self._last(step)
        last.update(phase="Error", finishedAt=self._now(), message="pod deleted")
        self._named(last["name"].rpartition("(")[0])["message"] = f"Backoff for {pause}"

    def try_again(self, step: str) -> None:
        last = self._last(step)
        name, _, number = last["name"].removesuffix(")").rpartition("(")
        self._named(name)["message"] = ""
        again = self._node(f"{name}({int(number) + 1})", last["templateName"], "Pod", "Running")
        again["inputs"] = last["inputs"]
        self.logs[self.pod(step)] = ""

    def fail_driver(self, step: str, message: str = "main: Error (exit code 1)") -> None:
        """Let KFP's driver fail, for a step or for the whole run (`root`)."""
        if step == "root":
            self.nodes, self.logs, self._outer = [], {}, ""
            self._outer = self._tried(WORKFLOW, "entrypoint", "DAG")
        self._enter_conditions(step)
        kind = "dag" if step == "root" else "container"
        phase = "Failed" if message.startswith("main: ") else "Error"
        driver = f"{self._group(step)}-driver"
        pod = self._pod_of(driver, f"system-{kind}-driver", phase, message)
        self.omit(step)
        if phase == "Failed":
            self.logs[pod] = "I0102 driver.go:1] reads its input\nF0102 main.go:9] KFP driver: "
            self.logs[pod] += "driver.Container(run=1) failed: no such bucket\n"

    def omit(self, step: str) -> None:
        self._node(self._group(step), EXECUTOR, "Skipped", "Omitted")

    def skip(self) -> None:
        outer = self._outer
        for name in CONDITIONS:
            group = f"{outer}.{name}"
            if not self._is_there(group):
                self._pod_of(f"{group}-driver", "system-dag-driver", "Succeeded")
                node = self._node(group, f"comp-{name}", "Skipped", "Skipped")
                node["message"] = "when 'false != false' evaluated false"
                return
            outer = f"{group}(0)"

    def terminate(self) -> None:
        """Terminate the run as Argo does when KFP sets the workflow's deadline to 0 seconds."""
        self.active_deadline = 0
        for node in self.nodes:
            if node["phase"] in ("Running", "Pending"):
                is_pod = node["type"] == "Pod"
                node["message"] = "main: Error (exit code 143)" if is_pod else ""
                node.update(phase="Failed", finishedAt=self._now())

    def lose_pods(self) -> None:
        """Delete the pods, as KFP does some time after the run ends; their logs are archived."""
        self.archive.update(self.logs)
        self.logs.clear()

    def collect(self) -> None:
        """Delete the workflow and its pods; the logs of pods that are still running are lost."""
        running = {pod_name(node) for node in self.nodes if node["phase"] == "Running"}
        self.archive.update({pod: log for pod, log in self.logs.items() if pod not in running})
        self.logs.clear()
        self.is_gone = True

    def pod(self, step: str) -> str:
        return pod_name(self._last(step))

    def pods(self) -> set[str]:
        """Return the names of the pods that exist."""
        pending = {pod_name(node) for node in self.nodes if node["phase"] == "Pending"}
        return set() if self.is_gone else self.logs.keys() | pending

    def manifest(self) -> str:
        """Return the workflow as JSON text, as API version v1beta1 does."""
        nodes = {node["id"]: node for node in self.nodes}
        phase = self.nodes[0]["phase"] if self.nodes else ""
        spec: dict[str, Any] = {"entrypoint": "entrypoint"}
        if self.active_deadline is not None:
            spec["activeDeadlineSeconds"] = self.active_deadline
        return json.dumps(
            {
                "metadata": {"name": WORKFLOW, "namespace": "kubeflow", "annotations": {}},
                "spec": spec,
                "status": {"phase": phase, "nodes": nodes},
            }
        )

    def _enter(self, group: str) -> str:
        """Add a group of steps and its driver; return the name of the group's first try."""
        self._pod_of(f"{group}-driver", "system-dag-driver", "Succeeded")
        return self._tried(group, f"comp-{group.rpartition('.')[2]}", "DAG")

    def _enter_conditions(self, step: str) -> None:
        outer = self._outer
        for name in self._conditions(step):
            if not self._is_there(f"{outer}.{name}"):
                self._enter(f"{outer}.{name}")
            outer = f"{outer}.{name}(0)"

    def _drive(self, step: str) -> None:
        self._enter_conditions(step)
        self._pod_of(f"{self._group(step)}-driver", "system-container-driver", "Succeeded")
        self._tried(self._group(step), EXECUTOR, "DAG")

    def _tried(self, name: str, template: str, kind: str) -> str:
        """Add a node and its first try; return the name of the try."""
        self._node(name, template, "Retry", "Running")
        self._node(f"{name}(0)", template, kind, "Running")
        return f"{name}(0)"

    def _pod_of(self, name: str, template: str, phase: str, message: str = "") -> str:
        """Add a task that is a pod, and its first try; return the name of the pod."""
        for each, kind in ((name, "Retry"), (f"{name}(0)", "Pod")):
            node = self._node(each, template, kind, phase)
            if kind == "Pod" or message:
                node["message"] = message
        return pod_name(node)

    def _node(self, name: str, template: str, kind: str, phase: str) -> Node:
        began, outer = self._now(), name.rpartition(".")[0]
        id_of = f"{WORKFLOW}-{fnv(name)}" if name != WORKFLOW else WORKFLOW
        node: Node = {
            "id": id_of,
            "name": name,
            "displayName": name.removeprefix(f"{outer}.") if outer else name,
            "type": kind,
            "templateName": template,
            "phase": phase,
            "startedAt": began,
            "finishedAt": None if phase in ("Running", "Pending") else began,
            "children": [],
        }
        parent = name.removesuffix("(0)") if name.endswith("(0)") else outer
        for each in self.nodes:
            if each["name"] == parent and parent:
                each["children"].append(id_of)
        self.nodes.append(node)
        return node

    def _pod_spec(self, step: str, image: str) -> dict[str, Any]:
        name = self._kfp_name(step)
        place = f"{self._pipeline_root}/flotilla-training/{self.run_id}/{name}/77/place"
        given = {
            "inputs": {"parameterValues": {"storage_root": self._storage_root}},
            "outputs": {"artifacts": {"place": {"artifacts": [{"uri": place}]}}},
        }
        command = ["/kfp-launcher/launch", "--executor_input", json.dumps(given), "--"]
        spec = {"containers": [{"name": "main", "image": image, "command": command}]}
        return {"parameters": [{"name": "pod-spec-patch", "value": json.dumps(spec)}]}

    def _group(self, step: str) -> str:
        """Return the node name of a step; the exit step is in a hook of the exit handler."""
        if step != "finish":
            groups = (f"{name}(0)" for name in self._conditions(step))
            return ".".join((self._outer, *groups, self._kfp_name(step)))
        hook = f"{self._handler}.onExit"
        if not self._is_there(hook):
            self._tried(hook, "exit-hook-root-finish", "DAG")
        return f"{hook}(0).finish"

    def _conditions(self, step: str) -> tuple[str, ...]:
        if self.has_old_steps or step in ("root", "finish"):
            return ()
        return CONDITIONS[: {PREPARE: 0, EXPORT: 2}.get(find_step_of_stage(step).name, 1)]

    def _kfp_name(self, step: str) -> str:
        known = not self.has_old_steps and step != "root"
        return find_step_of_stage(step).kfp_name if known else step.replace("_", "-")

    def _has(self, step: str) -> bool:
        return self._is_there(self._group(step))

    def _is_there(self, name: str) -> bool:
        return any(each["name"] == name for each in self.nodes)

    def _named(self, name: str) -> Node:
        return next(each for each in self.nodes if each["name"] == name)

    def _last(self, step: str) -> Node:
        executor = f"{self._group(step)}(0).executor"
        found = [each for each in self.nodes if each["name"].startswith(executor)]
        return found[-1]

    def _close(self, name: str, phase: str, pod_message: str = "") -> None:
        now = self._now()
        for node in self.nodes:
            within = node["name"] == name or node["name"].startswith((f"{name}(", f"{name}."))
            if within and node["phase"] in ("Running", "Pending"):
                is_pod = node["type"] == "Pod"
                node.update(phase=phase, finishedAt=now, message=pod_message if is_pod else "")

    def _now(self) -> str:
        return moment(next(self._seconds))


def pod_name(node: Node) -> str:
    return f"{WORKFLOW}-{node['templateName']}-{fnv(node['name'])}"


def log_of(event: Event) -> str:
    """Return the line that a step's code logs for an event."""
    written: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: written.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("flotilla.trainer.events")
    level = logger.level
    # Only `setLevel` clears the logger's cache of enabled levels.
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(handler)
    try:
        events.emit(event)
    finally:
        logger.removeHandler(handler)
        logger.propagate = True
        logger.setLevel(level)
    json.loads(written[0])
    return f"2026-01-02 03:04:05,006 INFO {written[0]}\n"

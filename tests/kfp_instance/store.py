"""The state of a fake KFP instance: pipelines, experiments, runs and recurring runs."""

import itertools
import json
import re
import threading
import uuid
from collections.abc import Callable
from typing import Any

import yaml

from tests.kfp_instance.workflow import Workflow, moment

Tree = dict[str, Any]
Play = Callable[[Workflow, Tree], None]
NOT_FOUND, CONFLICT, INVALID = 404, 409, 400
ENDED = ("SUCCEEDED", "FAILED", "CANCELED", "SKIPPED")
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# The API accepts any number as an integer.
TYPES = {
    "STRING": str,
    "NUMBER_INTEGER": (int, float),
    "NUMBER_DOUBLE": (int, float),
    "BOOLEAN": bool,
    "LIST": list,
    "STRUCT": dict,
}
BROKEN = 500


class RefusedError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Store:
    """All objects of an instance; callers of its methods hold `lock`."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.pipelines: dict[str, Tree] = {}
        self.versions: dict[str, Tree] = {}
        self.experiments: dict[str, Tree] = {}
        self.runs: dict[str, Tree] = {}
        self.recurring: dict[str, Tree] = {}
        self.workflows: dict[str, Workflow] = {}
        self.pipeline_root = ""
        # URI of the folder that contains the buckets of the cluster's object store.
        self.disk = ""
        # Whether a schedule can be deleted without its workflows, which is possible since KFP 2.16.
        self.leaves_orphans = True
        # Changes of a run, in order; each request for the run applies the next one.
        self.play: list[Play] = []
        self._seconds = itertools.count()

    def create_pipeline(self, body: Tree) -> Tree:
        name = body.get("display_name") or body.get("name")
        _require(bool(name), INVALID, "pipeline name cannot be empty")
        place = body.get("namespace", "")
        same = [
            each
            for each in self.pipelines.values()
            if each["display_name"] == name and each.get("namespace", "") == place
        ]
        _require(not same, CONFLICT, f"Pipeline {name} already exists")
        made = {**body, "pipeline_id": _id(), "created_at": self._now()}
        made |= {"display_name": name, "name": body.get("name") or name}
        self.pipelines[made["pipeline_id"]] = made
        return made

    def upload_version(self, pipeline_id: str, name: str, description: str, text: str) -> Tree:
        found(self.pipelines, pipeline_id, "Failed to create a pipeline version: pipeline", INVALID)
        documents = [tree for tree in yaml.load_all(text, _LOADER) if tree]
        valid = bool(documents) and "pipelineInfo" in documents[0]
        _require(valid, INVALID, "invalid pipeline spec")
        spec = documents[0]
        if len(documents) > 1:
            spec = {"pipeline_spec": documents[0], "platform_spec": documents[1]}
        return self.add_version(pipeline_id, name, description, spec)

    def add_version(self, pipeline_id: str, name: str, description: str, spec: Tree) -> Tree:
        mine = [each for each in self.versions.values() if each["pipeline_id"] == pipeline_id]
        same = [each for each in mine if each["display_name"] == name]
        _require(not same, CONFLICT, f"Pipeline version {name} already exists")
        made = {
            "pipeline_id": pipeline_id,
            "pipeline_version_id": _id(),
            "display_name": name,
            "name": name,
            "description": description,
            "created_at": self._now(),
            "pipeline_spec": spec,
        }
        self.versions[made["pipeline_version_id"]] = made
        return made

    def create_experiment(self, body: Tree) -> Tree:
        name, place = body.get("display_name"), body.get("namespace", "")
        _require(bool(name), INVALID, "The experiment name is empty")
        same = [
            each
            for each in self.experiments.values()
            if (each["display_name"], each.get("namespace", "")) == (name, place)
        ]
        _require(not same, CONFLICT, f"Already exist error: experiment {name} already exists")
        made = {**body, "experiment_id": _id(), "created_at": self._now()}
        made["storage_state"] = "AVAILABLE"
        self.experiments[made["experiment_id"]] = made
        return made

    def create_run(self, body: Tree) -> Tree:
        _require(bool(body.get("display_name")), BROKEN, "The run name is empty")
        spec, reference = self._spec(body)
        parameters = (body.get("runtime_config") or {}).get("parameters") or {}
        check_parameters(spec, parameters)
        experiment = body.get("experiment_id") or self._default_experiment()
        found(self.experiments, experiment, "experiment")
        body = {**body, "experiment_id": experiment, **reference}
        made = {**body, "run_id": _id(), "created_at": self._now(), "state": "PENDING"}
        made["service_account"] = body.get("service_account") or "pipeline-runner"
        made["finished_at"] = "1970-01-01T00:00:00Z"
        self.runs[made["run_id"]] = made
        root = (body.get("runtime_config") or {}).get("pipeline_root") or self.pipeline_root
        self.workflows[made["run_id"]] = Workflow(
            made["run_id"],
            pipeline_root=root,
            storage_root=str(parameters.get("storage_root", "")),
            disk=self.disk,
        )
        return made

    def get_run(self, run_id: str) -> Tree:
        run = found(self.runs, run_id, "run")
        if self.play:
            self.play.pop(0)(self.workflows[run_id], run)
            self._note(run)
        return run

    def end_run(self, run_id: str, state: str) -> None:
        run = self.runs[run_id]
        run["state"], run["finished_at"] = state, self._now()
        self._note(run)

    def terminate(self, run_id: str) -> Tree:
        run = found(self.runs, run_id, "run")
        begun = run["state"] in ("PENDING", "RUNNING", "PAUSED")
        _require(begun, INVALID, f"Failed to terminate a run {run_id}. Row not found")
        run["state"] = "CANCELING"
        self._note(run)
        gone = f"Failed to terminate run {run_id} due to error terminating its workflow: not found"
        _require(not self.workflows[run_id].is_gone, BROKEN, gone)
        return {}

    def _note(self, run: Tree) -> None:
        history = run.setdefault("state_history", [])
        if not history or history[-1]["state"] != run["state"]:
            history.append({"update_time": self._now(), "state": run["state"]})

    def create_recurring(self, body: Tree) -> Tree:
        most = int(body.get("max_concurrency", 0))
        _require(1 <= most <= 10, INVALID, "Max concurrency must be at least 1 and at most 10")
        _require(bool(body.get("display_name")), INVALID, "Recurring run name is empty")
        spec, _ = self._spec(body)
        check_parameters(spec, body["runtime_config"].get("parameters") or {})
        cron = body["trigger"].get("cron_schedule", {}).get("cron")
        _require(cron is None or is_cron(cron), INVALID, f"Schedule cron is not supported: {cron}")
        made = {**body, "recurring_run_id": _id(), "created_at": self._now()}
        made["status"] = "ENABLED" if body.get("mode") == "ENABLE" else "DISABLED"
        # A schedule that uses the newest version has no workflow yet, so it has no default account.
        if body["pipeline_version_reference"].get("pipeline_version_id"):
            made["service_account"] = body.get("service_account") or "pipeline-runner"
        self.recurring[made["recurring_run_id"]] = made
        return made

    def fire(self, recurring_run_id: str) -> Tree:
        """Start the next run of a schedule, as the schedule's controller does."""
        each = self.recurring[recurring_run_id]
        copied = ("runtime_config", "experiment_id", "pipeline_version_reference")
        body = {key: each[key] for key in copied}
        run = self.create_run({**body, "display_name": f"{each['display_name']}-{_id()[:5]}"})
        run |= {"recurring_run_id": recurring_run_id, "state": "RUNNING"}
        return run

    def delete_recurring(self, recurring_run_id: str, propagation: str = "") -> Tree:
        """Delete a schedule and its workflows; its runs stay in the database."""
        found(self.recurring, recurring_run_id, "recurring run")
        del self.recurring[recurring_run_id]
        for run in self.runs.values():
            is_left = self.leaves_orphans and propagation == "ORPHAN"
            if run.get("recurring_run_id") == recurring_run_id and not is_left:
                self.workflows[run["run_id"]].collect()
        return {}

    def enable(self, recurring_run_id: str, on: bool) -> Tree:
        each = found(self.recurring, recurring_run_id, "recurring run")
        each["mode"] = "ENABLE" if on else "DISABLE"
        each["status"] = f"{each['mode']}D"
        return {}

    def _spec(self, body: Tree) -> tuple[Tree, Tree]:
        """Return a version's pipeline spec and reference; the default is the newest version."""
        if given := body.get("pipeline_spec"):
            return given, {}
        reference = body.get("pipeline_version_reference") or {}
        pipeline = reference.get("pipeline_id")
        if key := reference.get("pipeline_version_id"):
            # The real server returns this 404 as a 500.
            version = found(self.versions, key, "PipelineVersion", BROKEN)
            same = version["pipeline_id"] == pipeline
            _require(same, INVALID, f"Pipeline version {key} belongs to another pipeline")
        else:
            mine = [each for each in self.versions.values() if each["pipeline_id"] == pipeline]
            _require(bool(mine), NOT_FOUND, "the pipeline has no version")
            version = max(mine, key=lambda each: each["created_at"])
        whole = {"pipeline_id": pipeline, "pipeline_version_id": version["pipeline_version_id"]}
        return version["pipeline_spec"], {"pipeline_version_reference": whole}

    def _default_experiment(self) -> str:
        for each in self.experiments.values():
            if each["display_name"] == "Default":
                return str(each["experiment_id"])
        return str(self.create_experiment({"display_name": "Default"})["experiment_id"])

    def _now(self) -> str:
        return moment(next(self._seconds))


def found(things: dict[str, Tree], key: str, what: str, status: int = NOT_FOUND) -> Tree:
    _require(key in things, status, f"{what} {key} not found")
    return things[key]


def is_cron(text: str) -> bool:
    """Return whether KFP accepts a cron expression; its first field is seconds."""
    words = text.split()
    most = (59, 59, 23, 31, 12, 7)[: len(words)]
    numbers = [[int(each) for each in re.findall(r"\d+", word)] for word in words]
    fits = all(max(each, default=0) <= top for each, top in zip(numbers, most, strict=False))
    return len(words) in (5, 6) and fits


def check_parameters(spec: Tree, values: Tree) -> None:
    """Reject unknown parameters and parameters of a wrong type, as KFP does."""
    pipeline = spec.get("pipeline_spec") or spec
    known = pipeline["root"].get("inputDefinitions", {}).get("parameters", {})
    for name, value in values.items():
        _require(name in known, INVALID, f"unknown parameter {name}")
        kind = known[name]["parameterType"]
        right = isinstance(value, TYPES[kind])
        right = right and (kind == "BOOLEAN" or not isinstance(value, bool))
        _require(right, INVALID, f"parameter {name} = {json.dumps(value)} is no {kind}")
        literals = known[name].get("literals")
        some = f"does not match any of the allowed literal values: {literals}"
        _require(not literals or value in literals, INVALID, f"input parameter {name} {some}")


def _id() -> str:
    return str(uuid.uuid4())


def _require(holds: bool, status: int, message: str) -> None:
    if not holds:
        raise RefusedError(status, message)

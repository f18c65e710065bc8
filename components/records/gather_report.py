"""Gathers the data for a run's report from published directories and events."""

from __future__ import annotations

import base64
import logging
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flotilla.components.records.run_store import CONFIG, find_config, read_given
from flotilla.components.records.step_record import (
    OF_STEPS,
    StepRecord,
    all_step_records,
    harmless,
    list_tries,
    lost_stage,
    read,
)
from flotilla.components.table import (
    EXIT_STEP,
    TRAIN,
    WORKING,
    Output,
    ends_well,
    find_maker,
    output_kind,
)
from flotilla.trainer import events, storage
from flotilla.trainer.checkpoints.history import merge_validations, read_history, read_validations
from flotilla.trainer.config.base import AUTO
from flotilla.trainer.config.program import count_tasks
from flotilla.trainer.config.schema import Config
from flotilla.trainer.events import AttemptBegin, CheckpointPublished, UserCodeFailed, to_tree
from flotilla.trainer.events.run_state import INCIDENTS, RunState, reduce_events
from flotilla.trainer.report import report
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.runtime.json_records import parse, parse_mapping, parse_record


def count_resources(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a training cluster's resources: `tasks` (their number in each role) and `gpus`."""
    tasks = count_tasks(config)
    return {"tasks": tasks, "gpus": config["cluster"]["gpus_per_worker"] * tasks.get("worker", 1)}


def cost(config: Mapping[str, Any], steps: Collection[StepRecord]) -> dict[str, Any]:
    """Return the task hours and GPU hours that training used, or {} without training."""
    train = next((step for step in steps if step.step == find_maker("checkpoint").name), None)
    # Leave out the costs if a configuration of another version lacks a required section or value.
    held: Mapping[str, Any] = {}
    with suppress(KeyError, TypeError, ValueError, UserError):
        held = (train and train.held) or (count_resources(config) if config else {})
    if not (train and held):
        return {}
    seconds = train.spent
    return {
        "tasks": held["tasks"],
        "task_hours": sum(held["tasks"].values()) * seconds / 3600,
        "gpu_hours": held["gpus"] * seconds / 3600,
        "seconds_of_all_steps": round(sum(step.spent for step in steps), 1),
    }


log = logging.getLogger(__name__)
# The events for the report. Omit progress events, which the training history already contains.
_REPORTED = (*OF_STEPS, *INCIDENTS, AttemptBegin, CheckpointPublished, UserCodeFailed)
_LINEAGE = (
    "run_id", "commit", "image", "code", "config", "dataset", "fingerprint", "checkpoint",
    "evaluation", "decision",
)  # fmt: skip
# States of a successful run: a KFP instance reports `COMPLETE` or `SUCCEEDED`, depending on its
# version, and the local runner may also report `SUCCESS`.
_WELL = ("SUCCEEDED", "SUCCESS", "COMPLETE")
_CANCELED = ("CANCELED", "CANCELLED")
#: State of a finished run in which some steps are running again.
AGAIN = "AGAIN"
_MOST_WORDS = 500
PAGE = "report.html"


def write(
    state: str, root: str, run_id: str, folder: Path, path: Path, words: str = ""
) -> dict[str, Any]:
    """Write the report of a run to `path` from all results that exist, and return its data.

    `state` is KFP's final state, for example `SUCCEEDED`. `words` is KFP's failure message.
    `folder` is a local folder that may contain the run's events.
    """
    facts = gather_facts(state, root, run_id, folder, words)
    report.write(facts, path)
    return facts


def write_again(at: str, state: str, displays: Mapping[str, str]) -> None:
    """Rewrite the report of the run at URI `at`.

    `displays` has the URIs of the exit step's artifacts, which are rewritten too.
    """
    with harmless("the report"), tempfile.TemporaryDirectory(prefix="flotilla-") as folder:
        page = Path(folder, PAGE)
        uri = storage.join(at, PAGE)
        facts = write(state, storage.parent_of(at), storage.name_of(at), Path(folder), page)
        storage.write_bytes(uri, page.read_bytes())
        for name, content in render_artifacts(facts, page, uri).items():
            if name in displays:
                storage.write_bytes(displays[name], content)


def render_artifacts(facts: Mapping[str, Any], page: Path, uri: str) -> dict[str, bytes]:
    """Return the content of each artifact of the exit step, keyed by artifact name."""
    return {"report": page.read_bytes(), "summary": report.to_markdown(facts, uri)}


def gather_facts(
    state: str, root: str, run_id: str, folder: Path, words: str = ""
) -> dict[str, Any]:
    """Return all known data of a run; see `flotilla.trainer.report.report`."""
    known = _read_state(folder)
    shared = [
        _add_traceback(each, known)
        for each in all_step_records(known)
        if each.step != EXIT_STEP.name
    ]
    steps = shared or _list_published(state, root, run_id)
    tries = [each for each in list_tries(known) if each.step != EXIT_STEP.name]
    made = _Made(steps, root, run_id, every=bool(shared))
    validation = made.read("validation", "validation.json")
    decision = made.read("decision", "decision.json")
    evaluation = made.read("evaluation", "metrics.json")
    registered = made.read("registration", "registration.json")
    config = _resolve_auto(_config(folder, root, run_id), folder)
    lineage = registered.get("lineage") or {}
    # The local runner reports a run that was stopped between two steps as failed. Correct this.
    ended = _CANCELED[0] if known.interrupted else state
    verdict = _verdict(ended, decision or validation, registered, steps)
    return {
        "run_id": run_id,
        "verdict": verdict,
        "error": _unsaid(steps, words, shared=bool(shared)) if verdict == "failed" else "",
        "config": config,
        "steps": [_facts(each) for each in steps],
        "tries": [to_tree(each) for each in tries or _list_attempts(steps)],
        "metrics": evaluation.get("metrics", {}),
        "validation": validation,
        "rules": decision.get("rules"),
        "reasons": decision.get("reasons", []),
        "notes": decision.get("notes", []),
        "history": _history(root, run_id),
        "incidents": [to_tree(each) for each in known.incidents]
        or [dict(each) for step in steps for each in step.incidents],
        "checkpoints": [to_tree(each) for each in known.checkpoints],
        "evaluation": evaluation,
        "curves": made.read("evaluation", "curves.json", list),
        "pictures": made.pictures(evaluation),
        "registered": registered,
        "model": made.fields("model"),
        "lineage": {key: lineage[key] for key in _LINEAGE if key in lineage},
        "artifacts": _artifacts(steps, root, run_id),
        "workdir": str(folder.parent) if shared else "",
        "cost": cost(config, steps),
    }


def _artifacts(steps: Sequence[StepRecord], root: str, run_id: str) -> dict[str, str]:
    found = {output_kind(each.step) or each.step: each.uri for each in steps if each.uri}
    if "validation" in found:
        found["data page"] = storage.join(found["validation"], "page.html")
    if root and "checkpoint" in found:
        found["TensorBoard logs"] = storage.join(root, run_id, "checkpoints", "logs")
    return found


def _facts(step: StepRecord) -> dict[str, Any]:
    return {
        **to_tree(step),
        # Look the output up, because records of earlier versions do not contain it.
        "output": output_kind(step.step) or "",
        "tries": step.tries,
        "earlier_seconds": step.earlier_seconds,
    }


def _list_attempts(steps: Sequence[StepRecord]) -> list[StepRecord]:
    earlier = [
        StepRecord(step=step.step, **to_tree(each)) for step in steps for each in step.earlier
    ]
    return sorted([*earlier, *steps], key=lambda each: each.began)


def _add_traceback(step: StepRecord, known: RunState) -> StepRecord:
    """Return a step's record. If training failed, add the traceback of the user's code."""
    if step.step != find_maker("checkpoint").name or step.status != "failed" or step.traceback:
        return step
    return replace(step, traceback=known.traceback)


def _verdict(
    state: str, decision: dict[str, Any], registered: dict[str, Any], steps: list[StepRecord]
) -> str:
    ill = [each.status for each in steps if each.status not in ("done", "skipped")]
    if ill or state in _CANCELED:
        return ill[0] if ill else "interrupted"
    if state == AGAIN:
        return "running"
    # With a decision, ignore all other states, because KFP may report `RUNNING` for an ended run.
    if state == "FAILED" or (state and state not in _WELL and not decision):
        return "failed"
    if registered.get("decision") == "refused":
        return "refused"
    words = [(each.step, each.metrics.get("decision")) for each in steps]
    if well := [str(word) for step, word in words if ends_well(step, word)]:
        return well[0]
    # If only the data gate decided (`accepted`), return `done`, because no model was blessed.
    return str(decision.get("decision", "done")).replace("accepted", "done")


def _unsaid(steps: list[StepRecord], words: str, *, shared: bool) -> str:
    said = f"KFP says: {' '.join(words.split())[:_MOST_WORDS]}" if words.strip() else ""
    reached = [each for each in steps if each.status != "skipped"]
    failed = [each for each in reached if each.status != "done"]
    if failed:
        # A step that was killed could not report an error, so report KFP's message.
        return said if not shared and failed[0].ended is None else ""
    why = "no step recorded an error; see the log of the run"
    if lost := lost_stage(steps):
        why = f"the process of the step ended before {lost} began"
    elif steps and (lost := _find_missing({each.step for each in reached})):
        why = f"{lost} has no record: its pod did not start, or could not write the record"
    return "; ".join(filter(None, [why, said]))


def _find_missing(names: Collection[str]) -> str:
    last = max((n for n, stage in enumerate(WORKING) if stage.name in names), default=-1)
    after = WORKING[last + 1 :]
    return after[0].name if after else ""


def _list_published(state: str, root: str, run_id: str) -> list[StepRecord]:
    with _skip_unreadable():
        if root:
            steps = read(storage.join(root, run_id), well=state in (*_WELL, AGAIN))
            last = max((n for n, each in enumerate(steps) if each.status != "skipped"), default=-1)
            if state == AGAIN and steps and steps[last].ended is None:
                steps[last] = replace(steps[last], status="running")
            return steps
    return []


class _Made:
    """The published results of a run: those in its records, or else the newest of each kind."""

    def __init__(self, steps: list[StepRecord], root: str, run_id: str, *, every: bool) -> None:
        self._steps, self._root, self._run_id, self._every = steps, root, run_id, every

    def uri(self, kind: Output) -> str:
        maker = find_maker(kind).name
        known = next((each.uri for each in self._steps if each.step == maker), "")
        if known or self._every:
            return known
        found = storage.newest(storage.join(self._root, self._run_id, kind))
        return found[0] if found else ""

    def read(self, kind: Output, name: str, of: type[Any] = dict) -> Any:
        """Return the parsed JSON file `name`, or `of()` if the file is missing or invalid."""
        with _skip_unreadable():
            uri = self.uri(kind)
            if uri:
                return _check_value(storage.read_file(uri, name), f"{uri}: {name}", of)
        return of()

    def fields(self, kind: Output) -> dict[str, Any]:
        with _skip_unreadable():
            if uri := self.uri(kind):
                return dict(storage.read_manifest(uri).fields)
        return {}

    def pictures(self, evaluation: dict[str, Any]) -> dict[str, str]:
        found = {}
        with _skip_unreadable():
            uri = self.uri("evaluation")
            for row in evaluation.get("worst", []):
                if path := str(row.get("picture") or ""):
                    content = storage.read_file(uri, path)
                    found[path] = base64.b64encode(content).decode()
        return found


def _read_state(folder: Path) -> RunState:
    with _skip_unreadable():
        return reduce_events(events.read(folder / "events.jsonl", every=_REPORTED))
    return RunState()


def _history(root: str, run_id: str) -> list[dict[str, Any]]:
    with _skip_unreadable():
        uri = storage.join(root, run_id, "checkpoints")
        return merge_validations(read_history(uri), read_validations(uri))
    return []


def _config(folder: Path, root: str, run_id: str) -> dict[str, Any]:
    places = [storage.uri_of(folder / CONFIG)]
    if root:
        places.append(storage.join(root, run_id, CONFIG))
    for place in places:
        with _skip_unreadable(), suppress(storage.Missing):
            tree = parse_mapping(storage.read_bytes(place))
            if wrong := [
                each for each in _SECTIONS & tree.keys() if not isinstance(tree[each], dict)
            ]:
                raise ValueError(f"{place}: {wrong[0]} is not a section")
            return tree
    return {}


def _resolve_auto(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    if AUTO not in str(config.get("training")):
        return config
    with suppress(UserError):
        given = find_config(read_given(storage.uri_of(folder), TRAIN).arguments)
        if given:
            return {**config, "training": given.model_dump(mode="json")["training"]}
    return config


_SECTIONS = {
    name for name, each in Config.model_fields.items() if hasattr(each.annotation, "model_fields")
}


@dataclass(frozen=True, kw_only=True)
class _Published:
    """The fields that the report uses from the results of gates, evaluation and registration."""

    decision: str = ""
    rules: tuple[Mapping[str, Any], ...] = ()
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    findings: tuple[Mapping[str, Any], ...] = ()
    metrics: Mapping[str, Any] = field(default_factory=dict)
    worst: tuple[Mapping[str, Any], ...] = ()
    lineage: Mapping[str, Any] = field(default_factory=dict)


def _check_value(data: bytes, where: str, of: type[Any]) -> Any:
    """Parse a JSON file. Raises a `ValueError` if it or one of its fields has the wrong type."""
    tree = parse(data)
    if not isinstance(tree, of):
        raise ValueError(f"{where} does not contain a {of.__name__}")
    if of is dict and parse_record(_Published, tree) is None:
        raise ValueError(f"{where} has a field of the wrong type")
    if of is list and not all(isinstance(each, dict) for each in tree):
        raise ValueError(f"{where} contains values that are not JSON objects")
    return tree


@contextmanager
def _skip_unreadable() -> Iterator[None]:
    # Skip unreadable data, because an incomplete report is better than no report.
    try:
        yield
    except (UserError, ValueError, OSError) as error:
        log.warning("the report is incomplete: %s", error)

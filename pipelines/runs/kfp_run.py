"""A run on a KFP instance: its state, its nodes, and the URI below which it publishes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from flotilla.components.records.run_store import find_root
from flotilla.components.records.step_record import StepRecord
from flotilla.pipelines.runs.kfp_client import Client, ask, is_id, pages
from flotilla.pipelines.runs.kfp_nodes import Nodes, Step, read_nodes
from flotilla.pipelines.runs.upload import NEWEST, equals
from flotilla.trainer import storage
from flotilla.trainer.runtime.errors import ConfigError, UserError

ENDED = ("SUCCEEDED", "FAILED", "CANCELED", "SKIPPED")
_EPOCH = 1970
# The folder below a pipeline root; see `flotilla.components.records.run_store.find_root`.
_FOLDER = "flotilla"


@dataclass(frozen=True, kw_only=True)
class RemoteRun:
    """A run on a KFP instance. If it comes from a list of runs, it has no nodes.

    Attributes:
        state: KFP's state; CANCELED also for a canceled run that KFP reports as FAILED.
        at: the URI below which its steps publish; empty if unknown.
        impasse: why the run cannot continue although it has not ended; empty if it can.
        schedule_id: the id of the recurring run that started it, or empty.
        doing: the record of the current stage of each running step, if known, keyed by step.
    """

    run_id: str
    name: str
    state: str
    created: datetime | None
    finished: datetime | None
    error: str
    at: str = ""
    nodes: Nodes = field(default_factory=Nodes)
    impasse: str = ""
    schedule_id: str = ""
    doing: Mapping[str, StepRecord] = field(default_factory=dict)

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps in the order of their start."""
        return self.nodes.steps

    @property
    def has_ended(self) -> bool:
        """Whether the run has ended."""
        return self.state in ENDED


def find_run(client: Client, run: str) -> RemoteRun:
    """Return a run by its id, or by its name if that is unique. Raises `ConfigError`."""
    if is_id(run.lower()):
        return refresh_run(client, run.lower())
    listed = pages(client.list_runs, "runs", sort_by=NEWEST, filter=equals("display_name", run))
    found = [each for each in listed if each.display_name == run]
    if not found:
        raise ConfigError(f"{client.access.endpoint} has no run {run!r}; see `flotilla runs`")
    if len(found) > 1:
        ids = ", ".join(str(each.run_id) for each in found[:3])
        raise ConfigError(f"{len(found)} runs are named {run!r}: use the id of one, such as {ids}")
    return refresh_run(client, str(found[0].run_id))


def refresh_run(client: Client, run_id: str) -> RemoteRun:
    """Return a run with its current nodes. Raises `InstanceError`."""
    run = ask(client.get_run, run_id=run_id)
    return view(run, read_nodes(client, run_id))


def view(run: Any, nodes: Nodes | None = None) -> RemoteRun:
    """Convert the client's model of a run, and add the nodes if they were read."""
    nodes = nodes or Nodes()
    said = " ".join(str(run.error.message or "").split()) if run.error else ""
    return RemoteRun(
        run_id=str(run.run_id),
        name=str(run.display_name),
        state=_state(str(run.state or ""), run.state_history or ()),
        created=_moment(run.created_at),
        finished=_moment(run.finished_at),
        error=said or nodes.message,
        at=_find_uri(run, nodes),
        nodes=nodes,
        schedule_id=str(run.recurring_run_id or ""),
    )


def _state(state: str, history: Iterable[Any]) -> str:
    """Return the state, or CANCELED if a failed run was CANCELING just before its end."""
    before = [str(each.state) for each in history if str(each.state) not in ENDED]
    if state == "FAILED" and before[-1:] == ["CANCELING"]:
        return "CANCELED"
    # A run that was just created has no state yet.
    return state or "PENDING"


def _find_uri(run: Any, nodes: Nodes) -> str:
    """Return the URI below which the run publishes, found as in its steps, or "" if unknown."""
    config = run.runtime_config
    given = (config.parameters if config else None) or {}
    # The parameters lack the defaults of the version. The arguments in the nodes include them.
    root = str(given.get("storage_root") or nodes.root)
    pipeline_root = str((config.pipeline_root if config else None) or "")
    with suppress(UserError):
        if not root and nodes.artifact:
            root = find_root("", nodes.artifact, str(run.run_id))
        elif not root and pipeline_root:
            root = storage.join(pipeline_root, _FOLDER)
        return storage.join(root, str(run.run_id)) if root else ""
    return ""


def _moment(time: datetime | None) -> datetime | None:
    if time is None or time.year <= _EPOCH:
        return None
    return time if time.tzinfo else time.replace(tzinfo=UTC)

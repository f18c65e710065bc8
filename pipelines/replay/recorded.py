"""A step as it is on record: how it ended, what it was given, and where its run has published."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from components.records.run_store import PINNED, Given, read_given, root_of
from components.records.step_record import StepRecord, published_records, tries_of
from components.table import STEPS, step_of
from pipelines.runs import local, local_status
from pipelines.runs.kfp_access import Instance, is_named
from trainer import events, storage
from trainer.errors import ConfigError, UserError, nearest
from trainer.run_state import state_of


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """A step of a run: how it ended, and what it was given.

    Attributes:
        root: the storage root, as the run has known it.
        source: the storage root, as this machine reads it.
        pinned: the file with what a run on this machine has pinned; None where it has none.
    """

    run_id: str
    record: StepRecord
    given: Given
    root: str
    source: str
    pinned: Path | None = None

    @property
    def step(self) -> str:
        """The name of the step."""
        return self.record.step


def find(
    run: str, step: str, *, settings: Sequence[str], workdir: Path, instance: Instance
) -> RecordedStep:
    """Return a step of a run: of this machine, of a storage root, or of a KFP instance.

    `settings` may have `storage.root=URI`, where a run of a cluster has published. Raises
    `UserError`.
    """
    name = _name_of(step)
    root = local.configuration(None, settings).storage.root if settings else ""
    if settings and not root:
        raise ConfigError("--set: a replay takes storage.root=URI alone")
    if not root and not instance.endpoint and local_status.is_local(workdir, run):
        return _local(workdir, run, name)
    if not root and not is_named(instance.endpoint):
        local.check_run_id(workdir, run)
    if root:
        if not storage.names(storage.join(root, run, "steps")):
            raise UserError(f"no run {run!r} below {root}{_nearest_run(root, run)}")
        return _published(storage.join(root, run), run, name)
    from pipelines.runs.kfp_client import connect
    from pipelines.runs.kfp_run import run_of

    found = run_of(connect(instance.access()), run)
    if not found.at:
        raise UserError(f"where the run {run} publishes is not known: add --set storage.root=URI")
    try:
        # The address of the store is that of the cluster.
        storage.names(storage.join(found.at, "steps"))
    except UserError as error:
        raise UserError(
            f"{error}; where the store has another address here, add --set storage.root=URI, such "
            "as minio://BUCKET/FOLDER?endpoint=http://localhost:9000"
        ) from None
    return _published(found.at, found.run_id, name)


def _name_of(step: str) -> str:
    # The exit step reports what is there, and computes nothing.
    known = [row.name for row in STEPS if not row.is_exit_step]
    with suppress(LookupError):
        if (name := step_of(step).name) in known:
            return name
    raise ConfigError(f"no step {step!r}{nearest(step, known)} (there is {', '.join(known)})")


def _nearest_run(root: str, run: str) -> str:
    others = ("registry", "datasets", "listings", "preparing")
    known = [name for name in storage.names(root) if name not in others]
    return nearest(run, known) or (f" (there is {', '.join(known[-3:])})" if known else "")


def _local(workdir: Path, run: str, step: str) -> RecordedStep:
    folder = (workdir / run).absolute()
    log = folder / local.EVENTS
    records = tries_of(state_of(events.read(log)))
    newest = {each.step: each for each in records}
    found = _recorded(storage.uri_of(folder), run, step, list(newest.values()))
    pinned = folder / PINNED
    # Its root may be elsewhere, and is that of the run.
    return replace(found, source=found.root, pinned=pinned if pinned.is_file() else None)


def _published(at: str, run: str, step: str) -> RecordedStep:
    return _recorded(at, run, step, published_records(at))


def _recorded(at: str, run: str, step: str, records: Sequence[StepRecord]) -> RecordedStep:
    found = next((each for each in records if each.step == step), None)
    if found is None:
        begun = ", ".join(f"{each.step} ({each.status})" for each in records) or "none"
        raise UserError(f"{step} never began in the run {run}; the steps that did: {begun}")
    given, source = read_given(at, step), storage.parent_of(at)
    named = given.arguments.get("root") or given.arguments.get("storage_root") or ""
    uris = [str(each.get("uri", "")) for each in given.artifacts.values() if isinstance(each, dict)]
    root = source
    with suppress(UserError):
        root = root_of(str(named), next(filter(None, uris), ""), run)
    return RecordedStep(run_id=run, record=found, given=given, root=root, source=source)

"""A step as it is on record: how it ended, what it was given, and where its run has published."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from components.locations import root_of
from components.pinned_inputs import FILE as PINNED
from components.records import given
from components.records.given import Given
from components.records.step_record import StepRecord, published_records, tries_of
from components.table import STEPS, step_of
from pipelines.runs import local, local_status
from pipelines.runs.kfp_access import Instance, is_named
from trainer import events, storage
from trainer.config.load import parse_config
from trainer.config.schema import Config
from trainer.errors import ConfigError, UserError, nearest


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """A step of a run.

    Attributes:
        run_id: the run.
        record: how the step ended.
        given: what it was given.
        root: the storage root, as the run has known it.
        source: the storage root, as this machine reads it.
        pinned: the file with what a run on this machine has pinned; None where it has none.
        log: the events of a run on this machine; None of any other.
    """

    run_id: str
    record: StepRecord
    given: Given
    root: str
    source: str
    pinned: Path | None = None
    log: Path | None = None

    @property
    def step(self) -> str:
        """The name of the step."""
        return self.record.step

    @property
    def is_local(self) -> bool:
        """Whether the command line has run it on this machine."""
        return self.log is not None

    @property
    def config(self) -> Config:
        """The configuration that the step was given; raises a `UserError` for one of another form.

        Such as that of a version which had a key that is not known here.
        """
        try:
            return parse_config(json.loads(str(self.given.arguments["config"])))
        except (KeyError, ValueError, ConfigError) as error:
            raise UserError(
                f"{self.step} of the run {self.run_id} was made by Flotilla {self.given.version}, "
                f"whose configuration is not that of this version, {version('flotilla')}: {error}; "
                "replay it with the version of the run"
            ) from None


def find(
    run: str, step: str, *, settings: Sequence[str], workdir: Path, instance: Instance
) -> RecordedStep:
    """Return a step of a run: of this machine, of a storage root, or of a KFP instance.

    Args:
        run: its id; of a run on an instance also its name.
        step: its name, or the one that KFP gives it.
        settings: `storage.root=URI`, where a run of a cluster has published.
        workdir: the folder of the runs on this machine.
        instance: the KFP instance; from the environment when left out.

    Raises:
        UserError: there is no such run or step, it never began, or what it was given is not known.
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
    try:
        return step_of(step).name
    except LookupError:
        known = [row.name for row in STEPS]
        hint = nearest(step, known)
        raise ConfigError(f"no step {step!r}{hint} (there is {', '.join(known)})") from None


def _nearest_run(root: str, run: str) -> str:
    others = ("registry", "datasets", "listings", "preparing")
    known = [name for name in storage.names(root) if name not in others]
    return nearest(run, known) or (f" (there is {', '.join(known[-3:])})" if known else "")


def _local(workdir: Path, run: str, step: str) -> RecordedStep:
    folder = (workdir / run).absolute()
    log = folder / local.EVENTS
    records = tries_of(events.read(log)) if log.is_file() else ()
    newest = {each.step: each for each in records}
    at = storage.uri_of(folder)
    record = _record_of(run, step, list(newest.values()))
    said = _given(at, run, step)
    root = _root_of(said, run)
    pinned = folder / PINNED
    return RecordedStep(
        run_id=run,
        record=record,
        given=said,
        root=root,
        source=root,
        pinned=pinned if pinned.is_file() else None,
        log=log,
    )


def _published(at: str, run_id: str, step: str) -> RecordedStep:
    record = _record_of(run_id, step, published_records(at))
    said = _given(at, run_id, step)
    source = storage.parent_of(at)
    return RecordedStep(
        run_id=run_id,
        record=record,
        given=said,
        root=_root_of(said, run_id) or source,
        source=source,
    )


def _record_of(run: str, step: str, records: Sequence[StepRecord]) -> StepRecord:
    found = next((each for each in records if each.step == step), None)
    if found:
        return found
    begun = ", ".join(f"{each.step} ({each.status})" for each in records) or "none"
    raise UserError(f"{step} never began in the run {run}; the steps that did: {begun}")


def _given(at: str, run: str, step: str) -> Given:
    found = given.read(at, step)
    if found is None:
        raise UserError(
            f"what {step} of the run {run} was given is not on record ({given.FOLDER}/{step}.json "
            f"is not below {at}): the run was made by an older version, or the store did not take "
            "the record; start the run again to have one"
        )
    return found


def _root_of(said: Given, run_id: str) -> str:
    """Return the storage root as the step has known it; empty where it has not."""
    named = said.arguments.get("root") or said.arguments.get("storage_root") or ""
    uris = [str(each.get("uri", "")) for each in said.artifacts.values() if isinstance(each, dict)]
    try:
        return root_of(str(named), next(filter(None, uris), ""), run_id)
    except UserError:
        return ""

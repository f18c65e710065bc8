"""What a step takes from storage: found by manifest, counted, and fetched into the mirror."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from components.table import EVALUATE, EXIT_STEP, REGISTER, TRAIN
from pipelines.replay.recorded import RecordedStep
from trainer import mirror, storage
from trainer.checkpoints.index import list_checkpoints
from trainer.errors import UserError
from trainer.mirror import Snapshot
from trainer.promotion import registry
from trainer.storage import Manifest
from trainer.storage.errors import reported
from trainer.storage.manifest import MANIFEST
from trainer.storage.replays.overlay import below
from trainer.topology import topology_of

# Arguments of steps that are URIs of published directories.
_DIRECTORIES = ("dataset", "checkpoint", "evaluation", "decision", "model")
# What the step itself writes is in addition; most of it is small next to what it reads.
_ROOM = 64 << 20
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Input:
    """A published directory that the step reads; `files` picks what is fetched before it begins."""

    name: str
    uri: str
    manifest: Manifest
    files: Callable[[str], bool] = field(default=lambda _path: True)

    @property
    def bytes(self) -> int:
        """The size of what is fetched."""
        return sum(entry.bytes for entry in self.manifest.files if self.files(entry.path))


def snapshot_of(recorded: RecordedStep) -> Snapshot:
    """Return storage as it was when the step, or its last attempt to train, began."""
    record, run_id = recorded.record, recorded.run_id
    began = max(record.began, recorded.given.began, _last_attempt(recorded))
    hidden = [
        # Notes on who gives which number; the numbers are those of what is published.
        "registry/models/*/claims*",
        f"{run_id}/checkpoints/.lock*",
        f"{run_id}/checkpoints/end.json",
        f"{run_id}/steps/{record.step}.json",
        f"{run_id}/steps/{EXIT_STEP.name}.json",
    ]
    if record.metrics.get("decision") != "unchanged":
        hidden.append("registry/models/*/finished/*")
    return Snapshot(
        root=recorded.root,
        source=recorded.source,
        until=mirror.moment(began),
        hidden=tuple(hidden),
        path=str(storage.local_path(recorded.root) or ""),
    )


def _last_attempt(recorded: RecordedStep) -> float:
    """Return when training began again for the last time, in this step; 0 where it did not."""
    if recorded.step != TRAIN:
        return 0.0
    strategy = topology_of(recorded.config.training.strategy)
    leading = "chief-0" if strategy.chief else "worker-0"
    began = [
        float(each.get("time", 0.0))
        for each in recorded.record.incidents
        if each.get("event") in (None, "restart") and each.get("task") == leading
    ]
    return max(began, default=0.0)


def inputs_of(recorded: RecordedStep, snapshot: Snapshot) -> tuple[list[Input], list[str]]:
    """Return what the step reads, and a remark on what it will not find as it was.

    Raises:
        UserError: an input was deleted since, or cannot be read.
    """
    found, remarks = [], []
    for name, uri in _named(recorded):
        try:
            found.append(_input(name, uri, recorded, snapshot))
        except (storage.NotPublished, storage.Corrupt) as error:
            remarks.append(_missing(name, uri, recorded, error))
    for name, uri in _looked_up(recorded, snapshot):
        found.append(_input(name, uri, recorded, snapshot))
        remarks.append(f"the {name} is {storage.name_of(uri)}, the newest of that time")
    return found, remarks


def _named(recorded: RecordedStep) -> Iterator[tuple[str, str]]:
    """Yield what the arguments of the step name: directories, and the bundle of its modules."""
    arguments = recorded.given.arguments
    for name in _DIRECTORIES:
        if uri := str(arguments.get(name) or ""):
            yield name, uri
    # The first step takes it as a run parameter, and preparing apart from a configuration.
    uris = [arguments.get(name) for name in ("code", "data_code")]
    if "config" in arguments:
        uris.append(recorded.config.code)
    if uri := next(filter(None, uris), ""):
        yield "code", str(uri)


def _missing(name: str, uri: str, recorded: RecordedStep, error: UserError) -> str:
    """Return a remark where the step has failed because of this; else the input is gone since."""
    if uri in recorded.record.error:
        return f"the {name} is as the step has found it: {error}"
    raise UserError(
        f"the {name} of {recorded.step} is not there as it was: {error}; a replay needs it"
    )


def _input(name: str, uri: str, recorded: RecordedStep, snapshot: Snapshot) -> Input:
    manifest = storage.read_manifest(_original(uri, snapshot))
    if name != "dataset" or recorded.step == TRAIN:
        return Input(name=name, uri=uri, manifest=manifest)
    # Other splits are read by few, and where they are.
    return Input(
        name=name,
        uri=uri,
        manifest=manifest,
        files=lambda path: not path.startswith(("train-", "validation-")),
    )


def _original(uri: str, snapshot: Snapshot) -> str:
    path = below(uri, snapshot.root)
    return storage.join(snapshot.source, path) if path else uri


def _looked_up(recorded: RecordedStep, snapshot: Snapshot) -> Iterator[tuple[str, str]]:
    """Yield what the step has looked up by itself: the champion, and where training began."""
    if recorded.step == TRAIN:
        at = storage.join(snapshot.source, recorded.run_id, "checkpoints")
        known = [uri for uri, _ in list_checkpoints(at) if _is_seen(uri, snapshot)]
        yield from (("checkpoint", _known(uri, snapshot)) for uri in known[-1:])
    if recorded.step in (EVALUATE, REGISTER):
        name = recorded.config.name
        made = registry.promotions(snapshot.source, name)
        seen = [each for each in made if each.created <= snapshot.until]
        versions = {each.number: each.uri for each in registry.versions(snapshot.source, name)}
        number = seen[-1].version if seen else 0
        if uri := versions.get(number, ""):
            yield "champion", _known(uri, snapshot)


def _is_seen(uri: str, snapshot: Snapshot) -> bool:
    return storage.read_manifest(uri).created <= snapshot.until


def _known(uri: str, snapshot: Snapshot) -> str:
    """Return the URI by which the run knows a directory of the source."""
    path = below(uri, snapshot.source)
    return storage.join(snapshot.root, path) if path else uri


def require_room(inputs: list[Input], folder: Path, *, is_local: bool) -> None:
    """Raise a `UserError` where the disk of a folder is too small for the inputs.

    A run of this machine is below its workdir, and has no other.
    """
    needed, free = sum(each.bytes for each in inputs) + _ROOM, shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"the inputs need {needed >> 20} MB, and {folder} has {free >> 20} MB free: free some "
            f"space{'' if is_local else ', or choose another --workdir'}"
        )


def fetch(inputs: list[Input], folder: Path, snapshot: Snapshot) -> int:
    """Copy the inputs into the mirror below a folder, verified; return how many bytes.

    What is damaged in the store is left there: the step reads it as it is.

    Raises:
        UserError: the store cannot be read, or the folder cannot be written.
    """
    fetched = 0
    for each in inputs:
        path = below(each.uri, snapshot.root)
        # Another store is read where it is, and so are files that have other names there.
        if not path or any(entry.at for entry in each.manifest.files):
            continue
        target = folder / mirror.STORAGE / path
        original = _original(each.uri, snapshot)
        try:
            storage.fetch(original, target, only=each.files, manifest=each.manifest)
        except storage.Corrupt as error:
            log.warning("%s", error)
            shutil.rmtree(target, ignore_errors=True)
            continue
        with reported(f"write to {target}"):
            target.mkdir(parents=True, exist_ok=True)
            (target / MANIFEST).write_bytes(each.manifest.to_json())
        fetched += each.bytes
    return fetched

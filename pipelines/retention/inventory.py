"""The inventory of a storage root and its references, read from one listing and the manifests.

A string in a record is a reference if it contains the path of an item below the root, or if it is
the digest of a listing or of code. A string that only looks like a reference can make retention
keep an item too long, but never remove a needed item.

The trials of a sweep are runs in the same folder as the sweep. They are kept as long as the sweep.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

from flotilla.components import in_use
from flotilla.components.records.run_store import STEPS as RECORDS
from flotilla.components.table import STEPS, SWEEP_STEPS
from flotilla.pipelines.retention import (
    NOTE,
    RUN,
    SHARED,
    SWEEP,
    VERSION,
    Inventory,
    Item,
    Model,
    Promotion,
)
from flotilla.trainer import code as bundle
from flotilla.trainer import storage
from flotilla.trainer.cluster.lease import FOLDER as LEASES
from flotilla.trainer.cluster.lease import holders
from flotilla.trainer.code import FOLDER
from flotilla.trainer.promotion import registry
from flotilla.trainer.runtime.errors import ConfigError, UserError
from flotilla.trainer.runtime.json_records import make_time, parse, parse_mapping, parse_number
from flotilla.trainer.storage.errors import report_errors
from flotilla.trainer.storage.local import is_gone
from flotilla.trainer.storage.manifest import MANIFEST
from flotilla.trainer.storage.publishing import choose_store
from flotilla.trainer.storage.store import run_parallel
from flotilla.trainer.storage.uri import split_names
from flotilla.trainer.sweeps.study import FILE as SWEEP_STATE
from flotilla.trainer.sweeps.study import read as read_sweep

_MODEL = "model"
_REGISTRY, _CHECKPOINTS = "registry", "checkpoints"
# Folders with the outputs of a run's steps, and small records that contain references.
_PUBLISHED = ("checkpoints", "decision", "evaluation", "model", "registration", "validation")
_RECORDS = (
    "config.json", "arguments.json", "pinned_inputs.json", "events.jsonl", "report.json",
    bundle.OF_RUN,
)  # fmt: skip
_NOT_RUNS = {_REGISTRY, "preparing", in_use.FOLDER, bundle.OF_SCHEDULES, *SHARED}
_STAGES = {stage.name for step in (*STEPS, *SWEEP_STEPS) for stage in step.stages}
_STAMP = re.compile(r"-(\d{8}-\d{6})-[0-9a-f]{4}$")
_OF_CLUSTER = re.compile(r"(?P<sweep>.+)-t[0-9]{2,}")
_TOKEN = re.compile(r"[^\s\"',;<>()\[\]{}\\]+")
# A quoted URI of an object, whose key may contain characters that end a `_TOKEN`.
_WHOLE = re.compile(r'"(?:gs|s3|minio)://(?:[^"\\]|\\.)*"')
# A killed step never records its end. Its run is considered ended after this idle time.
_UNENDED = timedelta(days=7)


@dataclass
class _Folder:
    """A folder's files. `changed` is the Unix time of the last change, or 0 if unknown."""

    files: dict[str, int] = field(default_factory=dict)
    changed: float = 0.0

    @property
    def bytes(self) -> int:
        return sum(self.files.values())


def read(root: str, workdir: Path) -> Inventory:
    """Return the inventory below `root`. Raises `ConfigError` or `UserError`."""
    tops = _list_files(root)
    if MANIFEST in tops:
        raise ConfigError(
            f"{root} is a published directory, not a storage root: give the storage root above it"
        )
    runs = {name: each for name, each in tops.items() if name not in _NOT_RUNS and each.files}
    reader = _Reader(root, workdir)
    found: dict[str, Item] = {}
    for name in SHARED:
        found |= reader.list_shared(name, tops.get(name, _Folder()))
    for raws in run_parallel(lambda name: reader.run(name, runs[name]), list(runs)):
        found |= raws
    registry = tops.get(_REGISTRY, _Folder())
    found |= reader.versions(registry)
    if not found and not registry.files:
        raise ConfigError(f"{root} is not a storage root: it has no run, dataset or model")
    found |= reader.notes(tops, found)
    names = _Names(found)
    items = {
        path: replace(each, refs=frozenset(names.find_named(reader.texts.get(path, ()))) - {path})
        for path, each in found.items()
    }
    swept = [name for name in runs if any(path.startswith("trials/") for path in runs[name].files)]
    items = _add_sweeps(items, storage.local_path(root), workdir.absolute(), swept)
    return Inventory(items=items, models=tuple(reader.models(registry, found)))


def read_model(root: str, name: str) -> Model:
    """Read the current state of one model. Raises `UserError`."""
    above = f"models/{name}"
    home = storage.join(root, _REGISTRY, "models", name)
    with report_errors(f"list {home}"):
        listed = {f"{above}/{file.path}": file.bytes for file in choose_store(home).files(home)}
    reader, registry = _Reader(root, Path()), _Folder(files=listed)
    return next(iter(reader.models(registry, reader.versions(registry))))


def is_changed(root: str, workdir: Path, run: Item) -> bool:
    """Return whether a run is active or has changed since the listing. Raises `UserError`."""
    folder, uri = _Folder(), storage.join(root, run.path)
    with suppress(ConfigError):
        for top, each in _list_files(uri).items():
            folder.files |= {f"{top}/{path}": size for path, size in each.files.items()} or {top: 0}
            folder.changed = max(folder.changed, each.changed)
    now = _Reader(root, workdir).run(run.path, folder).get(run.path)
    if now is None:
        # The folder was removed, or is no longer a run.
        return bool(folder.files)
    return now.busy or (now.last is not None and run.last is not None and now.last > run.last)


def _list_files(root: str) -> dict[str, _Folder]:
    tops: dict[str, _Folder] = defaultdict(_Folder)
    is_local = storage.local_path(root) is not None
    with report_errors(f"list {root}"):
        try:
            for file in choose_store(root).files(root):
                top, _, rest = file.path.partition("/")
                folder = tops[top]
                if rest:
                    folder.files[rest] = file.bytes
                if is_local:
                    folder.changed = max(folder.changed, int(file.tag) / 1e9)
        except FileNotFoundError:
            raise ConfigError(f"{root} is not a storage root: nothing exists there") from None
    return tops


class _Names:
    """Finds the items whose paths occur in URIs."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = set(paths)
        self._tops = {path.partition("/")[0] for path in self._paths}

    def find_named(self, texts: Iterable[str]) -> Iterator[str]:
        """Yield the paths of the items to which the words in `texts` refer."""
        for word in texts:
            segments = split_names(word)
            if len(segments) == 1:
                yield from self._paths & {f"listings/{word}", f"code/{word}"}
            for first, segment in enumerate(segments[:-1]):
                if segment in self._tops:
                    yield from self._longest(segments[first:])

    def _longest(self, segments: list[str]) -> Iterator[str]:
        for count in range(len(segments), 0, -1):
            path = "/".join(segments[:count])
            if path in self._paths:
                yield path
                return


def _words(text: str) -> frozenset[str]:
    found = set(_TOKEN.findall(text))
    for each in _WHOLE.findall(text):
        with suppress(ValueError):
            found.add(parse(each))
    return frozenset(found)


def _time(seconds: float) -> datetime | None:
    return make_time(seconds) if seconds else None


class _Reader:
    """Reads the manifests and records below one root."""

    def __init__(self, root: str, workdir: Path) -> None:
        self._root, self._workdir = root, workdir
        # For each item path: the words in the item's records that may refer to other items.
        self.texts: dict[str, frozenset[str]] = {}

    def _uri(self, path: str) -> str:
        return storage.join(self._root, *path.split("/"))

    def _read_item(self, path: str, kind: str, files: Mapping[str, int]) -> Item | None:
        """Return a published directory as an item, or None if it was removed in the meantime."""
        size = sum(files.values())
        try:
            manifest = storage.read_manifest(self._uri(path))
        except storage.NotPublished:
            return None
        except storage.Unavailable:
            raise
        except UserError as error:
            return Item(path=path, kind=kind, bytes=size, damaged=str(error))
        if manifest.kind != (_MODEL if kind == VERSION else kind):
            # Skip a directory of another kind, because Flotilla has not published it.
            return None
        # A version is a copy of its source and does not need it, so ignore this reference.
        fields = {name: each for name, each in manifest.fields.items() if name != "source"}
        self.texts[path] = _words(json.dumps(fields, ensure_ascii=False))
        return Item(path=path, kind=kind, bytes=size, last=manifest.created_at)

    def list_shared(self, top: str, folder: _Folder) -> dict[str, Item]:
        """Return the datasets, listings or code below one folder of the root."""
        found = {}
        for name, files in _children(folder.files).items():
            path = f"{top}/{name}"
            if MANIFEST in files and (item := self._read_item(path, SHARED[top], files)):
                used = _time(in_use.last_use(self._root, path))
                last = max(filter(None, (item.last, used)), default=None)
                found[path] = replace(item, last=last)
        return found

    def notes(self, tops: Mapping[str, _Folder], found: Mapping[str, Item]) -> dict[str, Item]:
        """Return the notes, which keep code for schedules and for runs without other records."""
        above = bundle.OF_SCHEDULES
        paths = [f"{above}/{name}" for name in tops.get(above, _Folder()).files]
        paths += [
            f"{name}/{bundle.OF_RUN}" for name, each in tops.items()
            if bundle.OF_RUN in each.files and name not in found and name not in _NOT_RUNS
        ]  # fmt: skip
        return dict(
            zip(paths, run_parallel(lambda path: self._note(path, found), paths), strict=True)
        )

    def _note(self, path: str, found: Mapping[str, Item]) -> Item:
        text, damaged = self._text(path), ""
        try:
            parse_mapping(text)
        except ValueError:
            # The damaged note does not show which bundle is needed, so keep all bundles.
            text = " ".join(each for each in found if each.startswith(f"{FOLDER}/"))
            damaged = f"{self._uri(path)} is damaged; all code is kept until you remove this file"
        self.texts[path] = _words(text)
        return Item(path=path, kind=NOTE, damaged=damaged)

    def versions(self, registry: _Folder) -> dict[str, Item]:
        """Return the versions of all models."""
        found = {}
        for place, files in _deep(registry.files, 4).items():
            if place[0] == "models" and place[2] == "versions" and MANIFEST in files:
                path = "/".join((_REGISTRY, *place))
                if item := self._read_item(path, VERSION, files):
                    found[path] = item
        return found

    def run(self, name: str, folder: _Folder) -> dict[str, Item]:
        """Return a run and its published directories, or nothing if the folder is not a run."""
        found, texts = dict[str, Item](), set[str]()
        last, unended = folder.changed, False
        for place, files in _deep(folder.files, 2).items():
            if place[0] in _PUBLISHED and MANIFEST in files:
                kind = "checkpoint" if place[0] == _CHECKPOINTS else place[0]
                if item := self._read_item("/".join((name, *place)), kind, files):
                    found[item.path] = item
                    texts |= self.texts.get(item.path, frozenset())
                    last = max(last, item.last.timestamp() if item.last else 0.0)
        own, damaged = False, [each.damaged for each in found.values() if each.damaged]
        for step in _children(folder.files).get(RECORDS, {}):
            path, stage = f"{name}/{RECORDS}/{step}", step.removesuffix(".json")
            text, record = self._record(path)
            began, ended = record.get("began"), record.get("ended")
            last = max([last, *(t.timestamp() for t in map(make_time, (began, ended)) if t)])
            unended |= began is not None and ended is None
            own |= record.get("step") == stage
            if not record and stage in _STAGES:
                damaged.append(f"{self._uri(path)} is damaged")
            texts |= _words(text)
        for each in _RECORDS:
            if each in folder.files:
                text = self._text(f"{name}/{each}")
                texts |= _words(text)
                own |= each == "events.jsonl" and _begins(text, name)
        if MANIFEST in folder.files or not (damaged or _is_run(name, texts, own)):
            return {}
        if stamp := _STAMP.search(name):
            with suppress(ValueError):
                began_at = datetime.strptime(stamp[1], "%Y%m%d-%H%M%S").replace(tzinfo=UTC)
                last = max(last, began_at.timestamp())
        renewed, held = self._lease(name, folder)
        last = max(last, renewed)
        is_late = unended and last > (datetime.now(UTC) - _UNENDED).timestamp()
        is_new = last > (datetime.now(UTC) - timedelta(days=1)).timestamp()
        busy = held or is_late or is_new or self.is_locked(name)
        self.texts[name] = frozenset(texts)
        run = Item(
            path=name,
            kind=RUN,
            bytes=folder.bytes,
            last=_time(last),
            busy=busy,
            damaged="; ".join(damaged),
        )
        return {**found, name: run}

    def _lease(self, name: str, folder: _Folder) -> tuple[float, bool]:
        """Return when the lease of a run was last renewed, and whether the lease is held."""
        if not any(path.startswith(f"{_CHECKPOINTS}/{LEASES}/") for path in folder.files):
            return 0.0, False
        now = datetime.now(UTC).timestamp()
        found = [each for each in holders(self._uri(f"{name}/{_CHECKPOINTS}")).values() if each]
        held = (not (each.released or is_gone(each.writer)) and now < each.until for each in found)
        return max((each.renewed for each in found), default=0.0), any(held)

    def is_locked(self, name: str) -> bool:
        """Return whether a process on this machine holds the lock of a run."""
        above = {storage.local_path(self._root), self._workdir.absolute()}
        return any(_is_locked(folder / name) for folder in filter(None, above))

    def _record(self, path: str) -> tuple[str, dict[str, Any]]:
        text = self._text(path)
        with suppress(ValueError):
            return text, parse_mapping(text)
        return text, {}

    def _text(self, path: str) -> str:
        # Treat a damaged or removed record as empty, and continue with the others.
        try:
            return storage.read_bytes(self._uri(path)).decode(errors="replace")
        except storage.Unavailable:
            raise
        except UserError:
            return ""

    def models(self, registry: _Folder, found: Mapping[str, Item]) -> Iterator[Model]:
        """Yield the models with their promotions."""
        for name, files in _deep(registry.files, 2).items():
            if name[0] == "models":
                yield self._model(name[1], files, found)

    def _model(self, name: str, files: Mapping[str, int], found: Mapping[str, Item]) -> Model:
        above = f"{_REGISTRY}/models/{name}/versions/"
        paths = [path for path in found if path.startswith(above)]
        numbers = {path: parse_number(path[len(above) :]) for path in paths}
        versions = {number: path for path, number in numbers.items() if number}
        made, damaged = [], []
        for number in _numbers(files, "promotions"):
            uri = self._uri(f"{_REGISTRY}/models/{name}/promotions/{number}")
            try:
                fields = storage.read_manifest(uri).fields
                if int(fields["predecessor"]) + 1 != int(number):
                    raise ValueError("its number does not match its folder")
                made.append(
                    Promotion(
                        number=int(fields["predecessor"]) + 1,
                        version=int(fields["version"]),
                        restores=int(fields["restores"]),
                    )
                )
            except storage.NotPublished:
                continue
            except (UserError, KeyError, TypeError, ValueError) as error:
                damaged.append(f"{uri} is not a promotion: {error}")
        newest = max((each.number for each in made), default=0)
        later = [each for each in _numbers(files, "claims/promotions") if int(each) > newest]
        claimed = [one for each in later for one in self._find_claimed(name, each, damaged)]
        return Model(
            name=name,
            versions=versions,
            promotions=tuple(made),
            claimed=frozenset([*claimed, *registry.list_requested(self._root, name)]),
            references=self._references(versions, damaged),
            damaged=tuple(damaged),
        )

    def _find_claimed(self, name: str, number: str, damaged: list[str]) -> Iterator[int]:
        """Yield the versions of an accepted proposal whose promotion is not published yet."""
        uri = self._uri(f"{_REGISTRY}/models/{name}/claims/promotions/{number}")
        for note in storage.names(uri):
            if note.endswith("-accepted"):
                try:
                    yield int(parse(storage.read_bytes(storage.join(uri, note)))["version"])
                except (UserError, KeyError, TypeError, ValueError):
                    damaged.append(f"{storage.join(uri, note)} contains no proposal")

    def _references(self, versions: Mapping[int, str], damaged: list[str]) -> dict[int, int]:
        found = {}
        for number, path in versions.items():
            # Skip a damaged manifest, which is already reported with its item.
            with suppress(storage.NotPublished, storage.Corrupt, storage.UnknownSchema):
                lineage = storage.read_manifest(self._uri(path)).fields.get("lineage", {})
                named = lineage.get("reference") if isinstance(lineage, dict) else None
                if isinstance(named, int):
                    found[number] = named
                elif named is not None or not isinstance(lineage, dict):
                    damaged.append(f"{self._uri(path)} has no lineage")
        return found


def _begins(text: str, name: str) -> bool:
    for line in text.splitlines():
        if '"run_begin"' in line:
            with suppress(ValueError):
                return bool(parse_mapping(line).get("run_id") == name)
    return False


def _is_run(name: str, texts: Iterable[str], own: bool) -> bool:
    """Return whether a folder is a run and not a copy of one.

    The URIs in its records must contain its name, or name no run at all.
    """
    named = {
        run
        for names in map(split_names, texts)
        for run, kind in pairwise(names)
        if kind in _PUBLISHED
    }
    return name in named or (own and not named)


def _children(files: Mapping[str, int]) -> dict[str, dict[str, int]]:
    return {place[0]: inside for place, inside in _deep(files, 1).items()}


def _deep(files: Mapping[str, int], depth: int) -> dict[tuple[str, ...], dict[str, int]]:
    """Group files by their folder at this depth. Skip unfinished folders (`.name`)."""
    found: dict[tuple[str, ...], dict[str, int]] = defaultdict(dict)
    for path, size in files.items():
        segments = path.split("/")
        place = tuple(segments[:depth])
        if len(segments) > depth and not any(each.startswith(".") for each in place):
            found[place]["/".join(segments[depth:])] = size
    return found


def _numbers(files: Mapping[str, int], folder: str) -> list[str]:
    depth = folder.count("/") + 2
    found = _deep({path: 0 for path in files if path.startswith(f"{folder}/")}, depth)
    return sorted({place[-1] for place in found if parse_number(place[-1])})


def _is_locked(folder: Path) -> bool:
    with suppress(OSError):
        try:
            descriptor = os.open(folder / "lock", os.O_RDONLY)
        except PermissionError:
            # The lock belongs to another user and cannot be tested, so assume that it is held.
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
    return False


def _add_sweeps(
    items: Mapping[str, Item], root: Path | None, workdir: Path, on_cluster: Iterable[str]
) -> dict[str, Item]:
    """Add the local sweeps to the items, and keep the trials as long as their sweep."""
    found = dict(items)
    for folder in dict.fromkeys([*filter(None, [root]), workdir]):
        for path in sorted(folder.glob(f"*/{SWEEP_STATE}")):
            sweep, trials = _sweep(path.parent)
            if folder == root:
                found[sweep.path] = sweep
            for name in trials:
                _keep_trial(found, name, sweep)
    sweeps = {name: items[name] for name in on_cluster if name in items}
    for name in items:
        match = _OF_CLUSTER.fullmatch(name)
        if match and match["sweep"] in sweeps:
            _keep_trial(found, name, sweeps[match["sweep"]])
    return found


def _keep_trial(found: dict[str, Item], name: str, sweep: Item) -> None:
    run = found.get(name)
    if run is not None and run.kind == RUN:
        last = max(run.last, sweep.last) if run.last and sweep.last else None
        found[name] = replace(run, last=last, busy=run.busy or sweep.busy)


def _sweep(folder: Path) -> tuple[Item, list[str]]:
    size, last, trials, damaged = 0, 0.0, list[str](), ""
    for each in folder.iterdir():
        # Skip a file that was removed or replaced after it was listed.
        with suppress(OSError):
            found = each.stat()
            size, last = size + found.st_size, max(last, found.st_mtime)
    try:
        trials = [each.run_id for each in read_sweep(folder).trials]
    except UserError as error:
        damaged = str(error)
    item = Item(
        path=folder.name,
        kind=SWEEP,
        bytes=size,
        last=make_time(last),
        busy=_is_locked(folder),
        damaged=damaged,
    )
    return item, trials

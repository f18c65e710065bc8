"""Download a dataset, split it, and publish it as shards, once for each configuration.

A dataset is published at `<root>/datasets/<key>`. The key is derived from everything that
determines its content, so that an equal configuration finds the dataset again. TensorFlow, which
takes seconds to load, is imported only if a dataset has to be prepared.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flotilla.trainer import storage
from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.data import listing
from flotilla.trainer.data.builders import datasets
from flotilla.trainer.data.builders.datasets import BuilderSource
from flotilla.trainer.data.features import Selection
from flotilla.trainer.data.preparation.runners import (
    map_parts,
    map_parts_by_beam,
    require_reachable,
)
from flotilla.trainer.data.source import Source
from flotilla.trainer.events.progress import Work
from flotilla.trainer.features.dataset_spec import KIND, SCHEMA
from flotilla.trainer.runtime import user_code
from flotilla.trainer.runtime.errors import ConfigError, TransientError, UserError
from flotilla.trainer.storage import Manifest
from flotilla.trainer.storage.errors import report_errors

if TYPE_CHECKING:
    from flotilla.trainer.data.preparation.shards import Written

# Keys that set where data is stored and how it is read. They do not change a dataset's content.
_NOT_CONTENT = {
    "manual_dir",
    "partition",
    "disk",
    "runner",
    "spans",
    "buckets",
    "gate",
    "schema_file",
}

_LONGEST = 60
# With Beam, or with at least this many parts, finished parts are stored so that a later attempt can
# resume.
_LONG = 4
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreparedDataset:
    """The URI and manifest of a dataset, and whether it had already been published."""

    uri: str
    manifest: Manifest
    reused: bool


def prepare(config: DataConfig, root: str, scratch: Path) -> PreparedDataset:
    """Return the published dataset of a configuration, or prepare it if there is none.

    A complete dataset is reused, and a corrupted one is prepared again. Finished parts of an
    earlier attempt are reused. Downloads and temporary files are stored in `scratch` and deleted at
    the end. If `TFDS_DATA_DIR` is set, TFDS stores its files there instead.

    Raises:
        ConfigError: the dataset, version or folder does not exist, or the data cannot be used.
        TransientError: a host or the store cannot be reached.
        UserError: a file or the store cannot be read or written.
    """
    # Look up a given version without the builder, because the installed builder may be newer.
    known = _reusable(config, {"version": config.version}, root) if config.version else None
    if known:
        return known
    with mistakes_of_data(), _folder(scratch) as folder:
        source = open_source(config, root, folder)
        found = _reusable(config, source.identity, root)
        if found:
            return found
        require_reachable(config, root)
        return make(config, source, root, folder)


def dataset_key(config: DataConfig, identity: Mapping[str, Any]) -> str:
    """Return the directory name of a dataset, from its configuration and its source's identity."""
    section = config.model_dump(mode="json", exclude=_NOT_CONTENT)
    if config.map:
        module = config.map.partition(":")[0]
        section["map_source"] = user_code.digest("data.map", module)
    builder = "" if config.source else config.dataset.partition(":")[0]
    # A user's builder is identified by its code. For others, the version is sufficient.
    if ":" in config.dataset and user_code.is_users(builder):
        section["builder_source"] = user_code.digest("data.dataset", builder)
    content = json.dumps({**section, **identity, "schema": SCHEMA}, sort_keys=True)
    # Use only the last component of a path, because the whole path may exceed the limit for names.
    last = config.name.rstrip("/").rpartition("/")[2][-_LONGEST:] if config.source else config.name
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", last)
    return f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"


@contextmanager
def mistakes_of_data() -> Iterator[None]:
    """Raise errors about a dataset, or about the keys that select it, as `ConfigError`."""
    try:
        yield
    except TransientError:
        raise
    except UserError as error:
        # Other errors are about this machine or the store, such as a full disk.
        if str(error).startswith("data."):
            raise ConfigError(str(error)) from error
        raise


def make(config: DataConfig, source: Source, root: str, folder: Path) -> PreparedDataset:
    """Make the dataset of a source and publish it below `root`. `folder` is for temporary files."""
    uri = _place(config, source.identity, root)
    selection = source.select()
    source.fetch()
    shards = folder / "shards"
    shards.mkdir()
    finished = storage.join(root, "preparing", storage.name_of(uri))
    with report_errors(f"prepare {source.name}"):
        written = _write(config, source, finished, shards)
    # Delete a corrupted dataset after the new shards are written, unless it has been repaired.
    if storage.is_published(uri) and not _whole(uri):
        _require_same(uri, written)
        storage.delete(uri)
    fields = _fields(config, source, selection, written)
    manifest = storage.publish(shards, uri, kind=KIND, fields=fields)
    if storage.names(finished):
        storage.delete(finished)
    return PreparedDataset(uri, manifest, False)


def open_source(config: DataConfig, root: str, folder: Path) -> Source:
    """Return the source of a configuration's dataset. The source downloads files to `folder`.

    `root` is `storage.root`, where the listing of `data.version` is stored. If it is empty, the
    current files are listed. Raises `ConfigError` or `UserError`.
    """
    if not config.map:
        return _make_source(config, root, folder)
    from flotilla.trainer.data.mapped import MappedSource, source_config  # noqa: PLC0415

    return MappedSource(_make_source(source_config(config), root, folder), config)


def _make_source(config: DataConfig, root: str, folder: Path) -> Source:
    if config.source:
        from flotilla.trainer.data.files.file_source import FileSource  # noqa: PLC0415

        version = config.version if root else ""
        files = listing.read_listing(root, version) if version else listing.list_source(config)
        return FileSource(config, files, folder)
    return BuilderSource(config, _tfds_dir(folder))


def newest_version(config: DataConfig, scratch: Path) -> str:
    """Return the version of the builder of `config.dataset`, without a download."""
    with _folder(scratch) as folder:
        return str(datasets.builder(config, _tfds_dir(folder)).version)


def select_features(config: DataConfig, scratch: Path) -> Selection:
    """Return the selected features. Data is downloaded only for files and `data.map`."""
    with _folder(scratch) as folder:
        return open_source(config, "", folder).select()


def _place(config: DataConfig, identity: Mapping[str, Any], root: str) -> str:
    return storage.join(root, "datasets", dataset_key(config, identity))


def _reusable(config: DataConfig, identity: Mapping[str, Any], root: str) -> PreparedDataset | None:
    uri = _place(config, identity, root)
    found = _whole(uri)
    return PreparedDataset(uri, found, reused=True) if found else None


@contextmanager
def _folder(scratch: Path) -> Iterator[Path]:
    with report_errors(f"write below {scratch}"):
        scratch.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="prepare-", dir=scratch))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _tfds_dir(folder: Path) -> Path:
    chosen = os.environ.get("TFDS_DATA_DIR")
    return Path(chosen).expanduser() if chosen else folder / "tfds"


def _whole(uri: str) -> Manifest | None:
    try:
        return storage.verify(uri)
    except storage.NotPublished:
        return None
    except storage.Corrupt as error:
        _log.warning("%s; preparing it again", error)
        return None


def _require_same(uri: str, written: Written) -> None:
    try:
        there = storage.read_manifest(uri).fields.get("fingerprint")
    except storage.Corrupt:
        return
    if there and there != written.fingerprint:
        raise UserError(
            "data.source: its examples differ from those of the damaged dataset "
            f"{storage.name_of(uri)}; restore the old files, or remove {uri} to use the new files"
        )


def _write(config: DataConfig, source: Source, finished: str, folder: Path) -> Written:
    """Write the shards to `folder`. Finished parts are stored below the URI `finished`."""
    from flotilla.trainer.data.preparation.shards import assemble  # noqa: PLC0415

    parts, places = source.parts(), folder.parent / "parts"
    by_beam = config.runner.name == "beam"
    keeps = by_beam or len(parts) >= _LONG
    taken = _fetch_finished(finished, places) if keeps else set()
    left = [part for part in parts if part.folder not in taken]

    def keep(place: Path) -> None:
        if keeps:
            storage.publish(place, storage.join(finished, place.name), kind="part")
        work.add(0, 1)

    # The number of examples is unknown if an earlier attempt has finished some of the parts. Beam
    # reports finished parts instead of examples.
    total = source.total if len(left) == len(parts) and not by_beam else 0
    size = 0 if total or len(left) < _LONG else len(left)
    with Work("encoding the examples", "rows", total, size=size) as work:
        if by_beam:
            map_parts_by_beam(source, left, places, config=config, uri=finished, work=work)
        else:
            map_parts(source, left, places, config=config, work=work, done=keep)
    folders = sorted(places.iterdir())
    return assemble(source, folders, folder, config)


def _fetch_finished(uri: str, folder: Path) -> set[str]:
    found = set()
    for part, _ in storage.list_published(uri, "part"):
        name = storage.name_of(part)
        try:
            storage.fetch(part, folder / name)
            found.add(name)
        except (storage.NotPublished, storage.Corrupt) as error:
            _log.warning("%s; preparing it again", error)
            storage.delete(part)
    return found


def _fields(
    config: DataConfig, source: Source, selection: Selection, written: Written
) -> dict[str, Any]:
    targets = written.sums.targets
    moments = {name: written.sums.accumulators["train"].moments(name) for name in targets}
    return {
        "dataset_schema": SCHEMA,
        "dataset": config.name,
        "version": source.identity.get("version", ""),
        "identity": source.identity,
        "splits": {
            name: {"examples": sum(shards), "shards": shards}
            for name, shards in written.examples.items()
        },
        "block_rows": written.block_rows,
        "features": {name: spec.to_json() for name, spec in selection.specs.items()},
        "inputs": selection.inputs,
        "targets": selection.targets,
        "weight": selection.weight,
        "group": selection.group,
        "target_counts": {name: each.counts() for name, each in targets.items()},
        "target_moments": {
            name: {"mean": each.mean, "std": each.std, "min": each.least, "max": each.most}
            if each.count
            else {}
            for name, each in moments.items()
        },
        "fingerprint": written.fingerprint,
        "notes": [*source.notes(), *(line for each in targets.values() for line in each.notes())],
        **source.facts(),
    }

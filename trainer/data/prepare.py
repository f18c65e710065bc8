"""Download a dataset, split it, and publish it as shards; once for each configuration.

A dataset is at `<root>/datasets/<key>`. The key is derived from what determines its content: the
same configuration finds it again, and another one does not.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tensorflow_datasets as tfds

from trainer import storage
from trainer.config.data import DataConfig
from trainer.data import datasets
from trainer.data.download import download
from trainer.data.features import Selection, save_record_features, select
from trainer.data.key import dataset_key
from trainer.data.png import quicken
from trainer.data.spec import KIND, SCHEMA
from trainer.data.splits import plan
from trainer.storage import Manifest
from trainer.storage.errors import reported

if TYPE_CHECKING:
    from trainer.data.write import Written

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreparedDataset:
    """Where the dataset is published, and whether it was before."""

    uri: str
    manifest: Manifest
    reused: bool


def prepare(config: DataConfig, root: str, scratch: Path) -> PreparedDataset:
    """Return the published dataset of this configuration, made where there is none.

    One that is published and whole is reused; one that is damaged is made again.

    Args:
        config: the data section.
        root: `storage.root`; the dataset is published below it.
        scratch: local folder for what is downloaded and written meanwhile, removed at the end. What
            TFDS makes of the download stays in `TFDS_DATA_DIR` instead, where that is set.

    Raises:
        ConfigError: no such dataset, version or folder.
        UserError: the dataset cannot be downloaded, or is of no use here.
    """
    # A resumed run needs no builder, which may offer newer versions only.
    known = _reusable(config, config.version, root) if config.version else None
    if known:
        return known
    with _folder(scratch) as folder:
        source = datasets.builder(config, _tfds_dir(folder))
        found = _reusable(config, str(source.version), root)
        if found:
            return found
        uri = _place(config, str(source.version), root)
        selection = select(config, source.info)
        quicken(selection.connectors.values())
        download(config.dataset, source, config.manual_dir)
        shards = folder / "shards"
        with reported(f"prepare {config.dataset}"):
            written = _write(config, source, selection, shards)
        # Only now, and only if no other process has repaired it in the meantime.
        if storage.is_published(uri) and not _whole(uri):
            storage.delete(uri)
        fields = _fields(config, source, selection, written)
        return PreparedDataset(uri, storage.publish(shards, uri, kind=KIND, fields=fields), False)


def newest_version(config: DataConfig, scratch: Path) -> str:
    """Return the version that the builder of `config.dataset` offers; nothing is downloaded.

    Raises:
        ConfigError: no such dataset.
    """
    with _folder(scratch) as folder:
        return str(datasets.builder(config, _tfds_dir(folder)).version)


def selected(config: DataConfig, scratch: Path) -> Selection:
    """Return the features that a dataset would have, by its builder; nothing is downloaded.

    Raises:
        ConfigError: no such dataset.
        UserError: it is of no use here.
    """
    with _folder(scratch) as folder:
        return select(config, datasets.builder(config, _tfds_dir(folder)).info)


def _place(config: DataConfig, version: str, root: str) -> str:
    return storage.join(root, "datasets", dataset_key(config, version))


def _reusable(config: DataConfig, version: str, root: str) -> PreparedDataset | None:
    uri = _place(config, version, root)
    found = _whole(uri)
    return PreparedDataset(uri, found, reused=True) if found else None


@contextmanager
def _folder(scratch: Path) -> Iterator[Path]:
    with reported(f"write below {scratch}"):
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
        _log.warning("%s; it is prepared again", error)
        return None


def _write(
    config: DataConfig, source: tfds.core.DatasetBuilder, selection: Selection, folder: Path
) -> Written:
    # TensorFlow takes seconds to load, and a dataset that is reused does not need it.
    from trainer.data.write import write  # noqa: PLC0415

    folder.mkdir()
    sizes = {name: split.num_examples for name, split in source.info.splits.items()}
    where = plan(
        config.dataset, sizes, validation=config.validation, shards=config.shards, seed=config.seed
    )
    save_record_features(selection, folder)
    return write(config.dataset, source, selection, where, folder)


def _fields(
    config: DataConfig, source: tfds.core.DatasetBuilder, selection: Selection, written: Written
) -> dict[str, Any]:
    return {
        "dataset_schema": SCHEMA,
        "dataset": config.dataset,
        "version": str(source.version),
        "splits": {
            name: {"examples": sum(shards), "shards": shards}
            for name, shards in written.examples.items()
        },
        "features": {name: spec.to_json() for name, spec in selection.specs.items()},
        "inputs": selection.inputs,
        "targets": selection.targets,
        "weight": selection.weight,
        "group": selection.group,
        "target_counts": {name: each.counts() for name, each in written.targets.items()},
        "target_moments": {name: each.moments() for name, each in written.targets.items()},
        "fingerprint": written.fingerprint,
    }

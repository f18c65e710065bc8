"""Which checkpoints of a run are published, and the statistics that their weights were made with.

An embedding has a row for each number of a vocabulary: weights mean nothing with other data's.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from flotilla.trainer import storage
from flotilla.trainer.checkpoints.history import read_validations
from flotilla.trainer.config.main_metric import BY_LOSS, VALIDATION, VALIDATION_LOSS, MainMetric
from flotilla.trainer.config.model import CHAMPION, KERAS, initial_weights
from flotilla.trainer.config.schema import TrainingConfig
from flotilla.trainer.features.statistics.statistics import FILE, Learnt
from flotilla.trainer.runtime.errors import ConfigError, UserError
from flotilla.trainer.runtime.json_records import is_number
from flotilla.trainer.storage import Manifest

KIND = "checkpoint"
log = logging.getLogger(__name__)


def list_checkpoints(uri: str) -> list[tuple[str, int]]:
    """Return URI and global step of every published checkpoint below `uri`, oldest first."""
    return [(at, step) for at, step, _ in _readable(uri)]


def read_checkpoint(uri: str) -> Manifest:
    """Return the manifest of the checkpoint at `uri`; raises `UserError`."""
    manifest = storage.read_manifest(uri)
    if manifest.kind != KIND:
        raise UserError(f"{uri} is of kind {manifest.kind!r} and not a checkpoint")
    if type(manifest.fields.get("global_step")) is not int:
        raise storage.Corrupt(f"the manifest of {uri} names no global step: take another one")
    if "base" in manifest.fields:
        raise storage.UnknownSchema(
            f"{uri} has only the rows that changed since another checkpoint, as versions before "
            "0.2 wrote them: take a checkpoint that is whole"
        )
    return manifest


def _readable(uri: str) -> list[tuple[str, int, Manifest]]:
    """Return the checkpoints below `uri` whose manifest names a global step, oldest first."""
    found = []
    for at, manifest in storage.list_published(uri, KIND):
        step = manifest.fields.get("global_step")
        if type(step) is int and step >= 0:
            found.append((at, step, manifest))
        else:
            log.warning("passed over: the manifest of %s names no global step", at)
    return sorted(found, key=lambda each: each[1])


def require_first_weights(value: str | Mapping[str, Any], uri: str) -> None:
    """Raise `ConfigError` where a run without checkpoints needs weights that are missing."""
    if not list_checkpoints(uri):
        require_weights(value)


def require_weights(value: str | Mapping[str, Any]) -> None:
    """Raise `ConfigError` where there are no weights to begin with; `UserError` of the store."""
    source = initial_weights(value).source
    if source in ("", CHAMPION):
        return
    try:
        if not source.endswith(KERAS):
            storage.read_manifest(source)
        elif storage.name_of(source) not in storage.names(storage.parent_of(source)):
            raise storage.Missing(f"there is nothing at {source}")
    except UserError as error:
        kind = ConfigError if isinstance(error, storage.Missing) else UserError
        raise kind(f"training.warm_start: {error}") from None


def newest_checkpoint(uri: str) -> tuple[str, int]:
    """Return URI and global step of the newest published checkpoint; raises `UserError`."""
    found = list_checkpoints(uri)
    if not found:
        raise none_below(uri)
    return found[-1]


def none_below(uri: str) -> UserError:
    """Return the error of a folder without a checkpoint."""
    return UserError(f"no checkpoint is published below {uri}")


@dataclass(frozen=True, kw_only=True)
class IndexEntry:
    """One published checkpoint, and what a validation measured of it, empty where none did.

    Attributes:
        main: the metric by which the run selects.
    """

    uri: str
    global_step: int
    validation: Mapping[str, float] = field(default_factory=dict)
    main: MainMetric = BY_LOSS

    @property
    def loss(self) -> float | None:
        """The validation loss; None where it was not measured."""
        return self.validation.get(VALIDATION_LOSS)

    @property
    def by(self) -> MainMetric:
        """The metric by which it is compared with others: the loss without the main one."""
        return self.main if self.main.column in self.validation else BY_LOSS


def read_index(uri: str, main_metric: str = "") -> list[IndexEntry]:
    """Return the published checkpoints below `uri`, oldest first.

    They are compared by `main_metric`, or by the one that the newest of them names.
    """
    rows = {(row["global_step"], row["created"]): row for row in read_validations(uri)}
    there = _readable(uri)
    said = [each.fields for _, _, each in there if each.fields.get("main_metric")]
    # A run may have been resumed with another one, or by the first version that says it.
    own = {"main_metric": main_metric} if main_metric else {}
    main = MainMetric.of({**said[-1], **own}) if said else BY_LOSS
    found = []
    for at, step, manifest in there:
        measured = rows.get((step, manifest.created)) or manifest.fields.get("metrics")
        validation = _validation(measured) if "base" not in manifest.fields else {}
        found.append(IndexEntry(uri=at, global_step=step, validation=validation, main=main))
    return found


def _validation(measured: Any) -> dict[str, float]:
    """Return the finite numbers of a validation; none where its loss is no such number."""
    row = measured if isinstance(measured, dict) else {}
    found = {name: value for name, value in row.items() if name.startswith(VALIDATION)}
    # What nobody reads is not the best one, in place of which retention would delete another.
    finite = {name: value for name, value in found.items() if is_number(value)}
    return finite if VALIDATION_LOSS in finite else {}


def publish_anew(folder: Path, uri: str, fields: Mapping[str, Any]) -> None:
    """Publish a checkpoint, in place of one at the same step that could not be read."""
    if storage.is_published(uri):
        # A valid one would have been resumed.
        storage.delete(uri)
    storage.publish(folder, uri, kind=KIND, fields=fields)


def learnt_of_dataset(uri: str) -> Learnt:
    """Return what a new model is built with."""
    return Learnt(partial(_first, (uri,)))


def learnt_of_checkpoint(uri: str, dataset: str) -> Learnt:
    """Return what the model of a checkpoint is built with, or a new one for the dataset."""
    return Learnt(partial(_first, (uri, dataset)))


def learnt_of_run(checkpoints: str, training: TrainingConfig, dataset: str) -> Learnt:
    """Return what the model of a run is built with: what its weights, or the dataset, have."""
    return Learnt(lambda: _first([*_begun(checkpoints, training), dataset]))


def _begun(checkpoints: str, training: TrainingConfig) -> list[str]:
    own = [uri for uri, _ in reversed(list_checkpoints(checkpoints))]
    source = initial_weights(training.warm_start).source
    return [*own, *([source] if source and not source.endswith(KERAS) else [])]


def _first(uris: Sequence[str]) -> tuple[bytes, str]:
    """Return the statistics of the first that has some; the last, the dataset, has to."""
    *before, dataset = uris
    for uri in before:
        try:
            return storage.read_file(uri, FILE), uri
        # One that is damaged is passed over when the run goes on, too.
        except (storage.Missing, storage.NotPublished, storage.Corrupt, storage.UnknownSchema):
            continue
    return storage.read_file(dataset, FILE), dataset

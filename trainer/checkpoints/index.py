"""The index of a run's published checkpoints, and decisions about them: which to keep or select.

The index contains variables, validations and dataset statistics. Statistics belong to weights,
because weights are valid only with the vocabulary that numbers their embedding rows.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from flotilla.trainer import events, storage
from flotilla.trainer.checkpoints.history import read_validations
from flotilla.trainer.config.main_metric import BY_LOSS, VALIDATION, VALIDATION_LOSS, MainMetric
from flotilla.trainer.config.model import CHAMPION, initial_weights, is_weights_file
from flotilla.trainer.config.schema import TrainingConfig
from flotilla.trainer.features.statistics.statistics import FILE, Learnt
from flotilla.trainer.report.wording import spell_metric
from flotilla.trainer.runtime.errors import ConfigError, UserError
from flotilla.trainer.runtime.json_records import is_number, parse_record
from flotilla.trainer.storage import Manifest

KIND = "checkpoint"
PREFIX = "variables"
# The manifest field about servers that were lost since the previous checkpoint. For each server, it
# contains the paths of its variables and the global step to which their values were reset.
RECOVERED = "recovered"
INDEX_FILE = f"{PREFIX}.index"
# TensorFlow's escape sequences for paths in checkpoint keys.
_ESCAPED = {"..": ".", ".S": "/"}
_ROOT = "variables/"
_MOST_NUMBERS = 1 << 60
_UNKNOWN = datetime.min.replace(tzinfo=UTC)
# Maximum number of unmeasured checkpoints to keep for an evaluator. Without a limit, an evaluator
# that never measures would fill the disk.
MAX_AWAITED = 10
log = logging.getLogger(__name__)


def list_checkpoints(uri: str) -> list[tuple[str, int]]:
    """Return the URI and global step of each published checkpoint below `uri`, oldest first."""
    return [(at, step) for at, step, _ in _readable(uri)]


def read_checkpoint(uri: str) -> Manifest:
    """Return the manifest of the checkpoint at `uri`. Raises `UserError`."""
    manifest = storage.read_manifest(uri)
    if manifest.kind != KIND:
        raise UserError(f"{uri} is a {manifest.kind}, not a checkpoint")
    if type(manifest.fields.get("global_step")) is not int:
        raise storage.Corrupt(f"the manifest of {uri} has no global step: use another checkpoint")
    if "base" in manifest.fields:
        raise storage.UnknownSchema(
            f"{uri} contains only the rows that changed since another checkpoint (written by a "
            "version before 0.2): use a complete checkpoint"
        )
    return manifest


def _readable(uri: str) -> list[tuple[str, int, Manifest]]:
    """Return the checkpoints below `uri` whose manifest has a global step, oldest first."""
    found = []
    for at, manifest in storage.list_published(uri, KIND):
        step = manifest.fields.get("global_step")
        if type(step) is int and step >= 0:
            found.append((at, step, manifest))
        else:
            log.warning("skipped %s: its manifest has no global step", at)
    # Also sort by time, because a program may publish a model at the step of an earlier checkpoint.
    return sorted(found, key=lambda each: (each[1], each[2].created_at))


def require_first_weights(value: str | Mapping[str, Any], uri: str) -> None:
    """Raise `ConfigError` if the run has no checkpoint yet and its initial weights are missing."""
    if not list_checkpoints(uri):
        require_weights(value)


def require_weights(value: str | Mapping[str, Any]) -> None:
    """Raise `ConfigError` if the initial weights are missing, or `UserError` on a store error."""
    source = initial_weights(value).source
    if source in ("", CHAMPION):
        return
    try:
        if not is_weights_file(source):
            storage.read_manifest(source)
        elif storage.name_of(source) not in storage.names(storage.parent_of(source)):
            raise storage.Missing(f"nothing exists at {source}")
    except UserError as error:
        kind = ConfigError if isinstance(error, storage.Missing) else UserError
        raise kind(f"training.warm_start: {error}") from None


def newest_checkpoint(uri: str) -> tuple[str, int]:
    """Return the URI and step of the newest checkpoint. Raises `UserError` if there is none."""
    found = list_checkpoints(uri)
    if not found:
        raise none_below(uri)
    return found[-1]


def none_below(uri: str) -> UserError:
    """Return the error for a folder without checkpoints."""
    return UserError(f"no checkpoint is published below {uri}")


@dataclass(frozen=True, kw_only=True)
class IndexEntry:
    """A published checkpoint with its validation metrics, which are empty if it was not measured.

    Attributes:
        main: the metric by which the run selects checkpoints.
    """

    uri: str
    global_step: int
    validation: Mapping[str, float] = field(default_factory=dict)
    main: MainMetric = BY_LOSS
    created: datetime = _UNKNOWN

    @property
    def loss(self) -> float | None:
        """The validation loss, or None if it was not measured."""
        return self.validation.get(VALIDATION_LOSS)

    @property
    def by(self) -> MainMetric:
        """The metric that ranks the checkpoint: the main metric, or the loss if that is missing."""
        return self.main if self.main.column in self.validation else BY_LOSS


def read_index(uri: str, main_metric: str = "") -> list[IndexEntry]:
    """Return the published checkpoints below `uri`, oldest first.

    `main_metric` is the metric that ranks them. By default, the newest checkpoint determines it.
    """
    rows = {(row["global_step"], row["created"]): row for row in read_validations(uri)}
    there = _readable(uri)
    said = [each.fields for _, _, each in there if each.fields.get("main_metric")]
    # Use the most recently recorded metric, because a resumed run may use another one.
    own = {"main_metric": main_metric} if main_metric else {}
    main = MainMetric.of({**said[-1], **own}) if said else BY_LOSS
    found = []
    for at, step, manifest in there:
        measured = rows.get((step, manifest.created)) or manifest.fields.get("metrics")
        validation = _validation(measured) if "base" not in manifest.fields else {}
        entry = IndexEntry(
            uri=at, global_step=step, validation=validation, main=main, created=manifest.created_at
        )
        found.append(entry)
    return found


def _validation(measured: Any) -> dict[str, float]:
    """Return the finite numbers of a validation (empty if its loss is not finite)."""
    row = measured if isinstance(measured, dict) else {}
    found = {name: value for name, value in row.items() if name.startswith(VALIDATION)}
    # Ignore a validation without a finite loss, so that retention does not prefer its checkpoint.
    finite = {name: value for name, value in found.items() if is_number(value)}
    return finite if VALIDATION_LOSS in finite else {}


def publish_anew(folder: Path, uri: str, fields: Mapping[str, Any]) -> None:
    """Publish a checkpoint, replacing an unreadable one at the same step."""
    if storage.is_published(uri):
        # The existing checkpoint is invalid: the run would have resumed from a valid one.
        storage.delete(uri)
    storage.publish(folder, uri, kind=KIND, fields=fields)


def learnt_of_dataset(uri: str) -> Learnt:
    """Return the statistics of a dataset, for a new model."""
    return Learnt(partial(_first, (uri,)))


def learnt_of_checkpoint(uri: str, dataset: str) -> Learnt:
    """Return the statistics of a checkpoint's model, or the dataset's if the model has none."""
    return Learnt(partial(_first, (uri, dataset)))


def learnt_of_run(checkpoints: str, training: TrainingConfig, dataset: str) -> Learnt:
    """Return the statistics for a run's model, from its checkpoints, initial weights or dataset."""
    return Learnt(lambda: _first([*_list_own(checkpoints, training), dataset]))


def _list_own(checkpoints: str, training: TrainingConfig) -> list[str]:
    own = [uri for uri, _ in reversed(list_checkpoints(checkpoints))]
    source = initial_weights(training.warm_start).source
    return [*own, *([source] if source and not is_weights_file(source) else [])]


def _first(uris: Sequence[str]) -> tuple[bytes, str]:
    """Return the statistics of the first URI that has any, and the URI. The last is the dataset."""
    *before, dataset = uris
    for uri in before:
        try:
            return storage.read_file(uri, FILE), uri
        except (storage.Missing, storage.NotPublished, storage.Corrupt, storage.UnknownSchema):
            continue
    return storage.read_file(dataset, FILE), dataset


@dataclass(frozen=True, kw_only=True)
class StoredVariable:
    """A variable in a checkpoint: its TensorFlow dtype name, its shape, and its part."""

    dtype: str
    shape: tuple[int, ...]
    part: int = 0

    @classmethod
    def describe(cls, variable: Any, *, part: int = 0) -> StoredVariable:
        """Describe a TensorFlow variable."""
        return cls(dtype=variable.dtype.name, shape=tuple(variable.shape.as_list()), part=part)

    @property
    def rows(self) -> int:
        """The length of the first axis (1 for a scalar)."""
        return self.shape[0] if self.shape else 1

    @property
    def bytes(self) -> int:
        """The size of the values in bytes, or 0 if the size of the dtype is unknown."""
        # Use the first number in a name such as float8_e4m3fn, because only this one is a size.
        digits = re.search(r"[0-9]{1,3}", self.dtype)
        bits = 8 if self.dtype == "bool" else int(digits[0]) if digits else 0
        return math.prod(self.shape) * bits // 8

    @property
    def is_possible(self) -> bool:
        """Whether the shape and the part are valid."""
        return min((*self.shape, self.part)) >= 0 and math.prod(self.shape) < _MOST_NUMBERS


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The contents of one checkpoint.

    Attributes:
        bytes: the total size of its files.
        parts: the size of each part's data, in bytes.
        variables: the variables by path. Empty if the manifest lists none.
    """

    uri: str
    global_step: int
    created: str
    bytes: int
    parts: tuple[int, ...]
    variables: Mapping[str, StoredVariable]


def data_file(part: int, of: int) -> str:
    """Return the path of a part's data file, as TensorFlow names it."""
    return f"{PREFIX}.data-{part:05d}-of-{of:05d}"


def is_data(path: str) -> bool:
    """Return whether a path in a checkpoint is a data file."""
    return path.startswith(f"{PREFIX}.data-")


def is_variable(key: str) -> bool:
    """Return whether a key in a TensorFlow checkpoint belongs to a variable."""
    return key.startswith(_ROOT)


def find_path(key: str) -> str:
    """Return the path of the variable with this key."""
    escaped = key.removeprefix(_ROOT).partition("/")[0]
    return re.sub(r"\.\.|\.S", lambda part: _ESCAPED[part[0]], escaped)


def to_field(variables: Mapping[str, StoredVariable]) -> dict[str, Any]:
    """Return the variables as the manifest field `variables`."""
    return {
        path: {"dtype": each.dtype, "shape": list(each.shape), "part": each.part}
        for path, each in variables.items()
    }


def read_field(fields: Mapping[str, Any]) -> dict[str, StoredVariable]:
    """Return the variables in a manifest's fields. Invalid entries are skipped."""
    tree = fields.get("variables")
    found = {
        path: parse_record(StoredVariable, each)
        for path, each in (tree.items() if isinstance(tree, dict) else ())
    }
    return {path: each for path, each in found.items() if each and each.is_possible}


def find_parts(variables: Mapping[str, StoredVariable], paths: Iterable[str]) -> set[int] | None:
    """Return the parts that contain these variables, or None if a path is unknown."""
    numbers = {variables[path].part if path in variables else None for path in paths}
    return None if None in numbers else {each for each in numbers if each is not None}


def contents(uri: str) -> Contents:
    """Read the checkpoint at `uri`, or the newest one below it. Raises `UserError`."""
    if not storage.is_published(uri):
        uri, _ = newest_checkpoint(uri)
    manifest = read_checkpoint(uri)
    return Contents(
        uri=uri,
        global_step=manifest.fields["global_step"],
        created=manifest.created,
        bytes=manifest.total_bytes,
        parts=tuple(each.bytes for each in manifest.files if is_data(each.path)),
        variables=read_field(manifest.fields),
    )


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An interval in global steps, which also ends at the last step. 0 steps disable it."""

    steps: int
    last_step: int

    def find_next(self, step: int) -> int:
        """Return the next global step at which the interval ends, at most the last step."""
        after = (step // self.steps + 1) * self.steps if self.steps else self.last_step
        return min(after, self.last_step)

    def is_due(self, before: int, after: int) -> bool:
        """Return whether the interval ended between two global steps."""
        return bool(self.steps) and (
            after // self.steps > before // self.steps or after >= self.last_step > before
        )


@dataclass(frozen=True, kw_only=True)
class SaveInterval(Interval):
    """The interval between checkpoints, in steps and in seconds. Either can be 0 (disabled)."""

    seconds: float = 0.0

    @classmethod
    def from_config(cls, training: TrainingConfig) -> SaveInterval:
        """Return the interval of a configuration."""
        return cls(
            steps=training.checkpoint_every,
            last_step=training.steps,
            seconds=training.checkpoint_seconds,
        )

    def is_late(self, seconds: float) -> bool:
        """Return whether a save is due `seconds` after the last one."""
        return 0 < self.seconds <= seconds


@dataclass(frozen=True, kw_only=True)
class Retention:
    """The policy for keeping checkpoints: the newest, the best, and the newest unmeasured ones.

    Attributes:
        every_hours: minimum time between additional checkpoints, in hours. The first checkpoint
            is one of them. If 0, no additional checkpoints are kept.
    """

    newest: int
    unmeasured: int = 0
    every_hours: float = 0.0

    def list_outdated(self, found: Sequence[IndexEntry]) -> list[str]:
        """Return the URIs to delete. `found` lists all published checkpoints, oldest first."""
        unmeasured = [each for each in found if not each.validation] if self.unmeasured else []
        kept = [
            *found[-self.newest :],
            *best_first(found)[:1],
            *unmeasured[-self.unmeasured :],
            *self._list_periodic(found),
        ]
        stay = {each.uri for each in kept}
        return [each.uri for each in found if each.uri not in stay]

    def _list_periodic(self, found: Sequence[IndexEntry]) -> list[IndexEntry]:
        kept: list[IndexEntry] = []
        interval = timedelta(hours=self.every_hours)
        for each in found if self.every_hours else ():
            if not kept or each.created - kept[-1].created >= interval:
                kept.append(each)
        return kept


def best_first(found: Sequence[IndexEntry]) -> list[IndexEntry]:
    """Return the measured checkpoints, best first. See `MainMetric.order`.

    Of two equal checkpoints, the earlier one comes first.
    """
    measured = [each for each in found if each.validation]
    return sorted(measured, key=lambda each: each.main.order(each.validation))


def _explain_best(best: IndexEntry) -> tuple[str, str]:
    """Return the metric that selected the best checkpoint, and why it is not the main metric."""
    by, main = best.by, best.main
    why = "" if by == main else f", because validations do not measure {spell_metric(main.name)}"
    return f"best by validation {spell_metric(by.name)}", why


@dataclass(frozen=True, kw_only=True)
class SelectedCheckpoint:
    """The selected checkpoint of a run, which is evaluated, exported and registered.

    Attributes:
        trained: the global step of the last checkpoint.
        why: a short reason for the selection.
        fields: the fields of its manifest.
        validation: the metrics of its validation.
        best: the best checkpoint by validation, even if invalid, or None if none was measured.
    """

    uri: str
    global_step: int
    trained: int
    why: str
    fields: Mapping[str, Any]
    validation: Mapping[str, float]
    best: IndexEntry | None


def select_checkpoint(uri: str, choice: str, main_metric: str = "") -> SelectedCheckpoint:
    """Select a checkpoint of the run below `uri`, and emit an event about it.

    The choice "best" selects the best valid checkpoint by the main validation metric, or the last
    checkpoint if there is none, or none was measured after step 0. All other choices select the
    last one. A choice other than "best" and "last" is reported as the reason. Set `main_metric` if
    a finished run is resumed with another main metric.

    Raises `UserError` if there is no checkpoint, or if the last one is corrupted.
    """
    found = read_index(uri, main_metric)
    if not found:
        raise none_below(uri)
    ranked = best_first(found) if choice == "best" else []
    # Do not select the initial weights only because a slow evaluator has measured nothing else.
    if found[-1].global_step and not any(each.global_step for each in ranked):
        ranked = []
    damaged = ""
    for entry in ranked:
        by, instead = _explain_best(entry)
        try:
            return _select(entry, found, f"{by}{damaged}{instead}")
        except (storage.Corrupt, storage.Missing, storage.UnknownSchema) as error:
            log.warning("skipped %s: %s", entry.uri, error)
            events.emit(events.CheckpointPassedOver(uri=entry.uri, reason=str(error)))
            damaged = " among the intact checkpoints"
    reason = "no validated checkpoint is intact" if ranked else "no checkpoint was validated"
    asked = {"best": f"because {reason}", "last": "as set in training.hand_on"}.get(choice, choice)
    return _select(found[-1], found, f"the last, {asked}")


def select_program_checkpoint(uri: str, *, needs_model: bool) -> SelectedCheckpoint | None:
    """Select the last checkpoint of a user's program, and emit an event about it.

    With `needs_model`, select the last one that contains a model. Raises `UserError` if there is
    none. Without `needs_model`, return None if the program wrote no checkpoint.
    """
    found = read_index(uri)
    for entry in reversed(found):
        program = read_checkpoint(entry.uri).fields.get("program") or {}
        if not needs_model:
            return _select(entry, found, "the last")
        if program.get("model"):
            return _select(entry, found, "the last checkpoint with the program's model")
    if needs_model:
        raise UserError(
            f"no checkpoint below {uri} has a model: let the program write a SavedModel or a "
            ".keras file to FLOTILLA_MODEL, or set program.after_training: stop"
        )
    return None


def _select(entry: IndexEntry, found: Sequence[IndexEntry], why: str) -> SelectedCheckpoint:
    read_checkpoint(entry.uri)
    # Verify the files again, because they may have been corrupted since they were published.
    fields = storage.verify(entry.uri).fields
    step, trained = entry.global_step, found[-1].global_step
    events.emit(events.HandedOn(uri=entry.uri, global_step=step, trained=trained, why=why))
    return SelectedCheckpoint(
        uri=entry.uri,
        global_step=step,
        trained=trained,
        why=why,
        fields=fields,
        validation=entry.validation,
        best=next(iter(best_first(found)), None),
    )

"""A warm start: a new run that begins with existing weights.

The weights come from a checkpoint, a `.keras` file, or an exported model with such a file. The
global step and the optimizer are new. See
`docs/decisions/0026-warm-starts-and-the-selected-checkpoint.md`. Variables are matched by path.
Keras omits the names of outer models from some paths. Therefore, a path in a `.keras` file may have
fewer or more leading names if the match is unique.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NoReturn

import tensorflow as tf

from flotilla.trainer import events, storage
from flotilla.trainer.checkpoints import checkpoints, tensor_bundle
from flotilla.trainer.checkpoints.checkpoints import RestoredCheckpoint
from flotilla.trainer.checkpoints.index import KIND, PREFIX
from flotilla.trainer.checkpoints.part_saver import PartServers
from flotilla.trainer.config.model import (
    CHAMPION,
    KERAS,
    InitialWeights,
    initial_weights,
    is_weights_file,
)
from flotilla.trainer.embeddings.embedding_table import may_lack
from flotilla.trainer.models import keras_file
from flotilla.trainer.runtime import user_code
from flotilla.trainer.runtime.errors import ConfigError, UserError, nearest

_KEY = "training.warm_start"
_MODEL = "model/"
_FILE = f"model{KERAS}"
# Maximum number of skipped variables to list in a message.
_NAMED = 4
NOT_INCLUDED, EXCLUDED, ABSENT = "not included", "excluded", "absent in the source"
NOT_HERE = "not in this model"

Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class Source:
    """Weights on this machine: a checkpoint, or a Keras model file."""

    weights: InitialWeights
    folder: Path
    found: RestoredCheckpoint | None = None
    file: Path | None = None

    @property
    def uri(self) -> str:
        """The URI of the weights."""
        return self.weights.source


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The variables of the model that are loaded, and the skipped variables by reason."""

    taken: list[str] = field(default_factory=list)
    left: dict[str, list[str]] = field(default_factory=dict)

    def leave(self, path: str, why: str) -> None:
        """Record that a variable is skipped, and why."""
        self.left.setdefault(why, []).append(path)

    def __str__(self) -> str:
        """Return a one-line summary, which names some of the skipped variables."""
        plural = "" if len(self.taken) == 1 else "s"
        parts = [f"{len(self.taken)} variable{plural} loaded"]
        for why, paths in self.left.items():
            more = ", ..." if len(paths) > _NAMED else ""
            parts.append(f"{len(paths)} {why} ({', '.join(paths[:_NAMED])}{more})")
        return ", ".join(parts)


def check(value: str | Mapping[str, Any], paths: Sequence[str]) -> None:
    """Raise `ConfigError` if a glob matches no variable path of the model."""
    weights = initial_weights(value)
    for name, globs in (("include", weights.include), ("exclude", weights.exclude)):
        for glob in globs:
            if not _fits(paths, [glob]):
                raise ConfigError(
                    f"{_KEY}.{name}: {glob!r} matches no variable of the "
                    f"model{nearest(glob, paths)}"
                )


def fetch_weights(value: str | Mapping[str, Any], scratch: Path) -> Source | None:
    """Fetch the initial weights, or return None if the value is empty. Raises `UserError`."""
    weights = initial_weights(value)
    if not weights.source:
        return None
    if weights.source == CHAMPION:
        raise ConfigError(
            f"{_KEY}: {CHAMPION!r} works only in a pipeline; for a task, give the URI of a "
            "checkpoint"
        )
    try:
        return _fetch_source(weights, scratch / "warm")
    except ConfigError as error:
        raise ConfigError(f"{_KEY}: {error}") from None
    except UserError as error:
        raise UserError(f"{_KEY}: {error}") from None


def _fetch_source(weights: InitialWeights, folder: Path) -> Source:
    uri, file = weights.source, folder / _FILE
    if is_weights_file(uri):
        folder.mkdir(parents=True, exist_ok=True)
        file.write_bytes(storage.read_bytes(uri))
        return Source(weights=weights, folder=folder, file=file)
    manifest = storage.read_manifest(uri)
    if manifest.kind != KIND and any(each.path == _FILE for each in manifest.files):
        storage.fetch(uri, folder, only=lambda path: path == _FILE)
        return Source(weights=weights, folder=folder, file=file)
    if manifest.kind == "model":
        raise ConfigError(
            f"{uri} is a model without {_FILE}: export it with keras in export.formats, or give a "
            "checkpoint"
        )
    return Source(weights=weights, folder=folder, found=checkpoints.fetch(uri, folder))


def load(
    source: Source,
    variables: Mapping[str, tf.Variable],
    *,
    io_device: str | None,
    servers: PartServers | None = None,
) -> dict[str, str]:
    """Load the weights, and return manifest fields that describe them. Raises `UserError`."""
    own = {
        path.removeprefix(_MODEL): variable
        for path, variable in variables.items()
        if path.startswith(_MODEL)
    }
    found = source.found or _load_keras(source, list(own), io_device)
    there = {
        path.removeprefix(_MODEL): shape
        for path, shape in checkpoints.shapes(found).items()
        if path.startswith(_MODEL)
    }
    here = {path: variable.shape.as_list() for path, variable in own.items()}
    partial = source.weights.is_partial
    selection = _select(source.weights, here, there) if partial else _all(source.uri, here, there)
    wanted = {f"{_MODEL}{path}": own[path] for path in selection.taken}
    handed_on = checkpoints.select_exported(found, wanted)
    checkpoints.restore(found, handed_on, io_device=io_device, servers=servers)
    left = {why: len(paths) for why, paths in selection.left.items()}
    what = str(selection)
    taken = len(selection.taken)
    events.emit(events.WarmStart(uri=source.uri, taken=taken, left=left, what=what))
    return {"warmed_from": source.uri, "warm_start": what}


def _all(uri: str, here: Shapes, there: Shapes) -> Selection:
    selection = Selection()
    for path, shape in here.items():
        if path not in there and may_lack(path):
            selection.leave(path, ABSENT)
            continue
        if path not in there:
            _refuse(uri, f"it has no {path} of shape {shape}")
        if there[path] != shape:
            hint = checkpoints.advise_outputs(there[path], shape)
            _refuse(uri, f"its {path} has shape {there[path]}, not {shape} as in this model", hint)
        selection.taken.append(path)
    for path in sorted(there.keys() - here.keys()):
        if not may_lack(path):
            _refuse(uri, f"it has {path} of shape {there[path]}, which this model lacks")
        selection.leave(path, NOT_HERE)
    return selection


def _refuse(uri: str, what: str, hint: str = "") -> NoReturn:
    kind = "weights file" if is_weights_file(uri) else "checkpoint"
    raise ConfigError(
        f"{_KEY}: {uri} is the {kind} of another model: {what}; give weights of the "
        "same model, select variables with {from, include, exclude}, or leave the key "
        "empty" + hint
    )


def _select(weights: InitialWeights, here: Shapes, there: Shapes) -> Selection:
    selection = Selection()
    for path, shape in here.items():
        if not _fits([path], weights.include or ("*",)):
            selection.leave(path, NOT_INCLUDED)
        elif _fits([path], weights.exclude):
            selection.leave(path, EXCLUDED)
        elif path not in there:
            selection.leave(path, ABSENT)
        elif there[path] != shape:
            raise ConfigError(
                f"{_KEY}: {path} has shape {there[path]} in {weights.source} and {shape} in this "
                f"model: add '{path}' to {_KEY}.exclude, or give weights that match"
            )
        else:
            selection.taken.append(path)
    for path in sorted(there.keys() - here.keys()):
        selection.leave(path, NOT_HERE)
    for glob in weights.include or ("*",):
        if not _fits(selection.taken, [glob]):
            first = next((path for path in here if fnmatchcase(path, glob)), glob)
            raise ConfigError(
                f"{_KEY}: {weights.source} has none of the variables that {glob!r} matches in "
                f"this model{nearest(first, there)}"
            )
    return selection


def _fits(paths: Iterable[str], globs: Iterable[str]) -> bool:
    return any(fnmatchcase(path, glob) for path in paths for glob in globs)


def _load_keras(source: Source, paths: Sequence[str], io_device: str | None) -> RestoredCheckpoint:
    """Convert a Keras model file to a checkpoint with the paths of this model."""
    assert source.file
    try:
        # The CPU is enough, because only the values of the loaded model are used.
        with tf.device("CPU:0"):
            model = keras_file.read(source.file)
    # The file and the classes in it may raise any exception.
    except Exception as error:
        words = user_code.short_message(error).partition(". ")[0]
        raise ConfigError(
            f"{_KEY}: Keras cannot read {source.uri}: {words}; register your own classes "
            "with keras.saving.register_keras_serializable in the module of model.name"
        ) from None
    names = _match_paths([variable.path for variable in model.variables], paths)
    values = {f"{_MODEL}{names[each.path]}": each.value for each in model.variables}
    values |= _split_tables(values, [f"{_MODEL}{path}" for path in paths])
    folder = source.folder / "read"
    folder.mkdir(exist_ok=True)
    tensor_bundle.write(values, folder / PREFIX, io_device)
    return RestoredCheckpoint(uri=source.uri, global_step=0, folder=folder, fields={})


def _split_tables(values: dict[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """Split the tables, which an exported file stores whole, into the shards of this model."""
    found = dict[str, Any]()
    for path in [each for each in values if each.endswith("/embeddings")]:
        table = path.removesuffix("embeddings")
        shards = [each for each in paths if each.startswith(f"{table}shard_")]
        if path not in paths and shards:
            rows = values.pop(path)
            for number in range(len(shards)):
                found[f"{table}shard_{number}"] = tf.Variable(rows[number :: len(shards)])
    return found


def _match_paths(there: Sequence[str], here: Sequence[str]) -> dict[str, str]:
    """Map each path in the file to its unique match in the model or, without one, to itself."""
    alike = {path: _match(path, [each for each in here if each not in there]) for path in there}
    times = Counter(each for found in alike.values() for each in found)
    return {
        path: found[0] if path not in here and len(found) == 1 == times[found[0]] else path
        for path, found in alike.items()
    }


def _match(path: str, others: Sequence[str]) -> list[str]:
    """Return the paths that differ from `path` only in leading names."""
    return [
        other
        for other in others
        if (other.endswith(f"/{path}") or path.endswith(f"/{other}"))
        and "/" in min(path, other, key=len)
    ]

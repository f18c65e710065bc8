"""Proposes the configuration of a first run from data files and the name of the label column.

The run reads the proposal back from its YAML file, like any other configuration. This module does
not import TensorFlow.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from flotilla.trainer.config.data import DataConfig, SplitsConfig
from flotilla.trainer.config.load import is_configuration, lay_over, parse_config
from flotilla.trainer.config.schema import Config
from flotilla.trainer.data.roles import LABELS, below
from flotilla.trainer.features.statistics.statistics import are_repeated
from flotilla.trainer.models import choice
from flotilla.trainer.runtime.errors import ConfigError, TransientError, UserError, nearest
from flotilla.trainer.runtime.masking import printable
from flotilla.trainer.storage.uri import is_local

if TYPE_CHECKING:
    from flotilla.trainer.preflight.head import Rows

# Total size of the files, in bytes, below which a single process trains.
SMALL = 64 << 20
# With fewer than `_FEW` rows, a tenth of them is too small for a split. With fewer than
# `_VERY_FEW`, some shards would be empty.
_FEW, _VERY_FEW = 10_000, 100
_SHARE, _LARGER_SHARE, _SHARDS = 0.1, 0.15, 2
# Minimum number of rows to detect a column of ids. Fewer values may be unique by coincidence.
_LEAST = 20
_TWO, _CLASSES = 2, 5
_WIDTH, _MOST_LETTERS = 32, 120
_OTHERS = "async_parameter_server trains on a cluster"


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A proposed configuration.

    Attributes:
        tree: the configuration. Paths are relative to the working directory.
        why: the reason for each value, by its configuration key.
        notes: what could not be examined.
    """

    tree: Mapping[str, Any]
    why: Mapping[str, str]
    notes: tuple[str, ...] = ()

    @property
    def config(self) -> Config:
        """The parsed configuration. Raises `ConfigError`."""
        return parse_config(self.tree)

    @property
    def file_name(self) -> str:
        """The name of the configuration file, derived from the name of the model."""
        return f"{self.tree['name']}.yaml"

    def text(self, folder: Path) -> str:
        """Return the configuration as YAML, with paths relative to `folder`."""
        tree = {**self.tree, "data": {**self.tree["data"]}}
        source = tree["data"]["source"]
        if is_local(source) and source[:1] not in ("/", "~") and "://" not in source:
            tree["data"]["source"] = os.path.relpath(source, folder)
        return "\n".join([*_lines(tree, self.why, ""), ""])


def is_source(given: str | Path) -> bool:
    """Return whether an argument names data files rather than a configuration file.

    Raises `ConfigError` if it names neither.
    """
    text, path = str(given), Path(given)
    # Unlike `Path`, the functions of `os.path` accept a name that is too long for the system.
    if "://" in text or os.path.isdir(path):
        return True
    if path.suffix.lower() in (".yaml", ".yml"):
        return False
    if os.path.lexists(path):
        # A pipe is not accepted, because it can be read only once.
        return path.is_file() and not is_configuration(path)
    if re.search(r"[*?{\[]", text):
        return True
    here = path.parent if os.path.isdir(path.parent) else Path()
    hint = nearest(path.name, [each for each in sorted(os.listdir(here)) if each[:1] != "."])
    raise ConfigError(
        f"{text}: there is no such file or folder{hint}; give a configuration (.yaml), or training "
        "data and its --label"
    )


def propose(source: str | Path, label: Sequence[str], settings: Sequence[str] = ()) -> Proposal:
    """Return the proposed configuration for data files. `settings` override the proposed values.

    Raises `ConfigError` if the files or a column do not exist.
    """
    from flotilla.trainer.preflight.head import examine  # noqa: PLC0415

    tree: dict[str, Any] = {"data": {"source": str(source)}}
    if label:
        tree["data"]["label"] = list(label) if len(label) > 1 else label[0]
    given: dict[str, Any] = {}
    lay_over(given, settings)
    lay_over(tree, settings)
    config = parse_config(tree)
    try:
        with tempfile.TemporaryDirectory(prefix="flotilla-") as scratch:
            rows = examine(config.data, Path(scratch))
        return _make_proposal(config, given, rows)
    except ConfigError:
        raise
    except UserError as error:
        is_far = not is_local(config.data.source)
        missing = isinstance(error.__cause__, FileNotFoundError)
        if is_far and not missing and (isinstance(error, TransientError) or error.__cause__):
            return _make_proposal(config, given, None, f"data.source was not examined: {error}")
        raise ConfigError(str(error)) from error


def list_columns(source: str | Path, settings: Sequence[str] = ()) -> tuple[list[str], str]:
    """Return the columns of data files and the likely label. Raises `ConfigError`."""
    from flotilla.trainer.preflight.head import guess, list_names  # noqa: PLC0415

    tree: dict[str, Any] = {"data": {"source": str(source)}}
    lay_over(tree, settings)
    try:
        with tempfile.TemporaryDirectory(prefix="flotilla-") as scratch:
            names = list_names(parse_config(tree).data, Path(scratch))
    except UserError as error:
        raise ConfigError(str(error)) from error
    return names, guess(names, str(source))


def _make_proposal(
    config: Config, given: Mapping[str, Any], rows: Rows | None, *notes: str
) -> Proposal:
    chosen: dict[str, Any] = {}
    why: dict[str, str] = {}
    for key, value, reason in _choices(config, rows):
        section, _, name = key.rpartition(".")
        tree = chosen.setdefault(section, {}) if section else chosen
        tree[name] = value
        why[key] = reason
    tree = _override(chosen, given)
    return Proposal(tree=tree, why=why, notes=notes)


def _override(chosen: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    tree = {**chosen, **given}
    for name in chosen.keys() & given.keys():
        if isinstance(chosen[name], dict) and isinstance(given[name], dict):
            tree[name] = _override(chosen[name], given[name])
    return tree


def _choices(config: Config, rows: Rows | None) -> Iterator[tuple[str, Any, str]]:
    """Yield the key, the value and the reason of each proposed setting."""
    data = config.data
    yield "name", config.name, "the model's name in the registry, taken from the name of the source"
    yield "data.source", data.source, _size(rows)
    columns = _columns(rows)
    labels = _find_labels(data, columns)
    if labels and (not rows or rows.form != "images"):
        yield "data.label", labels[0] if len(labels) == 1 else labels, "the column to predict"
    inputs = [each for each in columns if each not in labels]
    ids = _ids(data, rows, inputs) if rows else []
    if ids:
        yield "data.drop", ids, "ids: a value that is unique to each row does not generalize"
    written = rows.find_formatted([*labels, *inputs]) if rows else {}
    left = [each for each in inputs if each not in ids and each not in written]
    named = _named_things(data, rows, left, labels) if rows else {}
    if types := {**written, **named}:
        why = ["formatted numbers, such as 1.234,50 or 61 %"] * bool(written)
        why += ["repeated ids: the number only identifies something"] * bool(named)
        yield "data.types", types, "; ".join(why)
    if rows and not rows.has_splits and data.splits == SplitsConfig():
        share = _LARGER_SHARE if rows.is_whole and rows.count < _FEW else _SHARE
        yield "data.validation", share, "share of the rows that are used to select the best weights"
        yield "data.splits", {"test": share}, "share of the rows that the model is evaluated on"
    if rows and rows.is_whole and rows.count < _VERY_FEW:
        yield (
            "data.shards",
            _SHARDS,
            f"number of training files; {_SHARDS} are enough for {rows.count} rows",
        )
    yield "task.name", "auto", _task(config, rows, labels)
    kinds = {name: rows.kind(name) for name in inputs if name not in ids} if rows else {}
    kinds |= dict.fromkeys(named, choice.CATEGORY)
    if rows and rows.form:
        kinds = {"image": choice.IMAGE}
    # Two-tower models accept only integers and strings, and predict a single score.
    may_match = not (rows and rows.form) and rows is not None and _may_match(rows, kinds, labels)
    says = choice.of_kinds(kinds, may_match=may_match) if kinds else None
    by = f"{says.name}: {says.why}" if says else "by the columns"
    yield "model.name", "auto", by
    if rows and rows.size < SMALL and config.cluster.launcher == "local":
        yield "training.strategy", "single", f"one process, because there is little data; {_OTHERS}"
    else:
        yield "training.strategy", config.training.strategy, "how training is distributed"
    yield (
        "training.steps",
        "auto",
        "train until validation stops improving; or set a number, or epochs: N",
    )


def _find_labels(data: DataConfig, columns: list[str]) -> list[str]:
    # `a` selects the columns `a/b` and `a/c`.
    found = [name for each in data.label for name in below(each, columns) or [each]]
    return found or [each for each in columns if each.lower() in LABELS][:1]


def _columns(rows: Rows | None) -> list[str]:
    return list(rows.columns) if rows else []


def _size(rows: Rows | None) -> str:
    if not rows or not rows.count:
        return "files, folder or pattern"
    more = "" if rows.is_whole else "more than "
    if rows.form:
        return f"{more}{rows.count:,} images, with a folder for each class"
    return f"{more}{rows.count:,} rows with {len(rows.columns):,} columns"


def _task(config: Config, rows: Rows | None, labels: Sequence[str]) -> str:
    """Return a description of the task. Raises `ConfigError` if the label is constant."""
    by_label = "by the label"
    if rows and rows.form:
        return "by the folders"
    if len(labels) > 1:
        return "several outputs, one for each label"
    scan = rows.columns.get(labels[0]) if rows and labels else None
    if scan is None or not rows or config.data.map:
        return by_label
    classes = rows.read_classes(labels[0], config.data.types.get(labels[0], ""))
    if rows.is_whole and rows.count > 1 and _is_constant(scan, classes):
        value = next(iter(classes or scan.values), "") or scan.lowest
        raise ConfigError(
            f"--label: {labels[0]!r} of {config.data.source} has only one value ({value!r}) in all "
            f"{rows.count} rows, so there is nothing to learn; give another column"
        )
    if not classes:
        return "regression: the label is a quantity"
    if len(classes) == _TWO:
        return f"binary_classification: the label is {' or '.join(classes)}"
    some = ", ".join(classes[:_CLASSES])
    more = ", ..." if len(classes) > _CLASSES else ""
    return f"classification: the label has {len(classes)} classes: {some}{more}"


def _is_constant(scan: Any, classes: Collection[str]) -> bool:
    if classes:
        return len(classes) == 1
    numbers = {*scan.kinds} <= {"int", "float", "huge", "bool"}
    return bool(scan.kinds) and numbers and scan.lowest == scan.highest


def _ids(data: DataConfig, rows: Rows, inputs: Sequence[str]) -> list[str]:
    """Return the columns with row ids: unique values, and a name or values that look like ids."""
    splits = data.splits
    used = {*data.inputs, *data.types, data.weight, data.group}
    used |= {splits.column, splits.group, splits.time}
    found = [each for each in inputs if each not in used and _is_id(each, rows)]
    return found if len(found) < len(inputs) and not data.drop and not data.map else []


def _is_id(name: str, rows: Rows) -> bool:
    scan = rows.columns[name]
    if rows.count < _LEAST or scan.missing or len(scan.values) < rows.count:
        return False
    if {*scan.kinds} == {"int"}:
        return choice.is_id(name)
    is_text = {*scan.kinds} <= {"text", "code", "int", "huge"}
    if not choice.is_id(name) and rows.is_formatted(name):
        return False
    # Strings with spaces are features, not ids.
    codes = all(re.search(r"\d", each) and not re.search(r"\s", each) for each in scan.values)
    return is_text and (codes or (choice.is_id(name) and not any(" " in x for x in scan.values)))


def _named_things(
    data: DataConfig, rows: Rows, inputs: Sequence[str], labels: Sequence[str]
) -> dict[str, str]:
    """Return the type `text` for each integer column that contains repeated ids."""
    if data.types or data.map or rows.form:
        return {}
    kinds = {name: rows.kind(name) for name in inputs}
    if choice.of_kinds(kinds, may_match=_may_match(rows, kinds, labels)).name == choice.TWO_TOWER:
        return {}
    return {
        name: "text"
        for name in inputs
        if {*rows.columns[name].kinds} == {"int"}
        and choice.names_things(name)
        and are_repeated(len(rows.columns[name].values), rows.count)
    }


def _may_match(rows: Rows, kinds: Mapping[str, str], labels: Sequence[str]) -> bool:
    scans = [rows.columns[each] for each in kinds]
    is_score = len(labels) == 1 and (
        len(rows.columns[labels[0]].values) <= _TWO or rows.columns[labels[0]].kinds.get("float")
    )
    of_ids = ({"int"}, {"text"})
    return bool(is_score) and all({*scan.kinds} in of_ids and not scan.missing for scan in scans)


def _lines(tree: Mapping[str, Any], why: Mapping[str, str], path: str) -> Iterator[str]:
    indent = "  " * (path.count(".") + bool(path))
    for name, value in tree.items():
        key = f"{path}.{name}" if path else name
        is_section = isinstance(value, dict) and not path and value
        if is_section:
            yield ""
            yield f"{name}:"
            yield from _lines(value, why, key)
            continue
        text = f"{indent}{_yaml(name)}: {_yaml(value)}"
        reason = printable(" ".join(why.get(key, "").split()))[:_MOST_LETTERS]
        yield f"{text:{_WIDTH}}  # {reason}" if reason else text


def _yaml(value: Any) -> str:
    text = yaml.safe_dump(
        value, default_flow_style=True, allow_unicode=True, width=10**9, sort_keys=False
    )
    if printable(text) != text:
        text = yaml.safe_dump(value, default_flow_style=True, width=10**9, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")

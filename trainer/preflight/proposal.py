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
from typing import Any

import yaml

from flotilla.trainer.config.data import SINCE_CHAMPION, DataConfig, SplitsConfig
from flotilla.trainer.config.load import is_configuration, lay_over, parse_config
from flotilla.trainer.config.schema import Config
from flotilla.trainer.data import listing
from flotilla.trainer.data.roles import format_names
from flotilla.trainer.features.statistics.statistics import are_repeated
from flotilla.trainer.models import choice
from flotilla.trainer.runtime.errors import ConfigError, TransientError, UserError, nearest
from flotilla.trainer.runtime.masking import printable
from flotilla.trainer.storage import patterns

# Maximum number of rows of a table to examine.
ROWS = 10_000
# Total size of the files, in bytes, below which a single process trains.
SMALL = 64 << 20
# With fewer than `_FEW` rows, a tenth of them is too small for a split. With fewer than
# `_VERY_FEW`, some shards would be empty.
_FEW, _VERY_FEW = 10_000, 100
_SHARE, _LARGER_SHARE, _SHARDS = 0.1, 0.15, 2
# Minimum number of rows to detect a column of ids. Fewer values may be unique by coincidence.
_LEAST = 20
_LABELS = ("label", "target", "class", "y", "outcome", "churn", "survived", "price")
_TWO, _CLASSES = 2, 5
_WIDTH, _MOST_LETTERS = 32, 120
# Names of columns that are labels by default. See `flotilla.trainer.data.roles`.
_BY_NAME = ("label", "target")
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
        if patterns.is_local(source) and source[:1] not in ("/", "~") and "://" not in source:
            tree["data"]["source"] = os.path.relpath(source, folder)
        return "\n".join([*_lines(tree, self.why, ""), ""])


@dataclass(frozen=True)
class Rows:
    """Statistics of each column over the first rows, and whether the source has more rows."""

    count: int
    columns: Mapping[str, Any]
    is_whole: bool
    parsed: bool
    form: str = ""
    size: int = 0
    has_splits: bool = False


def is_source(given: str | Path) -> bool:
    """Return whether a command-line argument names data files rather than a configuration file.

    Raises:
        ConfigError: it names neither.
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

    Raises:
        ConfigError: the files or a column do not exist.
    """
    tree: dict[str, Any] = {"data": {"source": str(source)}}
    if label:
        tree["data"]["label"] = list(label) if len(label) > 1 else label[0]
    given: dict[str, Any] = {}
    lay_over(given, settings)
    lay_over(tree, settings)
    config = parse_config(tree)
    try:
        with tempfile.TemporaryDirectory(prefix="flotilla-") as scratch:
            rows = _examine(config.data, Path(scratch))
    except ConfigError:
        raise
    except UserError as error:
        is_far = not patterns.is_local(config.data.source)
        missing = isinstance(error.__cause__, FileNotFoundError)
        if is_far and not missing and (isinstance(error, TransientError) or error.__cause__):
            return _make_proposal(config, given, None, f"data.source was not examined: {error}")
        raise ConfigError(str(error)) from error
    return _make_proposal(config, given, rows)


def list_columns(source: str | Path, settings: Sequence[str] = ()) -> tuple[list[str], str]:
    """Return the columns of data files and the likely label. Raises `ConfigError`."""
    tree: dict[str, Any] = {"data": {"source": str(source)}}
    lay_over(tree, settings)
    try:
        with tempfile.TemporaryDirectory(prefix="flotilla-") as scratch:
            names = _header(parse_config(tree).data, Path(scratch))
    except UserError as error:
        raise ConfigError(str(error)) from error
    return names, guess(names, str(source))


def guess(names: Sequence[str], source: str) -> str:
    """Return the column that is most likely the label."""
    stem = re.sub(r"[^a-z]", "", Path(source).stem.lower())
    for word in _LABELS:
        if found := [each for each in names if each.lower() == word]:
            return found[0]
    of_source = [
        each for each in names if re.sub(r"[^a-z]", "", each.lower()) in (stem, f"{stem}ed")
    ]
    return next(iter([*of_source, *reversed(names)]), "")


def _header(data: DataConfig, scratch: Path) -> list[str]:
    from flotilla.trainer.data.files.file_pieces import choose_reader  # noqa: PLC0415

    pieces = choose_reader(data, _list_files(data).files, scratch)
    return list(pieces.header()[0]) if not pieces.is_listing else []


def _list_files(data: DataConfig) -> Any:
    found = listing.list_source(data)
    return found if data.spans == SINCE_CHAMPION else listing.select_spans(found, data.spans, {})


def _examine(data: DataConfig, scratch: Path) -> Rows:
    # Import these modules late, because they import Arrow.
    from flotilla.trainer.data.files.file_pieces import one_format, select_pieces  # noqa: PLC0415
    from flotilla.trainer.preflight.head import few_files  # noqa: PLC0415

    taken = _list_files(data)
    size = sum(each.size for each in taken.files)
    form, _ = one_format(data, taken.files)
    # Skip TFRecord files, because reading them imports TensorFlow.
    few = few_files(data, taken, scratch) if form != "tfrecord" else None
    if not few or not few.listing.files:
        return Rows(0, {}, is_whole=False, parsed=False, size=size)
    pieces = select_pieces(data, few.listing, scratch)
    has_splits = any(each.split for each in pieces.files)
    if pieces.is_listing:
        folders = {each.path.rpartition("/")[0] for each in pieces.files}
        return Rows(
            len(taken.files), {}, is_whole=True, parsed=False, form="images",
            size=size, has_splits=has_splits or len(folders) < _TWO,
        )  # fmt: skip
    names, said = pieces.header()
    if not data.map:
        _require_label(data, names)
        kept = pieces.roles(data, names, said).kept
        said = tuple(each for each in names if each not in kept)
    count, is_cut, scans = _scan(pieces, names, data.label)
    is_cut = is_cut or few.is_part
    if not count and not is_cut:
        raise ConfigError(f"data.source: {data.source} has no rows; give files that have rows")
    for scan in scans.values():
        scan.lack(count)
    return Rows(
        count, {name: each for name, each in scans.items() if name not in said},
        is_whole=not is_cut, parsed=pieces.reader.parsed, size=size, has_splits=has_splits,
    )  # fmt: skip


def _scan(
    pieces: Any, names: Sequence[str], labels: Sequence[str]
) -> tuple[int, bool, dict[str, Any]]:
    """Return the number of rows read, whether there are more, and a scan of each column."""
    import pyarrow as pa  # noqa: PLC0415

    from flotilla.trainer.data.files import column_scan  # noqa: PLC0415

    scans: dict[str, column_scan.ColumnScan] = {}
    count, is_cut = 0, False
    for number in range(len(pieces.files)):
        left = ROWS // len(pieces.files)
        for rows in _blocks(pieces, names, number, left):
            taken, left = rows.table.slice(0, left), left - len(rows.numbers)
            is_cut = is_cut or left < 0
            count += len(taken)
            for name in taken.column_names:
                new = column_scan.ColumnScan(most=column_scan.MOST_CLASSES, gathers=name in labels)
                scan = scans.setdefault(name, new)
                array = pa.chunked_array(taken[name]).combine_chunks()
                if column_scan.get_kind(array.type):
                    numbers = rows.numbers[: len(taken)]
                    scan.add(array, number, numbers, parsed=pieces.reader.parsed)
    return count, is_cut, scans


def _blocks(pieces: Any, names: Sequence[str], number: int, most: int) -> Iterator[Any]:
    """Yield blocks of a file's rows until they have more than `most` rows in total."""
    from flotilla.trainer.data.files.formats.raw_rows import Piece  # noqa: PLC0415

    reader = pieces.reader
    columns = () if reader.varies else names
    reader.at_once = min(reader.at_once, most) or reader.at_once
    with pieces.local(number) as path:
        for rows in pieces.rows(path, Piece(number), columns, lambda _number, _why: None):
            yield rows
            most -= len(rows.numbers)
            if most < 0:
                return


def _require_label(data: DataConfig, names: Sequence[str]) -> None:
    if not data.label and not any(each.lower() in _BY_NAME for each in names):
        raise ConfigError(
            f"--label is missing: name the column of {data.source} to predict, perhaps "
            f"{guess(names, data.source)!r} (one of {format_names(names)})"
        )
    for each in data.label:
        if each not in names and not any(name.startswith(f"{each}/") for name in names):
            hint = nearest(each, names) or f" (one of {format_names(names)})"
            raise ConfigError(f"--label: there is no column {each!r} in {data.source}{hint}")


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
    labels = [*data.label] or [each for each in _columns(rows) if each.lower() in _BY_NAME][:1]
    if labels and (not rows or rows.form != "images"):
        yield "data.label", labels[0] if len(labels) == 1 else labels, "the column to predict"
    inputs = [each for each in _columns(rows) if each not in labels]
    ids = _ids(data, rows, inputs) if rows else []
    if ids:
        yield "data.drop", ids, "ids: a value that is unique to each row does not generalize"
    written = _find_formatted(rows, [*labels, *inputs]) if rows else {}
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
    kinds = {name: _kind(rows, name) for name in inputs if name not in ids} if rows else {}
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
    from flotilla.trainer.data.files.labels import read_label  # noqa: PLC0415

    found = read_label(labels[0], config.data.types.get(labels[0], ""), scan, parsed=rows.parsed)
    if rows.is_whole and rows.count > 1 and _is_constant(scan, found.classes):
        value = next(iter(found.classes or scan.values), "") or scan.lowest
        raise ConfigError(
            f"--label: {labels[0]!r} of {config.data.source} has only one value ({value!r}) in all "
            f"{rows.count} rows, so there is nothing to learn; give another column"
        )
    if not found.classes:
        return "regression: the label is a quantity"
    if len(found.classes) == _TWO:
        return f"binary_classification: the label is {' or '.join(found.classes)}"
    some = ", ".join(found.classes[:_CLASSES])
    more = ", ..." if len(found.classes) > _CLASSES else ""
    return f"classification: the label has {len(found.classes)} classes: {some}{more}"


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
    found = [
        each for each in inputs if each not in used and _is_id(each, rows.columns[each], rows.count)
    ]
    return found if len(found) < len(inputs) and not data.drop and not data.map else []


def _is_id(name: str, scan: Any, rows: int) -> bool:
    if rows < _LEAST or scan.missing or len(scan.values) < rows:
        return False
    if {*scan.kinds} == {"int"}:
        return choice.is_id(name)
    is_text = {*scan.kinds} <= {"text", "code", "int", "huge"}
    if not choice.is_id(name) and _is_formatted(scan):
        return False
    # Strings with spaces are features, not ids.
    codes = all(re.search(r"\d", each) and not re.search(r"\s", each) for each in scan.values)
    return is_text and (codes or (choice.is_id(name) and not any(" " in x for x in scan.values)))


def _is_formatted(scan: Any) -> bool:
    """Return whether the strings are formatted numbers or dates, such as 3,25 and 31.12.2024."""
    from flotilla.trainer.data.files import written_numbers  # noqa: PLC0415

    texts, writing = scan.kinds.get("text", 0), scan.writing
    is_time = texts and texts in (writing.get("date"), writing.get("clock"))
    return bool(is_time or written_numbers.find_kind(writing, texts=texts))


def _named_things(
    data: DataConfig, rows: Rows, inputs: Sequence[str], labels: Sequence[str]
) -> dict[str, str]:
    """Return the type `text` for each integer column that contains repeated ids."""
    if data.types or data.map or rows.form:
        return {}
    kinds = {name: _kind(rows, name) for name in inputs}
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


def _kind(rows: Rows, name: str) -> str:
    from flotilla.trainer.data.files import written_numbers  # noqa: PLC0415

    scan = rows.columns[name]
    kinds = {*scan.kinds}
    if "image" in kinds:
        return choice.IMAGE
    if "tensor" in kinds:
        is_ordered = len(scan.shapes) > 1 or scan.tensor == "text"
        return choice.SEQUENCE if is_ordered or choice.is_series(*scan.shapes) else choice.TENSOR
    written = written_numbers.find_kind(scan.writing, texts=scan.kinds.get("text", 0))
    if written or (kinds and kinds <= {"int", "float", "huge", "bool", "time"}):
        return choice.NUMBER
    return choice.CATEGORY if are_repeated(len(scan.values), rows.count) else choice.FREE_TEXT


def _find_formatted(rows: Rows, names: Sequence[str]) -> dict[str, str]:
    """Return the type of each text column whose values are all formatted numbers of one unit."""
    from flotilla.trainer.data.files import written_numbers  # noqa: PLC0415

    found = {}
    for name in names:
        scan = rows.columns[name]
        texts, whole = scan.kinds.get("text", 0), scan.kinds.get("int", 0)
        kind = written_numbers.find_kind(scan.writing, texts=texts, whole=whole)
        is_mixed = len(
            written_numbers.list_units(scan.writing)
        ) > 1 or written_numbers.has_per_cent(scan.writing, plain=bool(whole))
        is_all = {*scan.kinds} <= {"text", "int"} and scan.writing.get(kind) == texts
        if kind and is_all and not is_mixed:
            found[name] = kind
    return found


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

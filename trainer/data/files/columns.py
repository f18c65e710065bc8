"""Types of the columns of files, inferred from all rows, not only from the first ones.

The manifest of an exported model has its inputs: for each, its stored spec, and the type of its
column. Later files are read in the same way as the training data, without inferring types.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from flotilla.trainer.config.data import NUMBERS_IN_WRITING, DataConfig, ImageConfig
from flotilla.trainer.data.files import text_values
from flotilla.trainer.data.files.column_scan import EXACT, NUMBERS, ColumnScan
from flotilla.trainer.data.files.file_pieces import FilePieces
from flotilla.trainer.data.files.text_values import NEARLY_ALL
from flotilla.trainer.features.class_names import Spellings, lookalikes
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.features.statistics.statistics import are_repeated
from flotilla.trainer.runtime.errors import ConfigError, UserError
from flotilla.trainer.storage import Manifest

_FEWEST_IDS = 2
_HALF = 0.5
_INT64 = 2**63
# Maximum number of words for missing values that a note lists.
_MARKS = 5
# Maximum number of characters of a value in a note.
_LONGEST = 60
_TENSORS = {"float": "float32", "int": "int64", "bool": "bool", "text": "string"}


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of files, and the rules for reading it.

    Attributes:
        type: one of `flotilla.trainer.config.data.TYPES`, or `tensor`. `why` is the reason.
        shape: shape of a value, or empty for a scalar. A first size of None is a variable length.
        pads: whether lists are cropped or padded to that shape.
        dtype: type of a tensor or an image; float64 for numbers that would lose digits as float32.
        stored: stored form of an image.
        missing: counts of the words for a missing value.
        hint: a remark, for example that the column is constant, or empty.
        note: a note to the user, with the key that changes the decision, or empty.
    """

    name: str
    type: str
    why: str
    gaps: bool = False
    shape: tuple[int | None, ...] = ()
    pads: bool = False
    dtype: str = ""
    stored: str = ""
    classes: tuple[str, ...] = ()
    unit: str = ""
    missing: Mapping[str, int] = field(default_factory=dict)
    hint: str = ""
    note: str = ""


def decide(  # noqa: PLR0913
    config: DataConfig,
    files: FilePieces,
    scan: ColumnScan,
    name: str,
    *,
    said: str,
    is_label: bool,
    required: bool = False,
    exact: bool = False,
) -> Column:
    """Decide how to read a column. `said` is the configured type, or empty to infer the type.

    If the column is `required`, a row without a value is broken. An `exact` column keeps all
    digits, which is needed if splits depend on it. Raises `UserError` if the values have no common
    type or shape, or there are too many classes.
    """
    # Some formats store a single value as a list of one, and a missing value as an empty list.
    single = files.reader.lists and "tensor" in scan.kinds and scan.shapes <= {(0,), (1,)}
    label = Label("", "")
    if is_label and (single or "tensor" not in scan.kinds or "text" in scan.kinds):
        label = read_label(name, said, scan, parsed=files.reader.parsed)
    kind, why, note = label.type or said, label.why or "data.types", ""
    _check_said(name, said, scan)
    if not kind:
        kind, why = _infer(config, name, scan, files)
    if single and kind == "tensor":
        kind = scan.tensor or "text"
    gaps = (scan.missing > 0 or (single and (0,) in scan.shapes)) and not (is_label or required)
    if kind == "int" and not (is_label or required):
        kind, why, note = _int_or_id(name, scan, said, why, gaps=gaps)
    if kind == "image":
        shape, stored = _find_image_form(name, config.image, scan.shapes)
        return Column(name=name, type=kind, why=why, shape=shape, dtype="uint8", stored=stored)
    note = _join(note, *label.notes, *_notes(name, kind, said, scan))
    marks = {} if kind in ("text", "class") else dict(sorted(scan.marks.items()))
    hint = _hint(scan, kind)
    column = Column(name=name, type=kind, why=why, gaps=gaps, missing=marks, hint=hint, note=note)
    if kind == "class":
        _check_class(name, scan, gaps=gaps and not config.bad_rows)
        classes = label.classes or list_classes(scan)
        note = _join(note, _note_sets(name, classes) if is_label else "")
        return replace(column, classes=classes, note=note)
    return _set_dtype(config, column, scan, exact=exact, is_label=is_label)


def _find_image_form(
    name: str, config: ImageConfig, sizes: set[tuple[int, ...]]
) -> tuple[tuple[int, ...], str]:
    """Return shape and stored form of images: encoded if a size is set, else of a common size."""
    if config.size:
        return (*config.size, config.channels), "image"
    if len({each[:2] for each in sizes}) > 1:
        low, high = min(sizes)[:2], max(sizes)[:2]
        raise UserError(
            f"data.image: the images of {name!r} have several sizes, such as {list(low)} and "
            f"{list(high)}; set data.image: {{size: [HEIGHT, WIDTH]}}"
        )
    height, width, channels = max(sizes, default=(1, 1, 1))
    # The default of 3 channels counts as not configured, so that gray images are stored with one
    # channel.
    if config.channels != ImageConfig().channels:
        channels = config.channels
    return (height, width, channels), "raw"


def _join(*notes: str) -> str:
    return "; ".join(filter(None, notes))


def _note_sets(name: str, classes: Sequence[str]) -> str:
    """Return a note if the classes look like sets of labels, such as `red|blue`, otherwise ""."""
    for mark in ("|", ";"):
        joined = [each for each in classes if mark in each.strip(mark)]
        parts = {part.strip() for each in joined for part in each.split(mark)}
        if len(joined) > 1 and len(parts) <= len(joined) + 1:
            return (
                f"data.label: {name!r} has values such as {joined[0]!r}, and each value is read as "
                "one class; if an example can have several classes, write one column of 0 and 1 "
                "for each class, and name these columns in data.label"
            )
    return ""


def _check_class(name: str, scan: ColumnScan, *, gaps: bool) -> None:
    if scan.many:
        raise UserError(
            f"data.types: {name!r} has more than {scan.most} different values, too many for "
            f"classes; set data.types: {{{name}: float}} if it is a number"
        )
    if gaps and (without := rows_without_class(scan)):
        raise UserError(
            f"data.types: {name!r} has {without} rows without a value, but a class cannot be "
            f"missing; set data.types: {{{name}: text}}, which also accepts missing values"
        )


def _set_dtype(
    config: DataConfig, column: Column, scan: ColumnScan, *, exact: bool, is_label: bool
) -> Column:
    if column.type in NUMBERS_IN_WRITING:
        unit = _unit(column.name, scan)
        return replace(column, unit=unit, dtype="" if is_label else "float64")
    wide = "float64" if exact or not (is_label or scan.fits("float32")) else ""
    if column.type == "tensor":
        held = scan.tensor or "float"
        _check_digits(column.name, scan, held)
        dtype = wide if wide and held == "float" else _TENSORS[held]
        return replace(_set_shape(config, column, scan, is_label=is_label), dtype=dtype)
    is_float = column.type == "float" or (column.type == "int" and column.gaps)
    return replace(column, dtype=wide if is_float else "")


def _check_digits(name: str, scan: ColumnScan, held: str) -> None:
    largest = max(scan.highest, -scan.lowest)
    if (held == "int" and largest >= _INT64) or (
        held == "float" and scan.whole and EXACT["float64"] < largest < _INT64
    ):
        raise UserError(
            f"data.drop: {name!r} has lists of whole numbers up to {largest:.17g}, which would "
            f"lose digits; write each as text in its own column, or set data.drop: [{name}]"
        )


def _int_or_id(
    name: str, scan: ColumnScan, said: str, why: str, *, gaps: bool
) -> tuple[str, str, str]:
    """Return the type of a whole-number column (text if no number type fits), reason and note."""
    found = ""
    if "huge" in scan.kinds or scan.highest >= _INT64:
        found = "whole numbers beyond 64 bits"
    elif gaps and max(scan.highest, -scan.lowest) > EXACT["float64"]:
        found = "whole numbers beyond 2^53, and some are missing"
    if not found:
        return "int", why, ""
    if said:
        raise UserError(
            f"data.types: {name!r} has {found}, which no numeric type can store with all digits; "
            f"set data.types: {{{name}: text}}"
        )
    note = (
        f"data.types: {name!r} is read as text, like an id, because it has {found}; set "
        f"data.types: {{{name}: float}} if it is a quantity"
    )
    return "text", found, note


def _set_shape(config: DataConfig, column: Column, scan: ColumnScan, *, is_label: bool) -> Column:
    name, shapes = column.name, sorted(scan.shapes)
    ranks = {len(each) for each in shapes if each != (0,)} or {1}
    given = config.shapes.get(name)
    if given is not None:
        if len(given) not in ranks:
            raise ConfigError(
                f"data.shapes: {name}: {list(given)} does not match the lists of the column, which "
                f"have shapes such as {list(shapes[-1])}"
            )
        if 0 in given[1:]:
            raise ConfigError(f"data.shapes: {name}: only the first size may be 0")
        return replace(column, shape=(given[0] or None, *given[1:]), pads=True)
    if len(shapes) <= 1:
        return replace(column, shape=next(iter(shapes), ()))
    whole = [each for each in shapes if each != (0,)]
    inner = {each[1:] for each in whole}
    if len(inner) == 1 and len(ranks) == 1 and not is_label:
        lengths = [each[0] for each in shapes]
        note = (
            f"data.shapes: {name!r} has lists of {min(lengths)} to {max(lengths)} values, and the "
            f"lengths are kept; set data.shapes: {{{name}: {[max(lengths), *next(iter(inner))]}}} "
            "to truncate and pad the lists"
        )
        return replace(column, shape=(None, *next(iter(inner))), note=_join(column.note, note))
    advice = f"set data.drop: [{name}], or write lists of the same depth"
    if len(ranks) == 1:
        largest = [max(sizes) for sizes in zip(*whole, strict=True)]
        advice = f"set data.shapes: {{{name}: {largest}}}"
    raise UserError(
        f"data.shapes: the values of {name!r} have {len(shapes)} shapes, such as "
        f"{' and '.join(str(list(each)) for each in whole[:2])}; {advice}"
    )


def _check_said(name: str, said: str, scan: ColumnScan) -> None:
    best = _infer_format(scan) if said in ("int", "float") else ""
    if best and scan.kinds["text"] >= NEARLY_ALL * scan.kinds.total():
        raise UserError(
            f"data.types: {name!r} has values that are not of type {said}, such as "
            f"{scan.texts[0][2]!r}; set data.types: {{{name}: {best}}}"
        )


def _unit(name: str, scan: ColumnScan) -> str:
    units = text_values.list_units(scan.writing)
    plain = scan.lowest <= scan.highest and (scan.lowest or scan.highest)
    if text_values.has_per_cent(scan.writing, plain=bool(plain)):
        raise UserError(
            f"data.types: {name!r} has numbers with and without a percent sign; write all of them "
            "with the sign, or all without it, in the files or with data.map"
        )
    if len(units) > 1:
        raise UserError(
            f"data.types: {name!r} has numbers in several units ({', '.join(units[:3])}); convert "
            "them to one unit, in the files or with data.map"
        )
    return "".join(units)


def _infer(config: DataConfig, name: str, scan: ColumnScan, files: FilePieces) -> tuple[str, str]:
    kinds, total = scan.kinds, scan.kinds.total()
    if not total:
        return "text", "texts" if scan.marks else "no value in any row"
    if len(kinds) == 1 or set(kinds) <= {"int", "huge"}:
        only = "int" if "huge" in kinds else next(iter(kinds))
        return ("text", "numbers with leading zeros") if only == "code" else (only, "all values")
    if set(kinds) <= set(NUMBERS):
        return "float", "numbers, some with a fraction or beyond 64 bits"
    numbers = sum(kinds[each] for each in NUMBERS)
    counted, what = max((numbers, "numbers"), (kinds["time"], "times"))
    if set(kinds) <= {*NUMBERS, "code"}:
        return "text", "numbers, some with leading zeros"
    if counted < NEARLY_ALL * total:
        return "text", "texts"
    if config.bad_rows:
        kind = "time" if what == "times" else "float" if "float" in kinds else "int"
        return kind, f"{counted} of {total} values are {what}"
    places = ", ".join(f"{files.place(piece, row)}: {text!r}" for piece, row, text in scan.texts)
    places = f" ({places})" if places else ""
    best = _infer_format(scan)
    types = [f"{{{name}: {best}}} to read them as numbers"] if best else []
    # A text cannot be a weight or a time.
    types += [f"{{{name}: text}}"] if name not in (config.weight, config.splits.time) else []
    ways = f"set data.types: {', '.join(types)}, or" if types else "correct them, or set"
    raise UserError(
        f"data.types: the column {name!r} has mixed types: {counted} {what} and "
        f"{total - counted} other values{places}; {ways} data.bad_rows to the share of rows "
        "that may be skipped"
    )


def _infer_format(scan: ColumnScan) -> str:
    texts, whole, huge, fractions = (scan.kinds[each] for each in ("text", *NUMBERS))
    whole += huge
    others = scan.kinds.total() - texts - whole - fractions
    return text_values.find_kind(
        scan.writing, texts=texts, whole=whole, fractions=fractions, others=others
    )


def _notes(name: str, kind: str, said: str, scan: ColumnScan) -> Iterator[str]:
    odd = {mark: n for mark, n in scan.marks.items() if not text_values.is_null(mark)}
    if odd and kind not in ("text", "class"):
        marks = ", ".join(f"{mark!r} ({odd[mark]} times)" for mark in sorted(odd)[:_MARKS])
        yield (
            f"the column {name!r} has values that are read as missing: {marks}; set data.types: "
            f"{{{name}: text}} if they are ordinary values"
        )
    if kind in ("text", "class") and not said:
        yield from _note_totals(name, scan)
    if kind == "text" and not said:
        yield from _note_texts(name, scan)


def _note_totals(name: str, scan: ColumnScan) -> Iterator[str]:
    totals = text_values.list_totals(scan.writing)
    # A word that is frequent is an ordinary category.
    if 0 < sum(totals.values()) <= (1 - NEARLY_ALL) * scan.kinds.total():
        words = ", ".join(f"{word!r} ({totals[word]} times)" for word in sorted(totals)[:_MARKS])
        yield (
            f"the column {name!r} has values that may mark rows of totals: {words}; remove these "
            f"rows from the files, or set data.types: {{{name}: text}} if they are ordinary values"
        )


def _note_texts(name: str, scan: ColumnScan) -> Iterator[str]:
    # Without strings, the column has numbers, codes, booleans or times of several kinds.
    first, total = scan.texts[0][2][:_LONGEST] if scan.texts else "", scan.kinds.total()
    writing = scan.writing
    numbers = sum(scan.kinds[each] for each in NUMBERS)
    as_text = f"{{{name}: text}} if they are texts"
    if best := _infer_format(scan):
        other = next(each for each in NUMBERS_IN_WRITING if each != best)
        both = writing[best] == writing[other] and "," in first
        as_number = f"{{{name}: {best}}}"
        ways = text_values.advise(writing, as_number, as_text, plain=numbers > 0)
        yield (
            f"the column {name!r} has numbers stored as text, such as {first!r}, and is read as "
            f"text; {ways}{f' ({other} if the comma is the decimal separator)' if both else ''}"
        )
    elif found := text_values.describe(writing, total, numbers=numbers, times=scan.kinds["time"]):
        what, remedy = found
        yield (
            f"the column {name!r} has {what}, such as {first!r}, and is read as text; {remedy}, or "
            f"set data.types: {as_text}"
        )
    elif first and _HALF * total < numbers and (scan.many or len(scan.values) > FEW_VALUES):
        yield (
            f"the column {name!r} has {numbers} numbers and {total - numbers} other values, such "
            f"as {first!r}, and is read as text; empty the other cells to read it as "
            f"numbers, or set data.types: {as_text}"
        )
    elif are_repeated(len(scan.values), scan.rows) and (alike := lookalikes(sorted(scan.values))):
        yield (
            f"the column {name!r} has values that look alike: {_pairs(alike)}; give them one "
            f"spelling, or set data.types: {{{name}: text}} if they differ in meaning"
        )


def _hint(scan: ColumnScan, kind: str) -> str:
    if not scan.kinds and not scan.marks:
        return "no value in any row"
    if scan.missing:
        return ""
    if not scan.many and len(scan.values) == 1 and scan.rows > 1:
        return f"always {next(iter(scan.values))!r}"
    if kind == "text" and _FEWEST_IDS < scan.rows == len(scan.values):
        return "a different string in each row, like an id"
    return ""


def describe_columns(columns: Mapping[str, Column]) -> list[dict[str, Any]]:
    """Return descriptions of the columns for a manifest."""
    return [
        {"name": each.name, "type": each.type, "why": each.why}
        | ({"unit": each.unit} if each.unit else {})
        | ({"missing": dict(each.missing)} if each.missing else {})
        | ({"hint": each.hint} if each.hint else {})
        | ({"classes": len(each.classes)} if each.classes else {})
        for each in columns.values()
    ]


#: Maximum number of distinct whole numbers in a label that is read as classes, unless the file
#: format stores them as strings.
FEW_VALUES = 20
_TWO = 2
_NAMED = 3


@dataclass(frozen=True)
class Label:
    """The type of a label, the reason for it, its classes if it has any, and notes."""

    type: str
    why: str
    classes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def list_classes(scan: ColumnScan, *, as_written: bool = False) -> tuple[str, ...]:
    """Return the sorted classes of a column. `as_written` keeps different spellings separate."""
    return tuple(sorted(scan.values - {""})) if as_written else _spellings(scan).names()


def read_label(name: str, said: str, scan: ColumnScan, *, parsed: bool) -> Label:
    """Choose the type of a single-valued label, or "" to read the label like other columns.

    `said` is its type in `data.types`, or empty. `parsed` is true if strings may be numbers, as in
    CSV. Raises `UserError` if the label has no values, or has formatted numbers.
    """
    spellings = _spellings(scan)
    if not (scan.kinds or spellings.count):
        raise UserError(f"data.label: {name!r} has no value in any row; name another column")
    if said == "text":
        classes = list_classes(scan, as_written=True)
        return Label("class", "label of texts, as written", classes)
    if scan.many or not spellings.count or said not in ("", "class", "bool"):
        of_times = not said and set(scan.kinds) == {"time"}
        return Label("", "", (), (_note_times(name),) if of_times else ())
    if said or spellings.is_truth:
        why = "data.types" if said else "label of yes and no"
        return _read_classes(name, why, spellings, scan)
    are_texts = not parsed and set(scan.kinds) == {"text"}
    if spellings.are_whole:
        return _read_whole(name, spellings, scan, are_texts=are_texts)
    numbers = sum(scan.kinds[each] for each in NUMBERS)
    is_quantity = spellings.are_numbers and not are_texts
    if set(scan.kinds) == {"time"} or is_quantity or NEARLY_ALL * scan.kinds.total() <= numbers:
        return Label("", "", (), (_note_times(name),) if "time" in scan.kinds else ())
    found = _read_classes(name, "label of texts", spellings, scan)
    return replace(found, notes=(*found.notes, *_check_numbers(name, spellings, scan)))


def _note_times(name: str) -> str:
    return (
        f"the label {name!r} contains times, which are read as seconds since 1970; write the "
        f"number to predict, or set data.types: {{{name}: class}} if they are classes"
    )


def rows_without_class(scan: ColumnScan) -> int:
    """Return the number of rows without a class. In a column of strings, `unknown` is a class."""
    return scan.empty + sum(count for each, count in scan.marks.items() if _is_mark(each, scan))


def _is_mark(text: str, scan: ColumnScan) -> bool:
    among_numbers = scan.kinds and set(scan.kinds) <= {*NUMBERS, "code"}
    return text_values.is_null(text) or bool(among_numbers and text in scan.marks)


def _spellings(scan: ColumnScan) -> Spellings:
    return Spellings(each for each in scan.values if not _is_mark(each, scan))


def _read_whole(name: str, spellings: Spellings, scan: ColumnScan, *, are_texts: bool) -> Label:
    count = spellings.count
    if are_texts or count <= min(FEW_VALUES, max(_TWO, scan.rows // 2)):
        found = _read_classes(name, f"label of {count} whole numbers", spellings, scan)
        says = (
            f"the label {name!r} has {count} different whole numbers, which are read as classes; "
            f"set data.types: {{{name}: float}} if it is a quantity"
        )
        return replace(found, notes=(*found.notes, says)) if count > _TWO else found
    says = (
        f"the label {name!r} has {count} different whole numbers, which are read as a quantity; "
        f"set data.types: {{{name}: class}} if they are classes"
    )
    return Label("float", f"label of {count} different whole numbers", (), (says,))


def _read_classes(name: str, why: str, spellings: Spellings, scan: ColumnScan) -> Label:
    names = spellings.names()
    notes = []
    if merged := spellings.list_merged():
        notes.append(
            f"the label {name!r} has several spellings of a class, which are read as one class: "
            f"{_pairs(merged)}; set data.types: {{{name}: text}} if they are different classes"
        )
    if alike := lookalikes(names):
        notes.append(
            f"the label {name!r} has classes that look alike: {_pairs(alike)}; give them one "
            f"spelling, or set data.types: {{{name}: text}} if they are different classes"
        )
    marks = () if "+" in names or len(names) == _TWO else ("-",)
    unusual = {*text_values.DOUBTFUL, *marks}
    if doubtful := [each for each in names if each.lower() in unusual]:
        named = ", ".join(map(repr, doubtful))
        notes.append(
            f"the label {name!r} has {named} as a class; leave the cell empty if it means a "
            "missing value"
        )
    if _TWO * len(names) > scan.rows and len(names) > _TWO:
        notes.append(
            f"the label {name!r} has {len(names)} classes in {scan.rows} rows, so most classes "
            "have too few examples to learn from; set data.label to another column, or merge "
            "classes with data.map"
        )
    return Label("class", why, names, tuple(notes))


def _pairs(groups: Sequence[Sequence[str]]) -> str:
    more = f", and {len(groups) - _NAMED} more" if len(groups) > _NAMED else ""
    return ", ".join(" and ".join(map(repr, each)) for each in groups[:_NAMED]) + more


def _check_numbers(name: str, spellings: Spellings, scan: ColumnScan) -> Iterator[str]:
    texts = [text for each in spellings.by_key.values() for text in each]
    writing = text_values.count_writing(pa.array(texts))
    kind = text_values.find_kind(writing, texts=len(texts))
    if not kind and (found := text_values.describe(writing, len(texts))):
        yield (
            f"the label {name!r} has {found[0]}, such as {texts[0]!r}, and is read as classes; "
            "write plain numbers if it is a quantity, such as the days until a date"
        )
    if not kind:
        return
    says = f"the label {name!r} has numbers stored as text, such as {texts[0]!r}"
    as_class = f"{{{name}: class}} if they are classes"
    plain = any(scan.kinds[each] for each in NUMBERS)
    ways = text_values.advise(writing, f"{{{name}: {kind}}}", as_class, plain=plain)
    # `3 doors` may be a class, but a price is not.
    few = spellings.count <= min(FEW_VALUES, scan.rows // _TWO)
    if not few or text_values.is_amount(writing):
        raise UserError(f"data.types: {says}; {ways}")
    yield f"{says}, and is read as classes; {ways}"


# Number of dimensions of an image: height, width and channels.
_PICTURE = 3
# Fields of a `Column` that determine how its values are read.
_READ = ("type", "unit")


@dataclass(frozen=True, kw_only=True)
class RecordedInput:
    """An input of the model: its feature, its stored spec, and its column."""

    feature: str
    spec: FeatureSpec
    column: Column


def read_recorded(spec: DatasetSpec, dataset: Manifest, config: DataConfig) -> list[dict[str, Any]]:
    """Return the inputs of a dataset, in order, for the manifest of a model."""
    # With `data.map`, columns are inputs of the function, not of the model.
    columns = [] if config.map else dataset.fields.get("columns", [])
    read = {each["name"]: {key: each[key] for key in _READ if key in each} for each in columns}
    return [
        {"feature": name, "type": "", **read.get(name, {}), **spec.features[name].to_json()}
        for name in spec.inputs
    ]


def make_inputs(entries: Sequence[Mapping[str, Any]]) -> tuple[RecordedInput, ...]:
    """Restore the inputs from `entries`, the result of `read_recorded`."""
    found = []
    for entry in entries:
        given = {name: value for name, value in entry.items() if name not in ("feature", *_READ)}
        given |= {"shape": tuple(given["shape"]), "labels": tuple(given["labels"])}
        spec = FeatureSpec(**given)
        name = str(entry["feature"])
        column = _column(name, spec, str(entry["type"]), str(entry.get("unit", "")))
        found.append(RecordedInput(feature=name, spec=spec, column=column))
    return tuple(found)


def _column(name: str, spec: FeatureSpec, said: str, unit: str) -> Column:
    kind = said or _choose_type(spec)
    return Column(
        name=name,
        type=kind,
        why="the model",
        gaps=kind in ("int", "bool") and spec.dtype.startswith("float"),
        shape=spec.sizes,
        dtype=spec.dtype if spec.shape or spec.dtype == "float64" else "",
        stored=spec.stored,
        classes=spec.labels if kind == "class" else (),
        unit=unit,
    )


def _choose_type(spec: FeatureSpec) -> str:
    """Return the column type for a feature of a dataset that was not made from files."""
    if spec.stored == "image" or (len(spec.shape) == _PICTURE and spec.dtype == "uint8"):
        return "image"
    if spec.shape:
        return "tensor"
    if spec.labels:
        return "class"
    if spec.dtype in ("string", "bool"):
        return {"string": "text", "bool": "bool"}[spec.dtype]
    return "float" if "float" in spec.dtype else "int"

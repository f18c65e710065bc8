"""Decide from all rows of a table whether a label is a class or a quantity."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from flotilla.trainer.data.files import text_values
from flotilla.trainer.data.files.column_scan import NUMBERS, ColumnScan
from flotilla.trainer.data.files.text_values import NEARLY_ALL
from flotilla.trainer.features.class_names import Spellings, lookalikes
from flotilla.trainer.runtime.errors import UserError

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
    if not kind and writing["date"] + writing["clock"] >= NEARLY_ALL * len(texts):
        yield (
            f"the label {name!r} has dates or times of day, such as {texts[0]!r}, and is read as "
            "classes; write the number to predict, such as the days until then"
        )
    if not kind:
        return
    says = f"the label {name!r} has numbers stored as text, such as {texts[0]!r}"
    ways = f"set data.types: {{{name}: {kind}}} to read them as numbers"
    # `3 doors` may be a class, but a price is not.
    few = spellings.count <= min(FEW_VALUES, scan.rows // _TWO)
    if not few or text_values.is_amount(writing):
        raise UserError(f"data.types: {says}; {ways}, or {{{name}: class}} if they are classes")
    yield f"{says}, and is read as classes; {ways}, or {{{name}: class}} if they are classes"

"""Statistics of a column over all rows: kinds, ranges, shapes and distinct values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flotilla.trainer.data.files import text_values
from flotilla.trainer.data.files.text_values import LIST, parse_numbers

#: Maximum number of classes of a label.
MOST_CLASSES = 1_000_000
_SEEN = 10_000
NUMBERS = ("int", "huge", "float")
#: For each float type, the value up to which it represents every whole number exactly.
EXACT = {"float32": 2**24, "float64": 2**53}
# A float type must have at least this many distinct values within the range of a column. The first
# number applies to storing a column, the second to predicting a label in float32.
_STEPS, _FEW_STEPS = 4096, 64
# Below this magnitude, float32 loses precision.
_TINY = 1e-37
_NAMED = 3


@dataclass(kw_only=True)
class ColumnScan:
    """Mergeable statistics of the values of one column.

    Attributes:
        kinds: number of values of each kind: int, huge (a whole number beyond 64 bits), code,
            float, bool, time, text, tensor, image. A code is a number with leading zeros.
        empty: number of values that are null, NaN or an empty string.
        marks: counts of words for a missing value, such as NA; not used for text columns.
        texts: the first text values, with their piece and row number.
        writing: counts of the notations and units of formatted numbers and dates among the strings.
        values: distinct values as strings; cleared if there are more than `most`.
        gathers: whether `values` includes fractions and elements of lists, because they may be
            classes.
        shapes: shapes of tensors, or sizes of images.
        tensor: the widest kind of the elements of tensors: bool, int, float or text.
        lowest: lowest finite number, also in tensors; exact for integers, and unknown for float32.
            `highest` is the highest one.
        whole: whether all finite numbers are whole.
    """

    most: int = _SEEN
    gathers: bool = False
    rows: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    empty: int = 0
    marks: Counter[str] = field(default_factory=Counter)
    writing: Counter[str] = field(default_factory=Counter)
    texts: list[tuple[Any, int, str]] = field(default_factory=list)
    values: set[str] = field(default_factory=set)
    many: bool = False
    shapes: set[tuple[int, ...]] = field(default_factory=set)
    tensor: str = ""
    lowest: float = math.inf
    highest: float = -math.inf
    whole: bool = True

    def add(self, array: pa.Array, piece: Any, numbers: Any, *, parsed: bool) -> None:
        """Add the values of rows. `parsed` is true if the format has only strings, such as CSV."""
        self.rows += len(array)
        if pa.types.is_dictionary(array.type):
            array = pc.cast(array, array.type.value_type)
        if pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type):
            # Read bytes as strings if all are valid UTF-8. Images are never valid UTF-8.
            with suppress(pa.ArrowInvalid):
                array = pc.cast(array, pa.string())
        if is_text(array.type):
            self._add_texts(array, piece, numbers, parsed=parsed)
            return
        missing, kind = array.null_count, get_kind(array.type)
        if pa.types.is_floating(array.type):
            missing += pc.sum(pc.is_nan(array)).as_py() or 0
        self.empty += missing
        self._count(kind, len(array) - missing)
        self._measure(array)
        if kind == "tensor":
            self._add_shapes(array)
            if self.gathers:
                self._see(pc.list_flatten(array))
        elif kind in ("int", "bool") or (self.gathers and kind == "float"):
            self._see(array)

    def add_images(self, measured: Iterable[tuple[int, int, int]], missing: int) -> None:
        """Add images by their sizes. `missing` is the number of images that cannot be decoded."""
        sizes = list(measured)
        self._count("image", len(sizes))
        self.shapes.update([*{*sizes} - self.shapes][: max(0, _SEEN - len(self.shapes))])
        self.rows += len(sizes) + missing

    @property
    def missing(self) -> int:
        """The number of missing values, if the column is not text."""
        return self.empty + self.marks.total()

    def lack(self, rows: int) -> None:
        """Count the rows that lack this column as empty. `rows` is the total number of rows."""
        self.empty += rows - self.rows
        self.rows = rows

    def merge(self, other: ColumnScan) -> None:
        """Add the statistics of a later piece."""
        self.rows += other.rows
        self.empty += other.empty
        self.marks += other.marks
        self.writing += other.writing
        self.kinds += other.kinds
        self.texts = (self.texts + other.texts)[:_NAMED]
        self.shapes |= other.shapes
        self.tensor = _wider(self.tensor, other.tensor)
        self._widen(other.lowest, other.highest, whole=other.whole)
        self._gather(other.values, many=other.many)

    def fits(self, dtype: str) -> bool:
        """Return whether float type `dtype` keeps whole numbers exact and can tell values apart."""
        if self.lowest > self.highest:
            return True
        largest, range_ = max(abs(self.lowest), abs(self.highest)), self.highest - self.lowest
        # The values of a constant column need not be distinguished.
        fine = self.whole or range_ == 0 or range_ / largest >= _STEPS / EXACT[dtype]
        return fine and (largest == 0 or largest > _TINY) and largest <= EXACT[dtype]

    @property
    def is_narrow(self) -> bool:
        """Whether the numbers differ too little to be distinguished as float32."""
        largest, range_ = max(abs(self.lowest), abs(self.highest)), self.highest - self.lowest
        return 0 < range_ < largest * _FEW_STEPS / EXACT["float32"]

    def _measure(self, array: pa.Array) -> None:
        """Extend the column's range to include the values. Ignore strings that are not numbers."""
        if is_list_of_texts(array.type):
            return
        while is_list(array.type):
            array = pc.list_flatten(array)
        if pa.types.is_integer(array.type):
            found = pc.min_max(array)
            if found["min"].is_valid:
                self._widen(found["min"].as_py(), found["max"].as_py(), whole=True)
            return
        if pa.types.is_decimal(array.type):
            array = pc.cast(array, pa.string())
        if is_text(array.type):
            array = pa.array(text_values.numbers(array)[0])
        # Ignore other types. A float32 column is stored as float32 without loss.
        if not pa.types.is_float64(array.type):
            return
        values = pc.cast(array.drop_null(), pa.float64()).to_numpy(zero_copy_only=False)
        values = values[np.isfinite(values)]
        if len(values):
            whole = bool((values == np.floor(values)).all())
            self._widen(float(values.min()), float(values.max()), whole=whole)

    def _widen(self, least: float, most: float, *, whole: bool) -> None:
        self.lowest, self.highest = min(self.lowest, least), max(self.highest, most)
        self.whole = self.whole and whole

    def is_doubtful(self, kind: str, *, required: bool) -> bool:
        """Return whether some rows may be broken if the values are read as the type `kind`."""
        if required and self.missing:
            return True
        if kind == "image":
            return self.kinds.get("image", 0) < self.rows
        if kind == "tensor":
            return len(self.shapes) > 1 or set(self.kinds) > {"tensor"} or bool(self.empty)
        return kind in _FITTING and not self.kinds.keys() <= _FITTING[kind]

    def _count(self, kind: str, count: int) -> None:
        if count:
            self.kinds[kind] += count

    def _see(self, array: pa.Array) -> None:
        if not self.many:
            found = pc.unique(array.drop_null())
            many = len(found) > self.most
            self._gather(() if many else pc.cast(found, pa.string()).to_pylist(), many=many)

    def _gather(self, found: Any, *, many: bool) -> None:
        self.values.update(found)
        self.many = self.many or many or len(self.values) > self.most
        if self.many:
            self.values.clear()

    def _add_texts(self, array: pa.Array, piece: Any, numbers: Any, *, parsed: bool) -> None:
        texts = text_values.count_texts(array)
        self._see(texts.values)
        if parsed and self._add_plain(texts.values, texts.counts):
            return
        empty = _mask(pc.equal(texts.values, ""))
        missing = _mask(text_values.is_missing(texts.values))
        self.empty += int(texts.counts[empty].sum())
        marks = missing & ~empty
        given = texts.values.filter(pa.array(marks)).to_pylist()
        for mark, count in zip(given, texts.counts[marks].tolist(), strict=True):
            self.marks[mark] += count
        left = ~missing
        if not left.any():
            return
        known, counts = texts.values.filter(pa.array(left)), texts.counts[left]
        if parsed and missing.any() and self._add_plain(known, counts):
            return
        if parsed:
            left[left] = self._add_parsed(known, counts)
        else:
            # In JSON, timestamps are strings.
            times = _mask(text_values.matches(known, text_values.TIME))
            self._count("time", int(counts[times].sum()))
            left[left] = ~times
        if left.any():
            self._count("text", int(texts.counts[left].sum()))
            others = texts.values.filter(pa.array(left))
            self.writing += text_values.count_writing(others, texts.counts[left])
            if len(self.texts) < _NAMED:
                rows = np.flatnonzero(left if texts.places is None else left[texts.places])
                rows = rows[: _NAMED - len(self.texts)]
                given = text_values.trim_texts(array.take(pa.array(rows)))
                named = zip(np.asarray(numbers)[rows].tolist(), given.to_pylist(), strict=True)
                self.texts += [(piece, *each) for each in named]

    def _add_plain(self, known: pa.Array, counts: NDArray[np.int64]) -> bool:
        """Add strings if all are plain numbers, and return whether they are (the fast path)."""
        plain = text_values.parse_plain(known)
        if plain is None:
            return False
        self._measure(plain)
        if pa.types.is_floating(plain.type):
            whole = _mask(pc.invert(text_values.is_fraction(known)))
            self._count("float", int(counts[~whole].sum()))
            known, counts = known.filter(pa.array(whole)), counts[whole]
            fits = _mask(text_values.matches(known, text_values.INT))
            self._count("huge", int(counts[~fits].sum()))
            counts = counts[fits]
        self._count("int", int(counts.sum()))
        return True

    def _add_parsed(self, known: pa.Array, counts: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Add the numbers, bools, timestamps and lists among strings. Return a mask of the rest."""
        left, numbers = np.ones(len(known), np.bool_), np.zeros(len(known), np.bool_)
        for kind, pattern in _PATTERNS.items():
            found = left & _mask(text_values.matches(known, pattern))
            self._count(kind, int(counts[found].sum()))
            left &= ~found
            numbers |= found & (kind in NUMBERS)
        if numbers.any():
            self._measure(known.filter(pa.array(numbers)))
        listed = left & _mask(text_values.matches(known, LIST))
        return left & ~self._add_written(known, listed, counts)

    def _add_written(
        self, array: pa.Array, chosen: NDArray[np.bool_], counts: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Add lists among the chosen strings, and return a mask of the strings that are lists."""
        found = chosen.copy()
        for place in np.flatnonzero(found):
            values = parse_numbers(array[int(place)].as_py())
            if values is None:
                found[place] = False
                continue
            self.shapes.add(values.shape)
            if values.size:
                self.tensor = _wider(self.tensor, _KINDS[values.dtype.kind])
                self._measure(pa.array(values.ravel()))
        self._count("tensor", int(counts[found].sum()))
        return found

    def _add_shapes(self, array: pa.Array) -> None:
        level = array.drop_null()
        shape: list[tuple[int, ...]] = [()]
        while is_list(level.type):
            lengths = pc.unique(pc.list_value_length(level)).to_pylist()
            shape = [(*each, length or 0) for each in shape for length in lengths]
            level = pc.list_flatten(level)
        self.shapes.update(shape)
        if not pa.types.is_null(level.type):
            self.tensor = _wider(self.tensor, get_kind(level.type))


_FITTING = {"int": {"int"}, "float": {"int", "huge", "float"}, "bool": {"bool"}, "time": {"time"}}
_KINDS = {"b": "bool", "i": "int", "u": "int", "f": "float"}
_PATTERNS = {
    "code": text_values.CODE,
    "int": text_values.INT,
    "huge": text_values.WHOLE,
    "float": text_values.NUMBER,
    "bool": text_values.BOOL,
    "time": text_values.TIME,
}


def _wider(kind: str, other: str) -> str:
    order = ("", "bool", "int", "float", "text")
    return max(kind, other, key=order.index)


def _mask(array: pa.Array) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = array.to_numpy(zero_copy_only=False)
    return found


def is_list(kind: pa.DataType) -> bool:
    """Return whether an Arrow type is a list."""
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def get_kind(kind: pa.DataType) -> str:
    """Return the kind of values of an Arrow type, or "" if the type is not supported."""
    if pa.types.is_dictionary(kind):
        return get_kind(kind.value_type)
    for test, name in _ARROW:
        if test(kind):
            return name
    inner = get_kind(kind.value_type) if is_list(kind) else ""
    return "tensor" if inner in ("int", "float", "bool", "text", "tensor") else ""


def is_text(kind: pa.DataType) -> bool:
    """Return whether an Arrow type is a string."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_list_of_texts(kind: pa.DataType) -> bool:
    """Return whether an Arrow type is a list, or a nested list, of strings."""
    if not is_list(kind):
        return False
    inner = kind.value_type
    return is_list_of_texts(inner) or (get_kind(inner) == "text" and not pa.types.is_null(inner))


_ARROW = (
    (pa.types.is_boolean, "bool"),
    (pa.types.is_integer, "int"),
    (pa.types.is_floating, "float"),
    (lambda kind: pa.types.is_decimal(kind) and kind.scale <= 0, "int"),
    (pa.types.is_decimal, "float"),
    (pa.types.is_timestamp, "time"),
    (pa.types.is_date, "time"),
    (pa.types.is_string, "text"),
    (pa.types.is_large_string, "text"),
    (pa.types.is_binary, "image"),
    (pa.types.is_large_binary, "image"),
    (pa.types.is_null, "text"),
)

"""Parse lists of numbers in texts, as in CSV, in the notation of JSON, Python or NumPy."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: A text that may be a list, such as [0.1, 2] or [[1 2] [3 4]].
LIST = r"^\[(?:[\[\]\s\d.,+\-eE]|nan|NaN|null|None)*\]$"
# NumPy separates numbers with spaces, and writes 1. for 1.0.
_GAP = re.compile(r"(?<=[\d.\]naN])\s+(?=[\d.\[+\-nN])")
_POINT = re.compile(r"(\d)\.(?!\d)")
_MISSING = re.compile("nan|None|null")


def parse_numbers(value: Any) -> NDArray[Any] | None:
    """Return the numbers of a list or of its text; None if it is not a list.

    Nested lists of equal length become one array. Missing values are NaN.
    """
    try:
        found = np.asarray(_parse(value) if isinstance(value, str | bytes) else value)
        if found.dtype == object:
            found = found.astype(np.float64)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if found.ndim and found.dtype.kind in "iubf" else None


def _parse(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        plain = text.decode() if isinstance(text, bytes) else text
        spaced = _POINT.sub(r"\1.0", _GAP.sub(", ", plain.strip()))
        return json.loads(_MISSING.sub("NaN", spaced))

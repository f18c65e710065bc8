"""Lists of numbers that a text holds, as in CSV: by JSON or Python, or as NumPy prints them."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: A text that may be one: [0.1, 2], [[1 2] [3 4]].
LIST = r"^\[(?:[\[\]\s\d.,+\-eE]|nan|NaN|null|None)*\]$"
# NumPy separates by spaces, and writes 1. for 1.0.
_GAP = re.compile(r"(?<=[\d.\]naN])\s+(?=[\d.\[+\-nN])")
_POINT = re.compile(r"(\d)\.(?!\d)")
_MISSING = re.compile("nan|None|null")


def parse_numbers(value: Any) -> NDArray[Any] | None:
    """Return the numbers of a list, also of one that is written in a text; None where it is none.

    Lists of lists are an array where all have one length. What is missing in a list is NaN.
    """
    try:
        found = np.asarray(_parsed(value) if isinstance(value, str | bytes) else value)
        if found.dtype == object:
            found = found.astype(np.float64)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if found.ndim and found.dtype.kind in "iubf" else None


def _parsed(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        plain = text.decode() if isinstance(text, bytes) else text
        spaced = _POINT.sub(r"\1.0", _GAP.sub(", ", plain.strip()))
        return json.loads(_MISSING.sub("NaN", spaced))

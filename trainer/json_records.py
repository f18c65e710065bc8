"""Records in JSON, as another process wrote them: parsed and checked where they are read.

A disk that was full or lost power, another version and a person with an editor all leave records
that are no longer what was written. Whatever `parse` returns can be compared, printed, written
again and converted to floats; `from_tree` makes a dataclass of it, with every field checked.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

Record = TypeVar("Record")
# Nothing of ours is nested deeper; code that follows a tree must not run out of stack.
MAX_DEPTH = 64
# An integer of more digits becomes a float, as in every other reader of JSON.
_MOST_DIGITS = 19
_hints = cache(get_type_hints)
_arguments = cache(get_args)


def parse(text: str | bytes) -> Any:
    """Return the value of a JSON text; raises `ValueError` where it is none, or nested too deep."""
    text = text if isinstance(text, str) else text.decode()
    try:
        tree = _DECODER.decode(text)
    except RecursionError:
        raise ValueError("nested too deep") from None
    is_deep = text.count("[") + text.count("{") > MAX_DEPTH
    # Half of a surrogate pair cannot be printed.
    is_odd = "\\ud" in text or "\\uD" in text
    return _plain(tree, 0) if is_deep or is_odd else tree


def parse_mapping(text: str | bytes) -> dict[str, Any]:
    """Return the JSON object of a text; raises `ValueError` where it is none."""
    tree = parse(text)
    if not isinstance(tree, dict):
        raise ValueError("not a JSON object")
    return tree


def tree_of(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, to be written as a JSON object."""
    return {each.name: _tree_of(getattr(record, each.name)) for each in fields(record)}


def _tree_of(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_tree_of(each) for each in value]
    return tree_of(value) if is_dataclass(value) else value


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MOST_DIGITS else float(digits)


# `json.loads` would make a decoder for each text.
_DECODER = json.JSONDecoder(parse_int=_integer)


def _plain(value: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError("nested too deep")
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_plain(each, depth + 1) for each in value]
    if isinstance(value, dict):
        return {_plain(name, depth): _plain(each, depth + 1) for name, each in value.items()}
    return value


def from_tree(kind: type[Record], tree: object) -> Record | None:
    """Return the record of a dataclass that a JSON object holds.

    None where a field without a default is missing, or one has another type.
    """
    if not isinstance(tree, dict):
        return None
    hints = _hints(cast(Any, kind))
    try:
        return kind(**{name: _checked(tree[name], hints[name]) for name in hints if name in tree})
    except TypeError:
        return None


def is_number(value: object) -> bool:
    """Say whether a value is a finite number."""
    return type(value) in (int, float) and math.isfinite(cast(float, value))


def _checked(value: Any, hint: Any) -> Any:
    """Return a JSON value as the type of a field; raises `TypeError` where it is another one."""
    if hint is float:
        if is_number(value):
            return float(value)
    elif hint is Any or type(value) is hint:
        return value
    parts = _arguments(hint)
    if get_origin(hint) is tuple and isinstance(value, list):
        return tuple(_checked(each, parts[0]) for each in value)
    if get_origin(hint) is Mapping and isinstance(value, dict):
        return {name: _checked(each, parts[1]) for name, each in value.items()}
    if NoneType in parts:
        return None if value is None else _checked(value, parts[0])
    record = from_tree(cast(Any, hint), value) if is_dataclass(hint) else None
    if record is not None:
        return record
    raise TypeError(f"{value!r} is no {hint}")

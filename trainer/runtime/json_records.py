"""JSON records written by other processes, which are checked when they are read.

A full disk, another version or an editor may have changed a record. Each record type is a
dataclass, whose fields pydantic checks strictly. Unknown fields are ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from datetime import MAXYEAR, MINYEAR, UTC, datetime
from functools import cache
from typing import Any, TypeVar, cast

from pydantic import ConfigDict, TypeAdapter, ValidationError

Record = TypeVar("Record")
_ANY = TypeAdapter[Any](Any)
_STRICT = ConfigDict(strict=True, allow_inf_nan=False)
# Maximum number of digits of an integer. A longer one becomes a float, as in other JSON parsers.
_MOST_DIGITS = 19


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits.lstrip("-")) <= _MOST_DIGITS else float(digits)


_DECODER = json.JSONDecoder(parse_int=_integer)


def parse(text: str | bytes) -> Any:
    """Parse JSON text. Raises `ValueError` if it is invalid or nested too deeply."""
    # Pydantic also rejects lone surrogates, which cannot be printed, and excessive nesting.
    _ANY.validate_json(text)
    return _DECODER.decode(text if isinstance(text, str) else text.decode())


def parse_mapping(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises `ValueError` if the text is anything else."""
    tree = parse(text)
    if not isinstance(tree, dict):
        raise ValueError("not a JSON object")
    return tree


def parse_record(kind: type[Record], tree: object) -> Record | None:
    """Convert a JSON object to a dataclass record, or return None if the fields do not match."""
    try:
        return cast(Record, _adapter(cast(Any, kind)).validate_json(json.dumps(tree)))
    except ValidationError:
        return None


def read_record(kind: type[Record], text: str | bytes) -> Record | None:
    """Parse a dataclass record, or return None if the text does not match."""
    try:
        return parse_record(kind, parse(text))
    except ValueError:
        return None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    if "__pydantic_config__" not in vars(kind):
        kind.__pydantic_config__ = _STRICT
    return TypeAdapter(kind)


def tree_of(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as a JSON object."""
    return {each.name: _field_tree(getattr(record, each.name)) for each in fields(record)}


def _field_tree(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_field_tree(each) for each in value]
    return tree_of(value) if is_dataclass(value) else value


def finite(tree: Any, text: Callable[[str], str] = str) -> Any:
    """Return a JSON tree with None in place of non-finite numbers, which JSON cannot represent.

    `text` converts each string and key.
    """
    if isinstance(tree, Mapping):
        return {text(str(name)): finite(each, text) for name, each in tree.items()}
    if isinstance(tree, list | tuple):
        return [finite(each, text) for each in tree]
    if isinstance(tree, str):
        return text(tree)
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


def parse_number(text: str) -> int | None:
    """Return the whole number in a text of up to 18 ASCII digits, or None for any other text."""
    is_one = text.isascii() and text.isdigit() and len(text) < _MOST_DIGITS
    return int(text) if is_one else None


def parse_time(text: object) -> datetime | None:
    """Return the UTC time that an ISO 8601 string represents, or None for any other value.

    A time without a zone is in UTC.
    """
    try:
        found = datetime.fromisoformat(str(text))
        found = found if found.tzinfo else found.replace(tzinfo=UTC)
        return found.astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def make_time(seconds: object) -> datetime | None:
    """Return the UTC time of a Unix timestamp, or None if it is out of range."""
    try:
        found = datetime.fromtimestamp(cast(float, seconds), UTC) if is_number(seconds) else None
    except (ValueError, OverflowError, OSError):
        return None
    # In the first and last years, conversion to another time zone may be out of range.
    return found if found and MINYEAR < found.year < MAXYEAR else None


def is_number(value: object) -> bool:
    """Return whether a value is a finite number."""
    return type(value) in (int, float) and math.isfinite(cast(float, value))

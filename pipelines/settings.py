"""Converts settings given in Python to the `section.key=value` strings of `--set`.

A mapping may be nested or have dotted keys. The parser of `--set` checks the strings.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

from flotilla.trainer.config.load import is_section, parse_value
from flotilla.trainer.runtime.errors import ConfigError

Settings = Mapping[str, Any] | Sequence[str]
# Characters that JSON does not escape, but YAML reads as line breaks or rejects.
_UNSAFE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff]")


class Sections(TypedDict, total=False):
    """Sections of the configuration as keyword arguments, such as `training={"steps": 200}`."""

    data: Mapping[str, Any]
    task: Mapping[str, Any]
    model: Mapping[str, Any]
    training: Mapping[str, Any]
    program: Mapping[str, Any]
    cluster: Mapping[str, Any]
    evaluation: Mapping[str, Any]
    gate: Mapping[str, Any]
    export: Mapping[str, Any]
    registry: Mapping[str, Any]
    storage: Mapping[str, Any]


def make_assignments(
    settings: Settings = (), sections: Mapping[str, Any] | None = None
) -> tuple[str, ...]:
    """Return `--set` strings for `settings`, then for `sections`. Raises `ConfigError`."""
    if isinstance(settings, Mapping):
        texts = [*_texts(settings)]
    elif isinstance(settings, str) or not all(isinstance(each, str) for each in settings):
        raise ConfigError(
            f"settings {settings!r} is neither a mapping, such as {{'training.steps': 200}}, nor a "
            "list of strings such as 'section.key=value'"
        )
    else:
        texts = [*settings]
    return (*texts, *_texts(sections or {}))


def format_search(search: Settings) -> Iterator[str]:
    """Yield the `--set` strings of a search.

    A list contains the values to try. A string, such as a range, is kept unchanged.
    """
    if not isinstance(search, Mapping):
        yield from make_assignments(search)
        return
    for key, values in search.items():
        if isinstance(values, str):
            yield f"{key}={values}"
        elif isinstance(values, Mapping) or not isinstance(values, Iterable):
            raise ConfigError(f"search: {key}: {values!r} is neither a list of values nor a range")
        else:
            yield f"{key}={','.join(value_text(key, each) for each in values)}"


def value_text(key: str, value: Any) -> str:
    """Format a value for `--set KEY=`. Raises `ConfigError` if it is not plain data."""
    if isinstance(value, str | os.PathLike):
        text = str(os.fspath(value))
        try:
            if parse_value(text, key) == text:
                return text
        except ConfigError:
            # The text is not valid YAML without quotes.
            pass
        value = text
    try:
        text = json.dumps(value, ensure_ascii=False, default=plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{key}: the value is not plain data: {error}") from None
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _texts(tree: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield a `--set` string for each key. A section yields a string for each of its keys."""
    for name, value in tree.items():
        path = (*above, *str(name).split("."))
        if isinstance(value, Mapping) and is_section(path):
            yield from _texts(value, path)
        else:
            key = ".".join(path)
            yield f"{key}={value_text(key, value)}"


def plain(value: Any) -> Any:
    """Return the JSON equivalent of a path, a mapping, or a NumPy number or array."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")

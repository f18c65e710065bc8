"""Checks of the values in `model.args`, which the configuration cannot know beforehand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from trainer.errors import ConfigError


def sizes(name: str, value: Any) -> tuple[int, ...]:
    """Return a list of whole numbers of at least 1; an empty list is one too."""
    if isinstance(value, list | tuple) and all(_is_whole(item) and item >= 1 for item in value):
        return tuple(value)
    raise _refused(name, value, "a list of whole numbers of at least 1")


def size(name: str, value: Any) -> int:
    """Return a whole number of at least 1."""
    if _is_whole(value) and value >= 1:
        return int(value)
    raise _refused(name, value, "a whole number of at least 1")


def share(name: str, value: Any) -> float:
    """Return a number from 0 up to, but without, 1."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1:
        return float(value)
    raise _refused(name, value, "a number from 0 to below 1")


def initializer(name: str, value: Any) -> keras.Initializer:
    """Return the Keras initializer of this name, or of `{class_name: ..., config: {...}}`."""
    known = isinstance(value, str) or (
        isinstance(value, Mapping) and set(value) <= {"class_name", "config"}
    )
    try:
        found = keras.initializers.get(dict(value) if isinstance(value, Mapping) else value)
    # Keras looks into what it was given before it has checked it.
    except (ValueError, TypeError, KeyError, AttributeError):
        found = None
    if known and isinstance(found, keras.Initializer):
        return found
    allowed = "a Keras initializer, such as glorot_uniform or {class_name: RandomNormal, config: "
    raise _refused(name, value, allowed + "{stddev: 1.0}}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _refused(name: str, value: Any, allowed: str) -> ConfigError:
    return ConfigError(f"{name}: {value!r} is not allowed; it has to be {allowed}")

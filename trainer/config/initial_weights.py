"""`training.warm_start`: which weights a fresh run begins with, as text or as a mapping.

A text names where all weights are: the URI of a checkpoint, of a `.keras` file or of an exported
model, the path of a `.keras` file, or `champion`. A mapping `{from, include, exclude}` takes a part
of them: `include` and `exclude` are lists of globs over the paths of the model's variables.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator

from trainer.errors import UserError, nearest
from trainer.storage.uri import FORMS, check_path, is_uri, uri_of

#: The word for the checkpoint of the registry's champion.
CHAMPION = "champion"
#: How the file of a Keras model ends.
KERAS = ".keras"
_FROM, _INCLUDE, _EXCLUDE = _KEYS = ("from", "include", "exclude")


@dataclass(frozen=True, kw_only=True)
class InitialWeights:
    """Where the weights are, and which of them are wanted: all where there are no globs."""

    source: str
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    @property
    def is_partial(self) -> bool:
        """Whether some variables may be left as they are."""
        return bool(self.include or self.exclude)

    def value(self) -> str | dict[str, Any]:
        """Return the value of the key: a text where all weights are wanted."""
        globs = {_INCLUDE: list(self.include), _EXCLUDE: list(self.exclude)}
        named = {name: each for name, each in globs.items() if each}
        return {_FROM: self.source, **named} if named else self.source


def initial_weights(value: str | Mapping[str, Any]) -> InitialWeights:
    """Return what a value of `training.warm_start` says; raises `ValueError`."""
    if isinstance(value, str):
        return InitialWeights(source=_checked(value))
    for name in value:
        if name not in _KEYS:
            hint = nearest(str(name), _KEYS) or f" (one of {', '.join(_KEYS)})"
            raise ValueError(f"no key {name!r} in it{hint}")
    source = value.get(_FROM)
    if not isinstance(source, str) or not source:
        raise ValueError(f"say where the weights are: {{{_FROM}: URI}}")
    include, exclude = (_globs(value, name) for name in (_INCLUDE, _EXCLUDE))
    return InitialWeights(source=_checked(source), include=include, exclude=exclude)


def _globs(value: Mapping[str, Any], name: str) -> tuple[str, ...]:
    globs = value.get(name, [])
    if not isinstance(globs, list | tuple) or not all(isinstance(g, str) and g for g in globs):
        raise ValueError(f"{name} is {json.dumps(globs, default=str)}: write a list of globs")
    return tuple(globs)


def _checked(source: str) -> str:
    if not source or source == CHAMPION:
        return source
    if source.endswith(KERAS) and "://" not in source:
        source = uri_of(source)
    if not is_uri(source):
        hint = nearest(source, [CHAMPION])
        raise ValueError(
            f"neither {CHAMPION} nor the URI of a checkpoint ({FORMS}), nor a {KERAS} file{hint}"
        )
    try:
        check_path(source)
    except UserError as error:
        raise ValueError(str(error)) from None
    return source.rstrip("/")


def _canonical(value: Any) -> Any:
    if not isinstance(value, str | Mapping):
        raise ValueError(f"write a URI, {CHAMPION}, or {{{', '.join(_KEYS)}}}")
    return initial_weights(value).value()


WarmStart = Annotated[str | dict[str, Any], BeforeValidator(_canonical)]

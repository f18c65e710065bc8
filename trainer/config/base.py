"""The base of all configuration sections, which are frozen and strict, and reject unknown keys."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterator
from typing import Annotated, Any, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    WrapValidator,
    model_validator,
)

from flotilla.trainer.runtime.errors import nearest
from flotilla.trainer.runtime.masking import find_credentials, mask

#: The largest whole number that a run parameter may have. KFP passes numbers as doubles, which
#: represent every whole number up to this one.
MOST = 2**53
#: The values, in Python and in YAML, that stand for a number to be derived from the data.
AUTOMATIC, AUTO = -1, "auto"
_Default = TypeVar("_Default")
_REMEDY = (
    "remove them, because logs and reports show the configuration, and pass credentials in the "
    "environment or in a secret"
)


def key(default: _Default, description: str, **limits: Any) -> _Default:
    """Define a configuration key. The reference page and KFP show its description."""
    return Field(default, description=description, **limits)  # type: ignore[no-any-return]


def _or_automatic(value: object, number: Callable[[object], Any]) -> Any:
    return AUTOMATIC if value == AUTO else number(value)


#: A validator for a key that also accepts the word `auto`, which is `AUTOMATIC` in Python.
OR_AUTO = WrapValidator(_or_automatic)
AS_WRITTEN = PlainSerializer(lambda value: AUTO if value == AUTOMATIC else value)


class Section(BaseModel):
    """A frozen section of the configuration that rejects unknown keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        # The text of a validation error must not contain the value, which may be a secret.
        hide_input_in_errors=True,
    )

    @model_validator(mode="after")
    def _can_be_written_down(self) -> Self:
        """Reject credentials in URIs, and `{{`, which begins a KFP placeholder."""
        require_writable(dict(self))
        return self

    def digest(self) -> str:
        """Return a short hash of all values of this section."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:12]


class Whole(Section):
    """A section that earlier versions passed to KFP as a single run parameter."""


def suggest(word: object, allowed: Collection[str]) -> str:
    """Return a hint with the closest allowed word or, if there is none, with all of them."""
    return nearest(str(word), allowed) or f" (one of {', '.join(allowed)})"


def known_name(kind: str, allowed: Collection[str]) -> Callable[[str], str]:
    """Return a validator that accepts one of these names, or `package.module:name`."""

    def check(value: str) -> str:
        module, _, name = value.partition(":")
        own = all(part.isidentifier() for part in [*module.split("."), name])
        if own or value in allowed:
            return value
        hint = nearest(value, allowed) or f" (one of {', '.join(allowed)}, or package.module:name)"
        raise ValueError(f"there is no {kind} with this name{hint}")

    return check


def _finite(value: Any) -> Any:
    """Reject numbers that JSON does not support, because the configuration is passed as JSON."""
    for each in value.values() if isinstance(value, dict) else value:
        if isinstance(each, float) and not math.isfinite(each):
            raise ValueError(f"{each} is not a finite number")
        if isinstance(each, dict | list):
            _finite(each)
    return value


#: Values that can be checked only by the code that uses them, such as the arguments of a model.
Free = Annotated[dict[str, Any], AfterValidator(_finite)]


def require_writable(tree: Any) -> None:
    """Raise a `ValueError` for a string with credentials, or with `{{`, which KFP replaces."""
    for path, text in _texts(tree):
        if why := find_credentials(text):
            raise ValueError(f"{path}: {why}; {_REMEDY}")
        if "{{" in text:
            raise ValueError(
                f"{path}: {text!r} contains '{{{{', which Kubeflow Pipelines and Argo would "
                "replace; remove it"
            )


def _texts(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for name, each in value.items():
            here = ".".join(filter(None, (path, mask(str(name)))))
            yield path or here, str(name)
            yield from _texts(each, here)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each, path)

"""The base of all sections of the configuration: frozen, strict, unknown keys are refused."""

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

#: The largest whole number that a run parameter may be: KFP passes numbers as doubles.
MOST = 2**53
#: A number that is chosen by the data, before they are known; the word is how it is written.
AUTOMATIC, AUTO = -1, "auto"
_Default = TypeVar("_Default")
_REMEDY = (
    "a configuration is written into logs and reports: leave them out, and give credentials by the "
    "environment or by a secret"
)


def key(default: _Default, description: str, **limits: Any) -> _Default:
    """Return the field of a key; its description is shown in the reference and by KFP."""
    return Field(default, description=description, **limits)  # type: ignore[no-any-return]


def _or_automatic(value: object, number: Callable[[object], Any]) -> Any:
    return AUTOMATIC if value == AUTO else number(value)


#: Of the type of a key: it takes the word `auto` as well, which is `AUTOMATIC` for Python.
OR_AUTO = WrapValidator(_or_automatic)
AS_WRITTEN = PlainSerializer(lambda value: AUTO if value == AUTOMATIC else value)


class Section(BaseModel):
    """A frozen section of the configuration that refuses unknown keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        # The text of an error would have the value in it.
        hide_input_in_errors=True,
    )

    @model_validator(mode="after")
    def _can_be_written_down(self) -> Self:
        """No text has credentials in a URI, or `{{`, which begins a placeholder of KFP."""
        require_writable(dict(self))
        return self

    def digest(self) -> str:
        """Return a short hash of all values of this section."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:12]


class Whole(Section):
    """A section that is a single run parameter: it has many keys that few runs set."""


def known_name(kind: str, allowed: Collection[str]) -> Callable[[str], str]:
    """Return what refuses a text that neither is one of these names nor can be the user's own."""

    def check(value: str) -> str:
        module, _, name = value.partition(":")
        own = all(part.isidentifier() for part in [*module.split("."), name])
        if own or value in allowed:
            return value
        hint = nearest(value, allowed) or f" (one of {', '.join(allowed)}, or package.module:name)"
        raise ValueError(f"no {kind} of this name{hint}")

    return check


def _finite(value: Any) -> Any:
    """Refuse numbers that JSON does not have: tasks and steps get the configuration as JSON."""
    for each in value.values() if isinstance(value, dict) else value:
        if isinstance(each, float) and not math.isfinite(each):
            raise ValueError(f"{each} is not a finite number")
        if isinstance(each, dict | list):
            _finite(each)
    return value


#: Values that only the code that takes them can check, such as arguments of a model.
Free = Annotated[dict[str, Any], AfterValidator(_finite)]


def require_writable(tree: Any) -> None:
    """Refuse what may not be written down, or would be replaced; raises `ValueError`."""
    for path, text in _texts(tree):
        if why := find_credentials(text):
            raise ValueError(f"{path}: {why}; {_REMEDY}")
        if "{{" in text:
            raise ValueError(
                f"{path}: {text!r} has '{{{{' in it, which begins a placeholder of Kubeflow "
                "Pipelines and Argo; they would replace it"
            )


def _texts(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield every text of a tree, keys too, with the path to it."""
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

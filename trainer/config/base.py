"""The base of all sections of the configuration: frozen, strict, unknown keys are refused."""

from __future__ import annotations

import hashlib
import math
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

#: The largest whole number that a run parameter may be: KFP passes numbers as doubles.
MOST = 2**53
_Default = TypeVar("_Default")


def key(default: _Default, description: str, **limits: Any) -> _Default:
    """Return the field of a key; its description is shown in the reference and by KFP."""
    return Field(default, description=description, **limits)  # type: ignore[no-any-return]


class Section(BaseModel):
    """A frozen section of the configuration that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def digest(self) -> str:
        """Return a short hash of all values of this section."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:12]


class Whole(Section):
    """A section that is a single run parameter: it has many keys that few runs set."""


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

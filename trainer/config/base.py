"""What every part of the configuration is: frozen, strict, and sure of its keys."""

from __future__ import annotations

import hashlib
import math
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict

#: The largest whole number that a run parameter may be: KFP passes numbers as doubles.
MOST = 2**53


class Section(BaseModel):
    """A frozen part of the configuration that refuses what it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def digest(self) -> str:
        """Return a short hash of everything that this part says."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:12]


class Whole(Section):
    """A section that is one run parameter: of many keys, most runs say none."""


def _finite(value: Any) -> Any:
    """Refuse what JSON cannot say: tasks and pipeline steps get the configuration as JSON."""
    for each in value.values() if isinstance(value, dict) else value:
        if isinstance(each, float) and not math.isfinite(each):
            raise ValueError(f"{each} is not a finite number")
        if isinstance(each, dict | list):
            _finite(each)
    return value


#: Values that only the code they are for can check: arguments of a model, say.
Free = Annotated[dict[str, Any], AfterValidator(_finite)]

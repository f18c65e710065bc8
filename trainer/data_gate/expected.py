"""The schema file, in which a user states constraints on the features of a dataset.

    features:
      age: {type: number, min: 0, max: 120, missing: 0.01}
      city: {type: text, values: [Aachen, Bonn]}
      note: {required: false}

`data.schema_file` is its path or URI. The format is YAML or JSON. Features that are not in the file
are unconstrained. Each validation publishes an inferred schema as a starting point.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from flotilla.trainer import storage
from flotilla.trainer.config.base import Section
from flotilla.trainer.data_gate.profile import DatasetProfile
from flotilla.trainer.features.statistics.statistics import CLASS, NUMBER, TEXT
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.storage.uri import is_uri

FILE = "schema.yaml"
# Maximum number of distinct values of a text or class that an inferred schema lists.
_MOST_VALUES = 50


class ExpectedFeature(Section):
    """Constraints on a feature. A constraint that is not set is not checked."""

    type: Literal["", "number", "text", "class", "tensor", "image"] = ""
    required: bool = True
    min: float | None = None
    max: float | None = None
    missing: float | None = Field(None, ge=0, le=1)
    values: tuple[str, ...] = Field((), strict=False)

    @model_validator(mode="after")
    def _check_bounds(self) -> ExpectedFeature:
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min:g} is above max {self.max:g}")
        return self


class ExpectedFeatures(Section):
    """Content of a schema file."""

    features: dict[str, ExpectedFeature]


def read(place: str) -> ExpectedFeatures | None:
    """Return the schema at a path or URI, or None if `place` is empty.

    Raises:
        ConfigError: the file does not exist, or is not a schema.
    """
    if not place:
        return None
    uri = place if is_uri(place) else storage.uri_of(Path(place).expanduser())
    try:
        tree = yaml.safe_load(storage.read_bytes(uri).decode())
    except storage.Missing:
        raise ConfigError(f"data.schema_file: there is no file {place}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        words = " ".join(str(error).split())
        raise ConfigError(f"data.schema_file: {place} is not YAML: {words}") from None
    if not isinstance(tree, dict) or "features" not in tree:
        raise ConfigError(
            f"data.schema_file: {place} lists no features: it must begin with `features:`"
        )
    try:
        return ExpectedFeatures.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        said = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"data.schema_file: {place}: {where}: {said}") from None


def infer_schema(dataset: DatasetProfile) -> str:
    """Return a schema that the dataset satisfies, as YAML for the user to edit."""
    tree: dict[str, Any] = {}
    for name, each in dataset.features("train").items():
        entry: dict[str, Any] = {"type": each.kind}
        if each.kind == NUMBER and each.least <= each.most:
            entry |= {"min": each.least, "max": each.most}
        if each.kind in (TEXT, CLASS) and each.is_counted and len(each.counts) <= _MOST_VALUES:
            entry["values"] = sorted(each.counts)
        entry["missing"] = round(each.missing / max(each.examples, 1), 4)
        tree[name] = entry
    text: str = yaml.safe_dump({"features": tree}, sort_keys=False, allow_unicode=True)
    return text

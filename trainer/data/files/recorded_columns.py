"""The inputs in an exported model's manifest. They describe how to read later files.

The manifest has one entry per input: its stored spec, and the type of its column. Later files are
read in the same way as the training data, without inferring types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.storage import Manifest

if TYPE_CHECKING:
    from flotilla.trainer.data.files.columns import Column

# Number of dimensions of an image: height, width and channels.
_PICTURE = 3
# Fields of a `Column` that determine how its values are read.
_READ = ("type", "unit")


@dataclass(frozen=True, kw_only=True)
class RecordedInput:
    """An input of the model: its feature, its stored spec, and its column."""

    feature: str
    spec: FeatureSpec
    column: Column


def read_recorded(spec: DatasetSpec, dataset: Manifest, config: DataConfig) -> list[dict[str, Any]]:
    """Return the inputs of a dataset, in order, for the manifest of a model."""
    # With `data.map`, columns are inputs of the function, not of the model.
    columns = [] if config.map else dataset.fields.get("columns", [])
    read = {each["name"]: {key: each[key] for key in _READ if key in each} for each in columns}
    return [
        {"feature": name, "type": "", **read.get(name, {}), **spec.features[name].to_json()}
        for name in spec.inputs
    ]


def make_inputs(entries: Sequence[Mapping[str, Any]]) -> tuple[RecordedInput, ...]:
    """Restore the inputs from `entries`, the result of `read_recorded`."""
    found = []
    for entry in entries:
        given = {name: value for name, value in entry.items() if name not in ("feature", *_READ)}
        given |= {"shape": tuple(given["shape"]), "labels": tuple(given["labels"])}
        spec = FeatureSpec(**given)
        name = str(entry["feature"])
        column = _column(name, spec, str(entry["type"]), str(entry.get("unit", "")))
        found.append(RecordedInput(feature=name, spec=spec, column=column))
    return tuple(found)


def _column(name: str, spec: FeatureSpec, said: str, unit: str) -> Column:
    # Import the module only here, because it loads Arrow, which an export does not need.
    from flotilla.trainer.data.files.columns import Column  # noqa: PLC0415

    kind = said or _choose_type(spec)
    return Column(
        name=name,
        type=kind,
        why="the model",
        gaps=kind in ("int", "bool") and spec.dtype.startswith("float"),
        shape=spec.sizes,
        dtype=spec.dtype if spec.shape or spec.dtype == "float64" else "",
        stored=spec.stored,
        classes=spec.labels if kind == "class" else (),
        unit=unit,
    )


def _choose_type(spec: FeatureSpec) -> str:
    """Return the column type for a feature of a dataset that was not made from files."""
    if spec.stored == "image" or (len(spec.shape) == _PICTURE and spec.dtype == "uint8"):
        return "image"
    if spec.shape:
        return "tensor"
    if spec.labels:
        return "class"
    if spec.dtype in ("string", "bool"):
        return {"string": "text", "bool": "bool"}[spec.dtype]
    return "float" if "float" in spec.dtype else "int"

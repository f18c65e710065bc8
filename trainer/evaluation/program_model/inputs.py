"""Passes the features of a dataset to the arguments of a program's model.

An argument receives the feature with the same name, or the feature that has this name in Flotilla's
own signatures. A single argument receives a single feature regardless of its name. Values are
converted if their type or shape differs, but their meaning does not change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.features.names import argument_names, layer_name
from flotilla.trainer.runtime.errors import UserError, nearest

Size = int | None
_TEXT = "string"


@dataclass(frozen=True, kw_only=True)
class Argument:
    """An argument of a model. The shape includes the batch axis. None means any shape."""

    name: str
    shape: tuple[Size, ...] | None
    dtype: str

    def __str__(self) -> str:
        """Return a description for messages."""
        return f"{self.name!r} ({describe_tensor(self.dtype, self.shape)})"


def describe_tensor(dtype: str, shape: tuple[Size, ...] | None) -> str:
    """Describe a tensor and its batch axis for a message, as in `float32 [any, 3]`."""
    sizes = "..." if shape is None else ", ".join("any" if n is None else str(n) for n in shape)
    return f"{dtype} [{sizes}]"


def match_arguments(spec: DatasetSpec, takes: Mapping[str, Argument]) -> dict[str, str]:
    """Return the feature for each argument. Raises `UserError` if an argument fits none."""
    if len(takes) == len(spec.inputs) == 1:
        found = dict(zip(takes, spec.inputs, strict=True))
    else:
        known = {layer_name(name): name for name in spec.inputs}
        known |= {argument: name for name, argument in argument_names(spec.inputs).items()}
        known |= {name: name for name in spec.inputs}
        for name, argument in takes.items():
            if name not in known:
                hint = nearest(name, known) or f" (its inputs: {', '.join(spec.inputs)})"
                raise UserError(
                    f"the argument {argument} is not an input of the dataset{hint}; name the "
                    "arguments of the signature after the features"
                )
        found = {name: known[name] for name in takes}
    if not found:
        raise UserError(
            "the signature has no arguments; add an argument for each feature that the model uses"
        )
    for name, feature in found.items():
        _require_fit(takes[name], feature, spec)
    return found


def _require_fit(argument: Argument, feature: str, spec: DatasetSpec) -> None:
    of_data = spec.features[feature]
    both = (
        f"the argument {argument} does not accept the feature {feature!r} "
        f"({describe_tensor(of_data.dtype, (None, *of_data.shape))})"
    )
    if argument.shape and argument.shape[0] is not None:
        raise UserError(
            f"the argument {argument} accepts exactly {argument.shape[0]} examples; export the "
            "model with None as the first dimension"
        )
    if not _is_castable(of_data.dtype, argument.dtype):
        raise UserError(f"{both}; declare it as {of_data.dtype}, and convert inside the model")
    least, most = _range(spec, feature)
    if _is_narrow(argument.dtype, of_data.dtype, least, most):
        raise UserError(
            f"{both}, whose values range from {least:g} to {most:g}; declare it as {of_data.dtype}"
        )
    if _reshaped(of_data, argument) is None:
        raise UserError(f"{both}; declare it with that shape, and reshape inside the model")


def _is_castable(given: str, wanted: str) -> bool:
    if given == wanted:
        return True
    if _TEXT in (given, wanted):
        return False
    if wanted == "bfloat16":
        return True
    return bool(np.can_cast(np.dtype(given), np.dtype(wanted), "same_kind"))


def _range(spec: DatasetSpec, feature: str) -> tuple[float, float]:
    known = spec.learnt.features.get(feature)
    return (known.least or 0, known.most or 0) if known else (0, 0)


def _is_narrow(wanted: str, given: str, least: float, most: float) -> bool:
    if wanted == given or not wanted.startswith(("int", "uint")):
        return False
    limits = np.iinfo(wanted)
    return least < limits.min or most > limits.max


def _reshaped(feature: FeatureSpec, argument: Argument) -> tuple[Size, ...] | None:
    """Return the shape of an example that fits the argument, or None if there is none."""
    given, wanted = tuple(feature.shape), argument.shape
    if wanted is None or _fits(given, wanted[1:]):
        return given
    if None in given:
        return None
    # Try to add or drop a last axis of size 1, or to flatten the array in row-major order.
    flat = (math.prod(feature.sizes),)
    shapes = ((*given, 1), given[:-1] if given[-1:] == (1,) else given, flat)
    return next((each for each in shapes if _fits(each, wanted[1:])), None)


def _fits(given: tuple[Size, ...], wanted: tuple[Size, ...]) -> bool:
    return len(given) == len(wanted) and all(
        size is None or size == own for own, size in zip(given, wanted, strict=True)
    )


def convert(value: Any, feature: FeatureSpec, argument: Argument) -> Any:
    """Convert a batch of a feature, real or symbolic, to the argument's type and shape."""
    shape = _reshaped(feature, argument)
    if shape is not None and shape != tuple(feature.shape):
        value = keras.ops.reshape(value, (-1, *shape))
    return value if feature.dtype == argument.dtype else keras.ops.cast(value, argument.dtype)

"""Fixed shapes for features whose examples differ in shape: images are resized, others padded.

This module only plans the conversion, without TensorFlow. `builders.batches` converts the examples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import tensorflow_datasets as tfds

from flotilla.trainer.data.roles import MOST_NAMED, format_names
from flotilla.trainer.features.names import length_name
from flotilla.trainer.runtime.errors import ConfigError, nearest

#: Padding at the end of a label sequence. Losses and metrics ignore it.
NO_LABEL = -1
#: Size in `data.shapes` of a dimension that varies between examples.
VARIES = 0
_IMAGE_RANK = len(("height", "width", "channels"))
_SIDE, _COLOURS = 64, 3
_FRAMES = 16
_LENGTH = 64
_SAMPLES = 16_000


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """A feature that is one tensor, with its TFDS feature and the TFDS feature of its elements.

    `connector` is None within a sequence of several features.
    """

    connector: Any
    element: Any
    tensor: Any

    @property
    def shape(self) -> tuple[int | None, ...]:
        """The size of each axis, or None if the size varies."""
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> str:
        """The NumPy name of the feature's type, or "string"."""
        name = np.dtype(self.tensor.np_dtype).name
        return "string" if name == "object" else name

    @property
    def is_fixed(self) -> bool:
        """Whether all examples have the same shape."""
        return None not in self.shape and not self.is_dataset

    @property
    def is_dataset(self) -> bool:
        """Whether each example contains a nested dataset."""
        return bool(self.tensor.dataset_lvl)

    @property
    def is_image(self) -> bool:
        """Whether the feature is an image or a video."""
        return isinstance(self.element, tfds.features.Image) and len(self.shape) >= _IMAGE_RANK

    @property
    def classes(self) -> tuple[int, tuple[str, ...]]:
        """The number of classes, and their names."""
        named = (tfds.features.ClassLabel, tfds.features.LabeledImage)
        if isinstance(self.element, named) and self.element.num_classes:
            return self.element.num_classes, tuple(self.element.names)
        return 0, ()

    def __str__(self) -> str:
        """Describe the feature for a message."""
        return f"{self.dtype} of shape {self.shape}"


@dataclass(frozen=True, kw_only=True)
class Fit:
    """How to convert all examples of a feature to one shape and type.

    `resize` interpolates pixels. `nearest` uses the nearest pixel, so that a mask keeps its
    classes. Both apply to the two axes before the last. Other axes are cropped, or padded at the
    end with `fill`. `multi_hot` turns a set of classes into one bool per class.
    """

    method: Literal["pad", "resize", "nearest", "multi_hot"]
    shape: tuple[int, ...]
    dtype: str
    fill: Any = 0


def fits(
    name: str,
    leaves: Mapping[str, Leaf],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    needed: Iterable[str],
    targets: Sequence[str],
) -> dict[str, Fit]:
    """Return a `Fit` for each feature whose shape varies or must change. Raises `ConfigError`.

    `shapes` is `data.shapes`. Each feature in `needed` must have a fixed shape or get a `Fit`.
    """
    for feature, shape in shapes.items():
        _require(name, leaves, feature, shape)
    found = {
        feature: _fit(leaves[feature], shape, is_target=feature in targets)
        for feature, shape in shapes.items()
    }
    for feature in targets:
        leaf = leaves[feature]
        classes, _ = leaf.classes
        if feature not in found and classes and leaf.shape == (None,) and not leaf.is_dataset:
            found[feature] = Fit(method="multi_hot", shape=(classes,), dtype="bool")
    lacking = [each for each in needed if each not in found and not leaves[each].is_fixed]
    if lacking:
        differ = ", ".join(f"{each!r} ({leaves[each]})" for each in lacking[:MOST_NAMED])
        wanted = {**shapes, **{each: _suggest_shape(leaves[each]) for each in lacking}}
        sizes = ", ".join(f"{each}: {list(shape)}" for each, shape in wanted.items())
        sets = "".join(
            f"; {each!r} is read as a set of classes or, if you set a length, as one class at each "
            "position"
            for each in found.keys() - shapes.keys()
        )
        raise ConfigError(
            f"data.shapes: examples of {name} differ in the shape of {differ}; set data.shapes to "
            f"{{{sizes}}} or other sizes{sets}"
        )
    return found


def make_length_features(
    name: str, leaves: Mapping[str, Leaf], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Leaf]:
    """Return the length features of all features that keep their variable length.

    `shapes` are the entries of `data.shapes` that contain a 0. Raises `ConfigError`.
    """
    for feature, shape in shapes.items():
        _require(name, leaves, feature, shape)
        leaf = leaves[feature]
        first, *others = shape
        if leaf.is_image or first != VARIES or others != list(leaf.shape[1:]):
            usual = [VARIES, *_suggest_shape(leaf)[1:]]
            advice = f"set it to {usual}" if not leaf.is_image else "set the size of an image"
            raise ConfigError(
                f"data.shapes: {feature}: {list(shape)}: only the first size of a sequence may be "
                f"0, and the others must match {leaf}; {advice}"
            )
        if length_name(feature) in leaves:
            raise ConfigError(
                f"data.shapes: {feature}: its lengths are stored as {length_name(feature)!r}, and "
                f"{name} already has a feature of this name; set a fixed length for {feature}"
            )
    one = tfds.features.TensorInfo(shape=(), dtype=np.int64)
    made = Leaf(connector=None, element=None, tensor=one)
    return {length_name(feature): made for feature in shapes}


def _require(name: str, leaves: Mapping[str, Leaf], feature: str, shape: tuple[int, ...]) -> None:
    if feature not in leaves:
        hint = nearest(feature, leaves) or f" (one of {format_names(leaves)})"
        raise ConfigError(f"data.shapes: there is no feature {feature!r} in {name}{hint}")
    leaf = leaves[feature]
    if leaf.is_dataset or not leaf.shape:
        what = "a dataset in each example" if leaf.is_dataset else "a single value"
        raise ConfigError(f"data.shapes: the feature {feature!r} of {name} is {what}; leave it out")
    suits = len(shape) == len(leaf.shape)
    if suits and leaf.is_image:
        suits = leaf.shape[-1] in (None, shape[-1])
    if not suits:
        raise ConfigError(
            f"data.shapes: {feature}: {list(shape)} does not match {leaf}; set a shape such as "
            f"{list(_suggest_shape(leaf))}"
        )


def _fit(leaf: Leaf, shape: tuple[int, ...], *, is_target: bool) -> Fit:
    dtype = leaf.dtype
    if leaf.is_image:
        # Labels must not be interpolated: the mean of two classes would be a third class.
        keeps = is_target or isinstance(leaf.element, tfds.features.LabeledImage)
        return Fit(method="nearest" if keeps else "resize", shape=shape, dtype=dtype)
    if dtype == "string":
        return Fit(method="pad", shape=shape, dtype=dtype, fill="")
    kind = np.dtype(dtype).kind
    if not is_target or kind not in "iub":
        return Fit(method="pad", shape=shape, dtype=dtype, fill=np.zeros((), dtype).item())
    wide = dtype if kind == "i" else "int64"
    return Fit(method="pad", shape=shape, dtype=wide, fill=NO_LABEL)


def _suggest_shape(leaf: Leaf) -> tuple[int, ...]:
    usual = [_LENGTH] * len(leaf.shape)
    if leaf.is_image:
        usual = [_FRAMES] * (len(leaf.shape) - _IMAGE_RANK) + [_SIDE, _SIDE, _COLOURS]
    elif isinstance(leaf.element, tfds.features.Audio):
        usual[0] = leaf.element.sample_rate or _SAMPLES
    return tuple(size or other for size, other in zip(leaf.shape, usual, strict=True))

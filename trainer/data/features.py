"""Select the features of a TFDS dataset, their roles, their fixed shapes, and their stored form."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import tensorflow_datasets as tfds

from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.data.roles import (
    MOST_NAMED,
    Roles,
    below,
    find,
    find_one,
    format_names,
    require_apart,
)
from flotilla.trainer.features.dataset_spec import require_buckets
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.features.names import length_name
from flotilla.trainer.runtime.errors import ConfigError, UserError, nearest

DEFAULT_LABEL = "label"
_log = logging.getLogger(__name__)
_OWN_BUILDER = "write your own builder (data.dataset: package.module:Builder)"


@dataclass(frozen=True, kw_only=True)
class Selection(Roles):
    """The selected features by name, and their roles.

    Nested features are named by their path, `outer/inner`. `connectors` are the TFDS features.
    `fits` specifies how features whose examples differ in shape are converted to one shape.
    """

    specs: Mapping[str, FeatureSpec]
    connectors: Mapping[str, Any] = field(default_factory=dict)
    fits: Mapping[str, Fit] = field(default_factory=dict)

    @property
    def example_bytes(self) -> int:
        """Estimated size of an example in memory, in bytes. A string counts as one byte."""
        return sum(math.prod(spec.sizes) * _item_size(spec.dtype) for spec in self.specs.values())


def select(config: DataConfig, info: Any) -> Selection:
    """Select features of a dataset from its `tfds.core.DatasetInfo`, before any download.

    A feature without a role is kept if its shape is fixed, or set in the configuration. Raises
    `ConfigError` for a wrong or missing key, and `UserError` if the dataset cannot be used.
    """
    name = config.dataset
    if not isinstance(info.features, tfds.features.FeaturesDict):
        raise UserError(
            f"data.dataset: {name} has {type(info.features).__name__} instead of named features; "
            f"{_OWN_BUILDER} that has a FeaturesDict"
        )
    leaves = dict(_leaves(info.features, info.features, info.features.get_tensor_info()))
    if config.map:
        return _whole(leaves)
    return choose(config, name, leaves, info.supervised_keys)


def _whole(leaves: Mapping[str, Leaf]) -> Selection:
    kept = {name: leaf for name, leaf in leaves.items() if not leaf.is_dataset}
    return Selection(
        inputs=(),
        targets=(),
        specs={
            name: _spec(leaf, leaf.shape, leaf.dtype, "" if leaf.is_fixed else "sequence")
            for name, leaf in kept.items()
        },
        connectors={name: leaf.connector for name, leaf in kept.items()},
    )


def choose(
    config: DataConfig, name: str, leaves: Mapping[str, Leaf], keys: Any = None
) -> Selection:
    """Select from `leaves`, the features of a dataset by name. `keys` are its supervised keys."""
    varies = {each: size for each, size in config.shapes.items() if VARIES in size}
    of_lengths = make_length_features(name, leaves, varies)
    roles = _roles(config, name, keys, leaves, of_lengths)
    _check(name, roles, {**leaves, **of_lengths})
    specs = _encode_images(config, roles, leaves)
    specs |= {each: _sequence(leaves[each], is_target=each in roles.targets) for each in varies}
    needed = dict.fromkeys([*roles.inputs, *roles.targets])
    require_buckets(config.buckets, [each for each in needed if each in varies])
    made = fits(
        name,
        leaves,
        {each: size for each, size in config.shapes.items() if each not in varies},
        needed=[each for each in needed if each not in {*specs, *of_lengths}],
        targets=roles.targets,
    )
    # A list of classes with a variable length is a sequence, not a set of labels.
    made = {each: fit for each, fit in made.items() if each not in varies}
    leaves = {**leaves, **of_lengths}
    able = made.keys() | specs.keys()
    kept = {each: leaf for each, leaf in leaves.items() if leaf.is_fixed or each in able}
    if left_out := sorted(leaves.keys() - kept.keys()):
        _log.info("%s: ignoring %s, because the shape is not fixed", name, ", ".join(left_out))
    for feature, fit in made.items():
        _log.info("%s: %s is stored as %s by %s", name, feature, list(fit.shape), fit.method)
    return Selection(
        **vars(roles),
        specs={
            each: _spec(leaf, one.shape, one.dtype)
            for each, leaf in kept.items()
            if each not in specs and (one := made.get(each, leaf))
        }
        | specs,
        connectors={each: leaf.connector for each, leaf in kept.items()},
        fits=made,
    )


def _item_size(dtype: str) -> int:
    # Set the size of bfloat16 here, because NumPy does not support this type.
    return {"string": 1, "bfloat16": 2}.get(dtype) or np.dtype(dtype).itemsize


def choose_stored_form(shape: tuple[int | None, ...], dtype: str) -> str:
    """Return how a feature is stored.

    Scalars are stored as numbers, which every tool can display. Scalars that an int64 or a float32
    cannot represent exactly are stored as bytes, like tensors.
    """
    if dtype == "string":
        return "bytes"
    if shape or dtype in {"uint64", "float64"}:
        return "raw"
    return {"i": "int", "u": "int", "b": "int", "f": "float"}.get(np.dtype(dtype).kind, "raw")


def _leaves(
    connector: Any, element: Any, tensor: Any, path: str = ""
) -> Iterator[tuple[str, Leaf]]:
    while isinstance(element, tfds.features.Sequence):
        element = element.feature
    if isinstance(tensor, Mapping):
        has_features = isinstance(element, tfds.features.FeaturesDict)
        for key, inner in tensor.items():
            each = element[key] if has_features else None
            # Store a sequence of several features as a separate sequence for each feature.
            below = each if isinstance(connector, tfds.features.FeaturesDict) else None
            yield from _leaves(below, each, inner, f"{path}/{key}" if path else key)
    else:
        yield path, Leaf(connector=connector, element=element, tensor=tensor)


def _roles(
    config: DataConfig,
    name: str,
    keys: Any,
    leaves: Mapping[str, Leaf],
    of_lengths: Mapping[str, Leaf],
) -> Roles:
    """Return the roles of features. A length feature is an input only if `data.inputs` names it."""
    by_keys = _choose_by_keys(keys, list(leaves))
    targets = find("label", config.label, leaves, name)
    weight, group = (
        find_one(key, getattr(config, key), leaves, name) for key in ("weight", "group")
    )
    if not targets:
        targets = by_keys.targets or ((DEFAULT_LABEL,) if DEFAULT_LABEL in leaves else ())
    if not targets:
        what = f"none in supervised_keys {keys}" if keys else "it has no supervised_keys"
        raise ConfigError(f"data.label: {name} has no label ({what}); {_another_label(leaves)}")
    weight = weight or by_keys.weight
    inputs = find("inputs", config.inputs, [*leaves, *of_lengths], name)
    if keys and not (inputs or by_keys.inputs):
        raise ConfigError(
            f"data.inputs: the supervised_keys {keys} of {name} name no input; set data.inputs to "
            f"one or more of its features ({format_names(leaves)})"
        )
    if not inputs:
        # If the supervised keys name a label as an input, keep it, so that `_check` reports it.
        taken = {weight, group, *(targets if config.label else ())}
        usual = [each for each in by_keys.inputs if each not in taken]
        others = (each for each in leaves if each not in {*targets, weight, group})
        inputs = tuple(usual or others)
    return Roles(inputs=inputs, targets=targets, weight=weight, group=group)


def _choose_by_keys(keys: Any, leaves: list[str]) -> Roles:
    # Supervised keys are (inputs, labels) or (inputs, labels, weights).
    inputs, targets, weights = (
        tuple(dict.fromkeys(leaf for key in _flat(part) for leaf in below(key, leaves)))
        for part in (*(keys or ()), *[()] * 3)[:3]
    )
    return Roles(inputs=inputs, targets=targets, weight=weights[0] if len(weights) == 1 else "")


def _check(name: str, roles: Roles, leaves: Mapping[str, Leaf]) -> None:
    for key, feature in (("weight", roles.weight), ("group", roles.group)):
        leaf = leaves[feature] if feature else None
        is_text = leaf and leaf.dtype == "string" and key == "weight"
        if leaf and (leaf.shape or leaf.is_dataset or is_text):
            one = "one number" if key == "weight" else "one value"
            raise ConfigError(
                f"data.{key}: {feature!r} of {name} is {leaf}, but it must be {one} per example"
            )
    if not roles.inputs:
        raise ConfigError(
            f"data.inputs: {name} has only {format_names(leaves)}, so no input "
            f"remains; {_OWN_BUILDER} with features to predict from"
        )
    require_apart(name, roles)
    texts = [each for each in roles.targets if leaves[each].dtype == "string"]
    if texts:
        raise ConfigError(
            f"data.label: {texts[0]!r} of {name} is a string, but a label must be a class or a "
            f"number; {_another_label(leaves)}"
        )
    for key, features in (("inputs", roles.inputs), ("label", roles.targets)):
        if inner := [each for each in features if leaves[each].is_dataset]:
            raise ConfigError(
                f"data.{key}: {inner[0]!r} of {name} is a nested dataset in each example; set "
                f"data.{key} to other features"
            )


def _another_label(leaves: Mapping[str, Leaf]) -> str:
    able = [each for each, leaf in leaves.items() if leaf.dtype != "string" and not leaf.is_dataset]
    if not able:
        return _OWN_BUILDER
    likely_first = sorted(able, key=lambda each: not leaves[each].classes[0])
    return f"set data.label to one or more of its features ({format_names(likely_first)})"


def _flat(keys: Any) -> list[str]:
    if isinstance(keys, str):
        return [keys]
    values = keys.values() if isinstance(keys, Mapping) else keys
    return [key for value in values for key in _flat(value)]


def _encode_images(
    config: DataConfig, roles: Roles, leaves: Mapping[str, Leaf]
) -> dict[str, FeatureSpec]:
    if not config.image.size:
        return {}
    shape = (*config.image.size, config.image.channels)
    # Exclude labels, because resizing would blend their values.
    found = {
        name: FeatureSpec(shape=shape, dtype="uint8", stored="image")
        for name, leaf in leaves.items()
        if type(leaf.connector) is tfds.features.Image
        and leaf.dtype == "uint8"
        and name not in (*config.shapes, *roles.targets)
    }
    if not found:
        raise ConfigError(
            f"data.image: {config.name} has no encoded image outside of data.shapes and data.label "
            f"({format_names(leaves)}); leave data.image out"
        )
    return found


def _spec(
    leaf: Leaf, shape: tuple[int | None, ...], dtype: str, stored: str = "", padding: int = 0
) -> FeatureSpec:
    classes, names = leaf.classes
    return FeatureSpec(
        shape=shape,
        dtype=dtype,
        stored=stored or choose_stored_form(shape, dtype),
        num_classes=classes,
        labels=names,
        padding=padding,
    )


def _sequence(leaf: Leaf, *, is_target: bool) -> FeatureSpec:
    kind = "" if leaf.dtype == "string" else np.dtype(leaf.dtype).kind
    labels = is_target and kind in "iub"
    dtype = "int64" if labels and kind != "i" else leaf.dtype
    return _spec(leaf, (None, *leaf.shape[1:]), dtype, "sequence", NO_LABEL if labels else 0)


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

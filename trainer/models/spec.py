"""Inputs and outputs of a model, and checks of `model.args`.

The configuration does not define the arguments of each model, so models check them with these
functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras

from flotilla.trainer.features import names
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.features.statistics.statistics import (
    NOTHING,
    NUMBER,
    TENSOR,
    TEXT,
    UNKNOWN_KIND,
    FeatureStatistics,
    Learnt,
)
from flotilla.trainer.features.statistics.words import is_letter
from flotilla.trainer.models.preprocessing import Normalization, Vocabulary, Words
from flotilla.trainer.runtime.errors import ConfigError, nearest


def sizes(name: str, value: Any) -> tuple[int, ...]:
    """Require a list of integers of at least 1, and return a tuple. Raises `ConfigError`."""
    if isinstance(value, list | tuple) and all(_is_whole(item) and item >= 1 for item in value):
        return tuple(value)
    raise _refused(name, value, "a list of whole numbers of at least 1")


def size(name: str, value: Any) -> int:
    """Require an integer of at least 1, and return it. Raises `ConfigError`."""
    if _is_whole(value) and value >= 1:
        return int(value)
    raise _refused(name, value, "a whole number of at least 1")


def share(name: str, value: Any) -> float:
    """Require a number of at least 0 and less than 1, and return it. Raises `ConfigError`."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1:
        return float(value)
    raise _refused(name, value, "a number of at least 0 and below 1")


def flag(name: str, value: Any) -> bool:
    """Require a bool, and return it. Raises `ConfigError`."""
    if isinstance(value, bool):
        return value
    raise _refused(name, value, "true or false")


def initializer(name: str, value: Any) -> keras.Initializer:
    """Return the Keras initializer for a name, or for `{class_name: ..., config: {...}}`."""
    known = isinstance(value, str) or (
        isinstance(value, Mapping) and set(value) <= {"class_name", "config"}
    )
    try:
        found = keras.initializers.get(dict(value) if isinstance(value, Mapping) else value)
    # Keras uses the value before it checks the type. This may raise any of these errors.
    except (ValueError, TypeError, KeyError, AttributeError):
        found = None
    if known and isinstance(found, keras.Initializer):
        return found
    allowed = "a Keras initializer, such as glorot_uniform or {class_name: RandomNormal, config: "
    raise _refused(name, value, allowed + "{stddev: 1.0}}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _refused(name: str, value: Any, allowed: str) -> ConfigError:
    return ConfigError(f"{name}: {value!r} is not allowed; it must be {allowed}")


# If at least this fraction of the words of a feature are letters of scripts without spaces, each
# letter counts as a word.
_LETTERS = 0.01
Shape = tuple[int, ...]
# An axis is None if its size differs between examples.
InputShape = tuple[int | None, ...]


@dataclass(frozen=True, kw_only=True)
class InputSpec:
    """The inputs of a model for one example, without the batch axis, and the required outputs.

    The first axis of a feature is None if examples differ in length. See `data.shapes`. With
    several input features, `shape` and `dtype` are mappings by feature name, and the model accepts
    a mapping of tensors. `output_shape` is the shape of the output for one example, with -1 for an
    axis of any size. With several targets it is a mapping by target name, and the model returns a
    mapping of tensors.

    `names` are the input features, and `targets` the features to predict. `in_units` are the
    targets whose outputs are in the units of the label. `classes` has the number of classes of each
    categorical input. The methods `statistics`, `vocabulary`, `words` and `normalization` use the
    statistics of a feature in the training split, which are exported as constants of the model.

    Names may have any characters. `layer_name` converts them to layer names. With several inputs,
    each input layer is named after its feature. If another layer of the model has the same name,
    `inputs_apart` is set, and the names of the input layers get a prefix.
    """

    shape: InputShape | Mapping[str, InputShape]
    dtype: str | Mapping[str, str]
    output_shape: Shape | Mapping[str, Shape]
    names: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    in_units: tuple[str, ...] = ()
    classes: Mapping[str, int] = field(default_factory=dict)
    inputs_apart: bool = False
    learnt: Learnt = field(default=NOTHING, repr=False, compare=False)

    @classmethod
    def of(  # noqa: PLR0913
        cls,
        features: Mapping[str, FeatureSpec],
        inputs: Sequence[str],
        output_shape: Shape | Mapping[str, Shape],
        *,
        targets: Sequence[str] = (),
        in_units: Sequence[str] = (),
        learnt: Learnt = NOTHING,
    ) -> InputSpec:
        """Create the spec of a model with the input features `inputs`."""
        shapes = {name: tuple(features[name].shape) for name in inputs}
        dtypes = {name: features[name].dtype for name in inputs}
        alone = len(inputs) == 1
        return cls(
            shape=shapes[inputs[0]] if alone else shapes,
            dtype=dtypes[inputs[0]] if alone else dtypes,
            output_shape=output_shape,
            names=tuple(inputs),
            targets=tuple(targets),
            in_units=tuple(in_units),
            classes={name: n for name in inputs if (n := features[name].num_classes)},
            learnt=learnt,
        )

    @property
    def num_classes(self) -> int:
        """The size of the last axis of the output: for a classification, the number of classes.

        Raises:
            ConfigError: the task has several outputs, or the size is not fixed.
        """
        if isinstance(self.output_shape, Mapping):
            names = ", ".join(self.output_shape)
            raise ConfigError(
                f"the model has one output, but the task has the outputs {names}; {_OWN_MODEL}"
            )
        if not self.output_shape or self.output_shape[-1] < 0:
            raise ConfigError(
                f"the output must be one row of numbers, not {self.output_shape}; {_OWN_MODEL}"
            )
        return self.output_shape[-1]

    def statistics(self, name: str) -> FeatureStatistics:
        """Return the statistics of a feature in the training split.

        The statistics are empty before the dataset is prepared, as in `flotilla doctor`.

        Raises:
            ConfigError: the feature does not exist.
            UserError: the statistics cannot be read.
        """
        known = self.learnt.features
        here = (*self.names, *self.targets)
        if name in known or (not known and name in here):
            return known.get(name, FeatureStatistics(kind=UNKNOWN_KIND, examples=0))
        named = known or here
        hint = nearest(name, named) or f" (it has {', '.join(named)})"
        raise ConfigError(f"the dataset has no feature {name!r}{hint}")

    def vocabulary(
        self, name: str, most: int = 0, *, least: int = 1, padding: bool = False
    ) -> Vocabulary:
        """Return a layer that converts the strings of a feature to integers. See `Vocabulary`.

        The layer knows up to `most` values (0 for no limit): the most frequent of those that occur
        in at least `least` examples. With `padding`, the empty string has the number 1.

        Raises:
            ConfigError: the feature is not a string.
        """
        values = _frequent(self._text(name).counts, most, least)
        return Vocabulary([""] * padding + values, name=layer_name(name, "vocabulary"))

    def words(
        self, name: str, length: int | None, most: int = 0, *, ngram: int = 1, least: int = 1
    ) -> Words:
        """Return a layer that numbers the first `length` words of texts. See `Words`.

        The layer knows up to `most` words (0 for no limit): the most frequent of those that occur
        in at least `least` training examples. With an `ngram` of 2, words are pairs of consecutive
        words.

        Raises:
            ConfigError: the feature is not a string.
        """
        found = self._text(name)
        counts = found.pairs if ngram > 1 else found.words
        what = "pairs" if ngram > 1 else "words"
        return Words(
            _frequent(counts, most, least), length, ngram=ngram,
            letters=_are_letters(found), name=layer_name(name, what),
        )  # fmt: skip

    def normalization(self, name: str) -> Normalization:
        """Return a layer that normalizes a feature to mean 0 and variance 1.

        A vector is normalized element by element, and other tensors over all elements. NaN, a
        missing number, stays NaN.

        Raises:
            ConfigError: the feature is not numeric.
        """
        found = self.statistics(name)
        if found.kind not in (NUMBER, TENSOR, UNKNOWN_KIND):
            raise ConfigError(f"{name!r} is a {found.kind}, which has no mean; do not normalize it")
        # Divide a feature that is constant in training by 1, so that other values stay moderate.
        std = [each or 1.0 for each in found.stds] or found.std or 1.0
        mean = found.means or found.mean or 0.0
        return Normalization(mean, std, name=layer_name(name, "normalization"))

    def _text(self, name: str) -> FeatureStatistics:
        found = self.statistics(name)
        if found.kind not in (TEXT, UNKNOWN_KIND):
            raise ConfigError(f"{name!r} is a {found.kind}, not a text, so it has no vocabulary")
        return found

    def symbols(self) -> Any:
        """Return the symbolic Keras input or, for several inputs, a mapping keyed by feature."""
        if isinstance(self.shape, Mapping):
            assert isinstance(self.dtype, Mapping)
            return {
                name: self._symbol(name, shape, self.dtype[name])
                for name, shape in self.shape.items()
            }
        return keras.Input(shape=self.shape, dtype=self.dtype, name="flotilla_input")

    def _symbol(self, name: str, shape: InputShape, dtype: str) -> Any:
        own = names.layer_name(name)
        layer = f"flotilla_input_{own}" if self.inputs_apart else own
        found = keras.Input(shape=shape, dtype=dtype, name=layer)
        # Keras finds the inputs of a mapping by tensor name, so use the feature's name.
        found.name = name
        return found


def layer_name(name: str, what: str) -> str:
    """Return a valid layer name for a feature or an output with any name."""
    return f"{names.layer_name(name)}_{what}"


def _are_letters(known: FeatureStatistics) -> bool:
    """Return whether letters of scripts without spaces are frequent enough to count as words."""
    counts = [n for word, n in known.words.items() if len(word) == 1 and is_letter(word)]
    return bool(known.pairs) and sum(counts) >= _LETTERS * sum(known.words.values())


def _frequent(counts: Mapping[str, int], most: int, least: int = 1) -> list[str]:
    found = [value for value, count in counts.items() if count >= least]
    return found[: size("most", most)] if most else found


def scaled_input(spec: InputSpec) -> tuple[Any, Any]:
    """Return the symbolic input of a model with a single input, and its value as a float tensor.

    Bytes are scaled to the range from 0 to 1, and other numbers are only cast. The layers have
    names that a user would not choose, because Keras refuses duplicate names.

    Raises:
        ConfigError: the dataset has several inputs, or its input is not numeric.
    """
    if isinstance(spec.shape, Mapping):
        names = ", ".join(spec.shape)
        raise ConfigError(f"one input feature is allowed, but there are {names}; {_OWN_MODEL}")
    if spec.dtype == "string":
        raise ConfigError(f"the input must be numeric, but it is a string; {_OWN_MODEL}")
    given = spec.symbols()
    scale = 1 / 255 if spec.dtype == "uint8" else 1.0
    return given, keras.layers.Rescaling(scale, name="flotilla_scale")(given)


_OWN_MODEL = "use `tabular`, or your own model as package.module:function"

"""Layers that look up strings and normalize numbers, with constants in the graph.

Keras's layers (`StringLookup`, `TextVectorization`) store a table in the process that creates them,
and graphs on other cluster tasks cannot access it. `Vocabulary` and `Words` store 64-bit
fingerprints of the known values as constants of the graph. Therefore, every strategy can place them
on any task, and the exported model is self-contained. The probability of a collision among n values
is about n^2 / 2^64. For a million values, it is below one in ten million.

A float32 has about 7 digits. Large numbers, such as Unix timestamps, differ only in their last
digits. A Keras layer loses these digits, because it casts its inputs to float32. `Normalization`
subtracts the mean in a type that keeps all digits, and casts only the difference to float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from flotilla.trainer.embeddings.hashes import FINGERPRINTS, strip_spaces
from flotilla.trainer.features.statistics.words import LETTER, PUNCTUATION

# A noncharacter of Unicode, which no text contains.
_NO_TEXT = "\uffff"


class _Known:
    """The fingerprints of known values, and the number of each value."""

    def __init__(self, values: Sequence[str], first: int) -> None:
        with tf.init_scope(), tf.device("CPU:0"):
            known = strip_spaces(tf.constant([*values], tf.string))
            found = tf.strings.to_hash_bucket_fast(known, FINGERPRINTS)
            fingerprints: NDArray[np.int64] = found.numpy()
        order = np.argsort(fingerprints, kind="stable")
        # Append a fingerprint that no value has, so that an empty vocabulary needs no special case.
        self._sorted = np.append(fingerprints[order], np.int64(2**63 - 1))
        self._numbers = np.append(order + first, 0).astype(np.int64)

    def numbers(self, texts: tf.Tensor, unknown: int) -> tf.Tensor:
        """Return the number of each text [n], or `unknown` if the text is not known."""
        found = tf.strings.to_hash_bucket_fast(strip_spaces(texts), FINGERPRINTS)
        places = tf.searchsorted(self._sorted, found)
        known = tf.equal(tf.gather(self._sorted, places), found)
        return tf.where(known, tf.gather(self._numbers, places), np.int64(unknown))


def _make_distinct(values: Sequence[str]) -> list[str]:
    """Return the values for a Keras layer, with duplicates replaced by unused strings."""
    texts = [each.decode() for each in strip_spaces(tf.constant([*values], tf.string)).numpy()]
    first = {each: place for place, each in reversed([*enumerate(texts)])}
    # Return at least one string, because Keras refuses an empty vocabulary.
    return [
        each if first[each] == place else f"{_NO_TEXT}{place}" for place, each in enumerate(texts)
    ] or [f"{_NO_TEXT}0"]


@keras.saving.register_keras_serializable(package="flotilla")
class Vocabulary(keras.layers.Layer):
    """Converts strings of any shape to integers: 0 for unknown strings, 1 and up for known ones.

    Leading and trailing spaces are ignored.
    """

    def __init__(self, values: Sequence[str], **kwargs: Any) -> None:
        """Create the layer for these values, which are numbered from 1."""
        super().__init__(**{"dtype": "int64", **kwargs})
        self.values = [*values]
        self.supports_jit = False
        self._known = _Known(self.values, 1)

    @property
    def size(self) -> int:
        """The number of different outputs, including 0 for unknown strings."""
        return len(self.values) + 1

    def call(self, texts: tf.Tensor) -> tf.Tensor:
        """Return the numbers, in the shape of the strings."""
        return tf.reshape(self._known.numbers(tf.reshape(texts, [-1]), 0), tf.shape(texts))

    def plain(self, texts: Any) -> Any:
        """Return the numbers for a symbolic tensor. Its strings must have no surrounding spaces."""
        return keras.layers.StringLookup(
            vocabulary=_make_distinct(self.values), oov_token=_NO_TEXT, name=self.name
        )(texts)

    def compute_output_spec(self, texts: Any) -> keras.KerasTensor:
        """Return the type and the shape of the numbers."""
        return keras.KerasTensor(texts.shape, "int64")

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the layer, for saving."""
        return {**super().get_config(), "values": self.values}


@keras.saving.register_keras_serializable(package="flotilla")
class Words(keras.layers.Layer):
    """Converts texts [n] to the numbers of their words [n, length]: 1 if unknown, 0 for padding.

    As in Keras's `TextVectorization`, ASCII letters are converted to lower case, punctuation is
    removed, and texts are split at spaces. Punctuation does not separate words, because Keras has
    no layer or operation that replaces it with a space, and a Keras file must not need a class of
    this package.
    """

    def __init__(
        self,
        values: Sequence[str],
        length: int | None,
        *,
        ngram: int = 1,
        letters: bool = False,
        **kwargs: Any,
    ) -> None:
        """Create the layer for these words, which are numbered from 2.

        Args:
            values: the known words, or n-grams whose words are joined by a space.
            length: the number of words to which texts are truncated or padded, or None to only pad.
            ngram: the number of consecutive words in a value.
            letters: whether each letter of a script without spaces is a word.
            **kwargs: arguments of a Keras layer.
        """
        super().__init__(**{"dtype": "int64", **kwargs})
        if length is not None and length < 1:
            raise ValueError(f"length: {length!r} is not allowed; it must be at least 1")
        self.values = [*values]
        self.length, self.ngram, self.letters = length, ngram, letters
        self.supports_jit = False
        self._known = _Known(self.values, 2)

    @property
    def size(self) -> int:
        """The number of different outputs, including 0 for padding and 1 for unknown words."""
        return len(self.values) + 2

    def call(self, texts: tf.Tensor) -> tf.Tensor:
        """Return the numbers of the words, padded with 0."""
        plain = tf.strings.regex_replace(tf.strings.lower(strip_spaces(texts)), PUNCTUATION, "")
        if self.letters:
            plain = tf.strings.regex_replace(plain, LETTER, r" \1 ")
        words = tf.strings.split(plain)
        if self.ngram > 1:
            words = tf.strings.ngrams(words, self.ngram)
        numbers = words.with_flat_values(self._known.numbers(words.flat_values, 1))
        return numbers.to_tensor(0, shape=[None, self.length])

    def plain(self, texts: Any) -> Any:
        """Return the numbers for a symbolic tensor. Its texts must have no surrounding spaces."""
        if self.letters:
            raise ValueError(f"no Keras layer splits a text into letters, as {self.name} does")
        return keras.layers.TextVectorization(
            vocabulary=_make_distinct(self.values),
            ngrams=(self.ngram,) if self.ngram > 1 else None,
            output_sequence_length=self.length,
            name=self.name,
        )(texts)

    def compute_output_spec(self, texts: Any) -> keras.KerasTensor:
        """Return the type and the shape of the numbers."""
        return keras.KerasTensor((*texts.shape, self.length), "int64")

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the layer, for saving."""
        return {
            **super().get_config(),
            "values": self.values,
            "length": self.length,
            "ngram": self.ngram,
            "letters": self.letters,
        }


# Integers are clipped to this distance from the mean, so that the difference fits into int64. Real
# data are closer to the mean.
_FAR = 2**62


@keras.saving.register_keras_serializable(package="flotilla")
class Normalization(keras.layers.Layer):
    """Converts numbers of any type to normalized floats. NaN (a missing value) stays NaN."""

    def __init__(
        self, mean: float | Sequence[float], std: float | Sequence[float], **kwargs: Any
    ) -> None:
        """Store `mean` and `std`: each is one number, or a list of one number per element."""
        super().__init__(**{"autocast": False, **kwargs})
        self.mean, self.std = np.array(mean, np.float64), np.array(std, np.float64)
        #: Whether the layer was called with float64 or uint64 inputs.
        self.is_double = False

    def call(self, x: Any) -> Any:
        """Return the normalized numbers, in the shape of the input."""
        ops, dtype = keras.ops, keras.backend.standardize_dtype(x.dtype)
        if dtype in {"int64", "int32", "uint32"}:
            left = self._whole(ops.cast(x, "int64"))
        elif dtype in {"float64", "uint64"}:
            left = (ops.cast(x, "float64") - self.mean) / self.std
        else:
            left = (ops.cast(x, "float32") - self.mean.astype("f4")) / self.std.astype("f4")
        return ops.cast(left, self.compute_dtype)

    #: This method replaces the layer in Keras files, which must not need code of this package.
    plain = call

    def _whole(self, x: Any) -> Any:
        limits = np.iinfo(np.int64)
        rounded = [int(each) for each in np.rint(self.mean).ravel().tolist()]
        centre, least, most = (
            np.array([min(max(each, limits.min), limits.max) for each in found], np.int64)
            .reshape(self.mean.shape)
            for found in (rounded, [e - _FAR for e in rounded], [e + _FAR for e in rounded])
        )  # fmt: skip
        near = keras.ops.minimum(keras.ops.maximum(x, least), most) - centre
        rest = (self.mean - centre.astype(np.float64)).astype("f4")
        return (keras.ops.cast(near, "float32") - rest) / self.std.astype("f4")

    def compute_output_spec(self, x: Any) -> keras.KerasTensor:
        """Return the type and the shape of the normalized numbers."""
        self.is_double = x.dtype in ("float64", "uint64")
        return keras.KerasTensor(x.shape, self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the layer, for saving."""
        return {**super().get_config(), "mean": self.mean.tolist(), "std": self.std.tolist()}

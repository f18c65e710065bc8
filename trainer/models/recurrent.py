"""A recurrent network over padded tokens: one output for the whole, or one for each place."""

from __future__ import annotations

from collections.abc import Mapping

import keras

from trainer.errors import ConfigError
from trainer.models.classifiers import outputs
from trainer.models.spec import InputSpec, size


def gru(
    spec: InputSpec,
    *,
    vocabulary: int,
    dimension: int = 16,
    units: int = 32,
    bidirectional: bool = False,
) -> keras.Model:
    """Return an embedding, a gated recurrent unit (Cho et al. 2014), and the outputs.

    Tokens are whole numbers from 1 to `vocabulary - 1`; 0 is padding, which Keras masks.
    """
    places = tuple(spec.shape) if not isinstance(spec.shape, Mapping) else ()
    if len(places) != 1 or "int" not in str(spec.dtype):
        raise ConfigError(
            f"takes one sequence of whole numbers, not {spec.dtype} of shape {spec.shape}"
        )
    given = spec.symbols()
    x = keras.layers.Embedding(
        size("vocabulary", vocabulary), size("dimension", dimension), mask_zero=True, name="tokens"
    )(given)
    shape = spec.output_shape
    each_place = not isinstance(shape, Mapping) and _sizes(shape[:-1]) == places
    layer = keras.layers.GRU(size("units", units), return_sequences=each_place, name="gru")
    if bidirectional:
        layer = keras.layers.Bidirectional(layer, name="both_ways")
    x = layer(x)
    if each_place:
        logits = keras.layers.Dense(spec.num_classes, dtype="float32", name="logits")(x)
        return keras.Model(given, logits, name="gru")
    return keras.Model(given, outputs(spec, x), name="gru")


def _sizes(shape: tuple[int, ...]) -> tuple[int | None, ...]:
    return tuple(None if size < 0 else size for size in shape)

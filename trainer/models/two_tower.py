"""Recommender of two towers: what a user and an item have in common, in one score.

Each tower looks its id up in a table and makes a vector of the row (Covington et al. 2016, "Deep
Neural Networks for YouTube Recommendations", in the form of Yi et al. 2019, "Sampling-Bias-
Corrected Neural Modeling for Large Corpus Item Recommendations"). The score is the dot product of
both vectors and a bias, which holds what is liked by all and who likes all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from trainer.errors import ConfigError
from trainer.models import embedding_table
from trainer.models.sharded_embedding import UNKNOWN, ShardedEmbedding
from trainer.models.spec import InputSpec, size, sizes

TOWERS = 2
CLASSES = 2


# Each one is a key of `model.args`.
def two_tower(  # noqa: PLR0913
    spec: InputSpec,
    *,
    rows: Mapping[str, int] | None = None,
    tables: Mapping[str, Mapping[str, Any]] | None = None,
    dimension: int = 16,
    hidden_units: Sequence[int] = (),
    shards: int = 2,
    unknown: str = "error",
) -> keras.Model:
    """Return the score of pairs of ids, or the logits `[0, score]` of "no" and "yes".

    Args:
        spec: two ids, and one logit or two.
        rows: of the table of an input feature, by its name: one more than its largest id.
        tables: the features whose tables grow, with what `EmbeddingTable` takes: `capacity`, and
            where wanted `min_count`, `min_age`, `max_age`, `shards` and `initializer`. Their ids
            are any whole numbers, or texts.
        dimension: of a row, and of a tower's vector.
        hidden_units: ReLU layers of each tower.
        shards: variables that each table is split over; as many as there may be servers.
        unknown: what an id outside of its table gets: "error", or "wrap" for `id mod rows`.
    """
    sizes = _sizes(spec, rows, tables)
    dimension = size("dimension", dimension)
    shards = size("shards", shards)
    if unknown not in UNKNOWN:
        raise ConfigError(f"unknown: {unknown!r} is not allowed; it is one of {', '.join(UNKNOWN)}")
    given = spec.symbols()
    found = {}
    for name, of_name in sizes.items():
        own = f"{name}_embedding"
        if isinstance(of_name, int):
            least = min(shards, of_name)
            layer = ShardedEmbedding(of_name, dimension, shards=least, unknown=unknown, name=own)
        else:
            layer = embedding_table.growing(spec, name, dimension, of_name, shards)
        found[name] = layer(given[name])
    vectors = [_tower(name, row, hidden_units, dimension) for name, row in found.items()]
    match = keras.layers.Dot(axes=1, name="match")(vectors)
    both = keras.layers.Concatenate(name="both")(list(found.values()))
    bias = keras.layers.Dense(1, name="bias")(both)
    score = keras.layers.Add(dtype="float32", name="score")([match, bias])
    if spec.num_classes == 1:
        return keras.Model(given, score, name="two_tower")
    # The softmax of [0, score] is the sigmoid of the score.
    logits = keras.ops.pad(score, [[0, 0], [1, 0]])
    return keras.Model(given, logits, name="two_tower")


def _tower(name: str, x: Any, hidden_units: Sequence[int], dimension: int) -> Any:
    for index, units in enumerate(sizes("hidden_units", hidden_units)):
        x = keras.layers.Dense(units, activation="relu", name=f"{name}_hidden_{index}")(x)
    return keras.layers.Dense(dimension, name=f"{name}_vector")(x)


def _sizes(
    spec: InputSpec,
    rows: Mapping[str, int] | None,
    tables: Mapping[str, Mapping[str, Any]] | None,
) -> dict[str, int | Mapping[str, Any]]:
    """Return the rows of each feature's table, or the arguments of one that grows.

    They are in the order of the features.
    """
    if spec.num_classes not in {1, CLASSES}:
        raise ConfigError(f"takes {CLASSES} classes, the dataset has {spec.num_classes}")
    if not isinstance(spec.shape, Mapping) or len(spec.shape) != TOWERS:
        raise ConfigError(f"takes {TOWERS} input features, the dataset has {_described(spec)}")
    assert isinstance(spec.dtype, Mapping)
    fixed = rows if isinstance(rows, Mapping) else {}
    growing = tables if isinstance(tables, Mapping) else {}
    for name, shape in spec.shape.items():
        if tuple(shape) or (name not in growing and "int" not in spec.dtype[name]):
            are_floats = not tuple(shape) and "float" in spec.dtype[name]
            gaps = "; whole numbers are floats where some are missing: fill them"
            raise ConfigError(
                f"takes one whole number as {name!r}; there is {_described(spec)}"
                f"{gaps if are_floats else ''}"
            )
    if sorted([*fixed, *growing]) != sorted(spec.shape):
        wanted = ", ".join(f"{name}: COUNT" for name in spec.shape)
        also = f" where tables ({tables!r}) has no {{capacity: COUNT}}" if tables else ""
        raise ConfigError(f"rows: {rows!r} is not allowed; it has to be {{{wanted}}}{also}")
    return {
        name: growing[name] if name in growing else size(f"rows of {name}", fixed[name])
        for name in spec.shape
    }


def _described(spec: InputSpec) -> str:
    if not isinstance(spec.shape, Mapping):
        return f"one, {spec.dtype} of shape {tuple(spec.shape)}"
    assert isinstance(spec.dtype, Mapping)
    return ", ".join(f"{n} ({spec.dtype[n]} of shape {tuple(s)})" for n, s in spec.shape.items())

"""Recommender of two towers that finds and ranks: vectors for a search, and the chance of a click.

Both towers look their id up in a table that grows (`trainer.models.embedding_table`), and so what
else is known of it, such as the segment of a user: an id without a row of its own is judged by that
alone. Two losses train them together:

    click        binary cross entropy of the logit, which the task `recommendation` has: the dot
                 product of both vectors and a small network of them
    retrieval    of each click the softmax over the items of all examples of the batch, by the dot
                 products of vectors. Items are in a batch as often as they are popular, which is
                 taken out again: scores are less by the logarithm of how often they are shown (Yi
                 et al. 2019, "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item
                 Recommendations"). Where that comes from is a feature, `popularity`: how often an
                 item was shown the day before. It is an input of the item's tower as well, so that
                 a new item is known to be one

The last number of an item's vector is how much all like it, that of a user's is 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from trainer.errors import ConfigError, nearest
from trainer.models.embedding_table import growing
from trainer.models.spec import InputSpec, size, sizes

_ANSWER = "answer"
_NEVER = -1e9


@keras.saving.register_keras_serializable(package="flotilla")
class FoundAndRanked(keras.layers.Layer):
    """The outputs of the task `recommendation`, and the loss of their vectors."""

    def __init__(self, retrieval: float, item: str, popularity: str = "", **kwargs: Any) -> None:
        """Take the weight of the loss, and the features that it reads."""
        super().__init__(**{**kwargs, "dtype": "float32"})
        self.retrieval, self.item, self.popularity = retrieval, item, popularity

    def call(self, given: Sequence[Any]) -> Any:
        """Return [n, 1 + 2 size] of the logit and the vectors of user and item."""
        return keras.ops.concatenate(list(given), axis=1)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the layer, for saving."""
        own = {"retrieval": self.retrieval, "item": self.item, "popularity": self.popularity}
        return {**super().get_config(), **own}

    def loss(self, x: Mapping[str, Any], y: Any, outputs: Any, weights: Any) -> tf.Tensor:
        """Return the weighted mean of the softmax loss over the clicks of a batch."""
        width = (outputs.shape[-1] - 1) // 2
        users, items = outputs[:, 1 : 1 + width], outputs[:, 1 + width :]
        scores = tf.matmul(users, items, transpose_b=True)
        if self.popularity:
            # Their number is unknown, and would be the same for all.
            scores -= _logarithm(x[self.popularity])[tf.newaxis]
        ids = x[self.item]
        same = tf.equal(ids[:, tf.newaxis], ids[tf.newaxis])
        own = tf.eye(tf.shape(ids)[0], dtype=tf.bool)
        # The same item shown to someone else is no other item.
        scores = tf.where(same & ~own, _NEVER, scores)
        each = tf.reduce_logsumexp(scores, axis=1) - tf.linalg.diag_part(scores)
        clicks = tf.cast(tf.reshape(y, [-1]), tf.float32)
        if weights is not None:
            clicks *= tf.cast(tf.reshape(weights, [-1]), tf.float32)
        return self.retrieval * tf.math.divide_no_nan(
            tf.reduce_sum(clicks * each), tf.reduce_sum(clicks)
        )


@keras.saving.register_keras_serializable(package="flotilla")
class Recommender(keras.Model):
    """A model whose last layer is `FoundAndRanked`."""

    # As that of Keras's own functional models, so that it is saved as one of them.
    def __init__(self, inputs: Any, outputs: Any, name: str | None = None, **kwargs: Any) -> None:
        """Take symbolic inputs and outputs."""
        super().__init__(inputs, outputs, name=name, **kwargs)

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        """Return the loss of the task and that of the vectors."""
        of_task = super().compute_loss(
            x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training
        )
        return of_task + self.get_layer(_ANSWER).loss(x, y, y_pred, sample_weight)


# Each one is a key of `model.args`.
def two_tower_ranker(  # noqa: PLR0913
    spec: InputSpec,
    *,
    tables: Mapping[str, Mapping[str, Any]] | None = None,
    user: str = "user",
    item: str = "item",
    user_attributes: Sequence[str] = (),
    item_attributes: Sequence[str] = (),
    popularity: str = "",
    dimension: int = 16,
    hidden_units: Sequence[int] = (),
    ranking_units: Sequence[int] = (32,),
    shards: int = 2,
    retrieval: float = 1.0,
) -> keras.Model:
    """Return the logit and both vectors of pairs, as the task `recommendation` takes them.

    Args:
        spec: an id of a user, one of an item, and what else is named below: whole numbers or texts.
        tables: of each id and attribute, by its feature, what `EmbeddingTable` takes: `capacity`,
            and where wanted `min_count`, `min_age`, `max_age`, `shards` and `initializer`.
        user: the feature that is the id of a user.
        item: the feature that is the id of an item.
        user_attributes: features that say more of a user, each looked up in a table of its own.
        item_attributes: those of an item.
        popularity: feature of how often an item was shown before, NaN for never; empty for none.
        dimension: of a row, and of a tower's vector but for its last number.
        hidden_units: ReLU layers of each tower.
        ranking_units: ReLU layers of the network of both vectors.
        shards: that each table is split over: one for each parameter server.
        retrieval: weight of the loss of the search; 0 for none.
    """
    names = {user: _names("user_attributes", user, user_attributes)}
    names[item] = _names("item_attributes", item, item_attributes)
    _check(spec, tables, [*names[user], *names[item]], popularity)
    dimension, shards = size("dimension", dimension), size("shards", shards)
    given = spec.symbols()

    def rows(name: str) -> Any:
        return growing(spec, name, dimension, (tables or {})[name], shards)(given[name])

    known = {side: [rows(name) for name in of_side] for side, of_side in names.items()}
    if popularity:
        known[item].append(_logarithm(_column(given[popularity])))
    joined = {side: _joined(side, parts) for side, parts in known.items()}
    vectors = [_tower(side, x, hidden_units, dimension) for side, x in joined.items()]
    answer = FoundAndRanked(_weight(retrieval), item, popularity, name=_ANSWER)
    parts = _parts(vectors, joined[user], joined[item], ranking_units)
    return Recommender(given, answer(parts), name="two_tower_ranker")


def _column(popularity: Any) -> Any:
    return keras.layers.Reshape((1,), name="popularity")(popularity)


def _logarithm(popularity: Any) -> Any:
    """Return its logarithm; one that is missing is that of an item which was never shown."""
    count = keras.ops.nan_to_num(keras.ops.cast(popularity, "float32"))
    return keras.ops.log1p(keras.ops.maximum(count, 0))


def _joined(side: str, known: list[Any]) -> Any:
    if len(known) == 1:
        return known[0]
    return keras.layers.Concatenate(name=f"{side}_known")(known)


def _parts(vectors: list[Any], of_user: Any, of_item: Any, units: Sequence[int]) -> list[Any]:
    """Return the logit, and both vectors with their last number."""
    match = keras.layers.Dot(axes=1, name="match")(vectors)
    x = keras.layers.Concatenate(name="both")([*vectors, of_user, of_item])
    for index, width in enumerate(sizes("ranking_units", units)):
        x = keras.layers.Dense(width, activation="relu", name=f"ranking_{index}")(x)
    logit = keras.layers.Add(name="logit")([match, keras.layers.Dense(1, name="ranking")(x)])
    liked = keras.layers.Dense(1, name="liked")(of_item)
    ends = zip(vectors, (keras.ops.ones_like(liked), liked), strict=True)
    return [logit, *(keras.ops.concatenate(each, axis=1) for each in ends)]


def _tower(name: str, x: Any, hidden_units: Sequence[int], dimension: int) -> Any:
    for index, units in enumerate(sizes("hidden_units", hidden_units)):
        x = keras.layers.Dense(units, activation="relu", name=f"{name}_hidden_{index}")(x)
    return keras.layers.Dense(dimension, name=f"{name}_vector")(x)


def _names(argument: str, of: str, value: Any) -> list[str]:
    """Return the features that are known of users, or of items: the id first."""
    if isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
        return [of, *value]
    raise ConfigError(f"{argument}: {value!r} is not allowed; it has to be a list of features")


def _weight(retrieval: float) -> float:
    if type(retrieval) not in (int, float) or not 0 <= retrieval < float("inf"):
        raise ConfigError(f"retrieval: {retrieval!r} is not allowed; it has to be 0 or more")
    return float(retrieval)


def _check(
    spec: InputSpec,
    tables: Mapping[str, Mapping[str, Any]] | None,
    looked_up: Sequence[str],
    popularity: str,
) -> None:
    """Refuse features that are not there, that are not used, or that have no table."""
    wanted = [*looked_up, *filter(None, [popularity])]
    if twice := [name for name, count in Counter(wanted).items() if count > 1]:
        raise ConfigError(
            f"{twice[0]!r} is named twice; a feature is an id, an attribute, or the popularity"
        )
    if not isinstance(spec.shape, Mapping) or not isinstance(spec.dtype, Mapping):
        raise ConfigError(f"takes {', '.join(wanted)}; set data.inputs to them")
    for name in wanted:
        if name not in spec.shape:
            hint = nearest(name, spec.shape) or f" (the inputs are {', '.join(spec.shape)})"
            raise ConfigError(f"there is no input {name!r}{hint}")
        if tuple(spec.shape[name]):
            what = f"{spec.dtype[name]} of shape {tuple(spec.shape[name])}"
            raise ConfigError(f"takes one value as {name!r}; it is {what}")
    if others := [name for name in spec.shape if name not in wanted]:
        raise ConfigError(
            f"it does not take the input {others[0]!r}: name it in user_attributes or "
            "item_attributes, or leave it out of data.inputs"
        )
    if popularity and spec.dtype[popularity] in {"string", "bool"}:
        raise ConfigError(f"popularity: {popularity!r} is {spec.dtype[popularity]} and no number")
    if not isinstance(tables, Mapping) or tables.keys() != set(looked_up):
        each = ", ".join(f"{name}: {{capacity: COUNT}}" for name in looked_up)
        raise ConfigError(f"tables: {tables!r} is not allowed; it has to be {{{each}}}")

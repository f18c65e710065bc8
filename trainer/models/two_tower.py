"""Two-tower recommenders, which score pairs of a user and an item.

Each tower looks up the row of an id in a table, and computes a vector from the row (Covington et
al. 2016, "Deep Neural Networks for YouTube Recommendations", in the form of Yi et al. 2019,
"Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations"). There are two
models.

`two_tower` returns a score: the dot product of both vectors, plus a bias that represents the
popularity of the item and the activity of the user.

`two_tower_ranker` retrieves and ranks: it returns vectors for a search, and the logit of a click.
Its towers also use attributes, such as a user's segment. Ids without a row share a default row, so
only their attributes distinguish them. The last element of an item's vector is a learned popularity
score; the last element of a user's vector is 1. The model is trained with two losses:

    click        the binary cross entropy of the logit, from the task `recommendation`. The logit
                 is the dot product of both vectors, plus the output of a small network
    retrieval    for each click, a softmax over the items of the whole batch, with the dot products
                 of the vectors as scores. Popular items are sampled more often, which is corrected
                 by subtracting the logarithm of the popularity from the scores. The feature
                 `popularity` is the number of times an item was shown, for example on the previous
                 day. It is also an input of the item's tower, so that the tower recognizes new
                 items
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from flotilla.trainer.config.model import require_table
from flotilla.trainer.embeddings.embedding_table import EmbeddingTable, advise_type
from flotilla.trainer.embeddings.sharded_embedding import UNKNOWN, ShardedEmbedding
from flotilla.trainer.models.spec import InputSpec, initializer, layer_name, size, sizes
from flotilla.trainer.runtime.errors import ConfigError, nearest

# The fraction of the distinct strings that must have a row. It is below 1 because the number of
# distinct strings is an estimate.
_NEARLY = 0.95
# A table of integer ids has a row for each id up to the largest. The largest id must be below
# `_MOST_ROWS`, or below `_SPARSE` times the number of distinct ids.
_MOST_ROWS, _SPARSE = 1_000_000, 10
TOWERS = 2
CLASSES = 2


# Each argument is a key of `model.args`.
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
    """Return a model whose output is the score of two ids, or `[0, score]` for two classes.

    Args:
        spec: two ids as inputs, and one or two logits as output.
        rows: for each input, the number of rows in its table, which must exceed its largest id.
            If neither `rows` nor `tables` is given, the sizes of the tables are derived from the
            training split, ids may be strings, and unknown ids share one row.
        tables: for each feature with a growing table, `EmbeddingTable` arguments: `capacity`, and
            optionally `min_count`, `min_age`, `max_age`, `shards` and `initializer`. Ids in growing
            tables may be any integers or strings.
        dimension: the size of a row, and of a tower's vector.
        hidden_units: the sizes of the ReLU layers in each tower.
        shards: the number of variables per table, which may be on different servers.
        unknown: how to treat an id outside of its table: "error", or "wrap" for `id mod rows`.
    """
    tables_of = _tables(spec, rows, tables)
    dimension, shards = size("dimension", dimension), size("shards", shards)
    if unknown not in UNKNOWN:
        raise ConfigError(f"unknown: {unknown!r} is not one of {', '.join(UNKNOWN)}")
    given = spec.symbols()
    found = {}
    for name, wanted in tables_of.items():
        ids, of_name = given[name], wanted
        if of_name is None:
            ids, of_name = _number_rows(spec, name, ids)
        if isinstance(of_name, int):
            own = {"unknown": unknown, "name": layer_name(name, "embedding")}
            layer: Any = ShardedEmbedding(of_name, dimension, shards=min(shards, of_name), **own)
        else:
            layer = growing_table(spec, name, dimension, of_name, shards)
        found[name] = layer(ids)
    _, match = _match_sides(found, hidden_units, dimension)
    both = keras.layers.Concatenate(name="both")(list(found.values()))
    bias = keras.layers.Dense(1, name="bias")(both)
    score = keras.layers.Add(dtype="float32", name="score")([match, bias])
    # For two classes, add a logit of 0 for the first: softmax([0, x])[1] equals sigmoid(x).
    logits = score if spec.num_classes == 1 else keras.ops.pad(score, [[0, 0], [1, 0]])
    return keras.Model(given, logits, name="two_tower")


def growing_table(
    spec: InputSpec, name: str, dimension: int, arguments: Mapping[str, Any], shards: int = 2
) -> EmbeddingTable:
    """Return the growing table of an input feature. Its ids have the type of the feature.

    `arguments` come from a configuration, and may override `shards`.

    Raises:
        ConfigError: an argument is unknown, or the feature cannot be an id.
    """
    try:
        require_table(name, arguments)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    dtype = spec.dtype[name] if isinstance(spec.dtype, Mapping) else spec.dtype
    if dtype != "string" and ("int" not in dtype or dtype == "uint64"):
        raise ConfigError(
            f"tables.{name}: ids must be 64-bit whole numbers or strings, but {name!r} is "
            f"{dtype}{advise_type(dtype)}"
        )
    drawn = initializer(f"tables.{name}.initializer", arguments.get("initializer", "uniform"))
    try:
        return EmbeddingTable(
            dimension=dimension,
            keys="string" if dtype == "string" else "int64",
            name=layer_name(name, "embedding"),
            **{"shards": shards, **arguments, "initializer": drawn},
        )
    except ValueError as error:
        raise ConfigError(f"tables.{name}.{error}") from None


def _match_sides(
    sides: Mapping[str, Any], hidden_units: Sequence[int], dimension: int
) -> tuple[list[Any], Any]:
    vectors = []
    for side, known in sides.items():
        x = _hidden("hidden_units", hidden_units, known, layer_name(side, "hidden"))
        vectors.append(keras.layers.Dense(dimension, name=layer_name(side, "vector"))(x))
    return vectors, keras.layers.Dot(axes=1, name="match")(vectors)


def _hidden(argument: str, units: Sequence[int], x: Any, name: str) -> Any:
    for index, width in enumerate(sizes(argument, units)):
        x = keras.layers.Dense(width, activation="relu", name=f"{name}_{index}")(x)
    return x


def _tables(
    spec: InputSpec, rows: Mapping[str, int] | None, tables: Mapping[str, Mapping[str, Any]] | None
) -> dict[str, int | Mapping[str, Any] | None]:
    """For each input feature, return the number of rows, its growing table's arguments, or None."""
    if spec.num_classes not in {1, CLASSES}:
        of_rating = "".join(
            f"; set data.types: {{{name}: float}} if it is a rating" for name in spec.targets
        )
        raise ConfigError(
            f"the model needs {CLASSES} classes, but the dataset has {spec.num_classes}{of_rating}"
        )
    if not isinstance(spec.shape, Mapping) or len(spec.shape) != TOWERS:
        raise ConfigError(
            f"the model needs {TOWERS} input features, but the dataset has {_describe_inputs(spec)}"
            "; set data.inputs: [USER, ITEM]"
        )
    assert isinstance(spec.dtype, Mapping)
    fixed = rows if isinstance(rows, Mapping) else {}
    growing = tables if isinstance(tables, Mapping) else {}
    sized = not rows and not tables
    for name, shape in spec.shape.items():
        may_be_text = name in growing or (sized and spec.dtype[name] == "string")
        if tuple(shape) or (not may_be_text and "int" not in spec.dtype[name]):
            are_floats = not tuple(shape) and "float" in spec.dtype[name]
            gaps = "; whole numbers are read as floats if some are missing: fill the missing values"
            raise ConfigError(
                f"the model needs one whole number as {name!r}, but the dataset has "
                f"{_describe_inputs(spec)}{gaps if are_floats else ''}"
            )
    if sized:
        return dict.fromkeys(spec.shape)
    if sorted([*fixed, *growing]) != sorted(spec.shape):
        wanted = ", ".join(f"{name}: COUNT" for name in spec.shape)
        also = f", except for features with a capacity in tables ({tables!r})" if tables else ""
        raise ConfigError(f"rows: {rows!r} is not allowed; it must be {{{wanted}}}{also}")
    return {
        name: growing[name] if name in growing else size(f"rows of {name}", fixed[name])
        for name in spec.shape
    }


def _number_rows(spec: InputSpec, name: str, ids: Any) -> tuple[Any, int]:
    """Convert ids to row numbers by the training statistics. Return them and the number of rows."""
    known = spec.statistics(name)
    if ids.dtype == "string":
        vocabulary = spec.vocabulary(name)
        if len(vocabulary.values) < _NEARLY * known.distinct:
            raise ConfigError(
                f"{name!r} has about {known.distinct} values, but data.vocabulary keeps only "
                f"{len(vocabulary.values)} of them; set data.vocabulary to {known.distinct} or "
                "more, or set tables"
            )
        return vocabulary(ids), vocabulary.size
    most = int(known.most or 0)
    if most >= max(_MOST_ROWS, _SPARSE * known.distinct):
        raise ConfigError(
            f"{name!r} has ids up to {most}, but only about {known.distinct} different ones; set "
            f"data.types: {{{name}: text}}, or set tables"
        )
    is_known = keras.ops.logical_and(ids >= 0, ids <= most)
    return keras.ops.where(is_known, ids, keras.ops.full_like(ids, most + 1)), most + 2


def _describe_inputs(spec: InputSpec) -> str:
    if not isinstance(spec.shape, Mapping):
        return f"one, {spec.dtype} of shape {tuple(spec.shape)}"
    assert isinstance(spec.dtype, Mapping)
    return ", ".join(f"{n} ({spec.dtype[n]} of shape {tuple(s)})" for n, s in spec.shape.items())


_ANSWER = "answer"
_NEVER = -1e9


@keras.saving.register_keras_serializable(package="flotilla")
class FoundAndRanked(keras.layers.Layer):
    """Joins the outputs of the task `recommendation`, and computes the retrieval loss."""

    def __init__(self, retrieval: float, item: str, popularity: str = "", **kwargs: Any) -> None:
        """Store the weight of the retrieval loss, and the names of the features that it uses."""
        super().__init__(**{**kwargs, "dtype": "float32"})
        self.retrieval, self.item, self.popularity = retrieval, item, popularity

    def call(self, given: Sequence[Any]) -> Any:
        """Return the logit, the user's vector and the item's vector [n, 1 + 2 size]."""
        return keras.ops.concatenate(list(given), axis=1)

    #: This method replaces the layer in Keras files, which must not need code of this package.
    plain = call

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the layer, for saving."""
        own = {"retrieval": self.retrieval, "item": self.item, "popularity": self.popularity}
        return {**super().get_config(), **own}

    def loss(self, x: Mapping[str, Any], y: Any, outputs: Any, weights: Any) -> tf.Tensor:
        """Return the retrieval loss: the weighted mean of a softmax loss over a batch's clicks."""
        width = (outputs.shape[-1] - 1) // 2
        users, items = outputs[:, 1 : 1 + width], outputs[:, 1 + width :]
        scores = tf.matmul(users, items, transpose_b=True)
        if self.popularity:
            # Counts need not be divided by their sum: a constant factor cancels out in the softmax.
            scores -= _logarithm(x[self.popularity])[tf.newaxis]
        ids = x[self.item]
        same = tf.equal(ids[:, tf.newaxis], ids[tf.newaxis])
        own = tf.eye(tf.shape(ids)[0], dtype=tf.bool)
        # If the same item was shown to another user, it is not a negative example.
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
    """A functional model whose last layer is `FoundAndRanked`."""

    # Keras saves a subclass as a functional model only if `__init__` has these arguments.
    def __init__(self, inputs: Any, outputs: Any, name: str | None = None, **kwargs: Any) -> None:
        """Create the model from symbolic inputs and outputs."""
        super().__init__(inputs, outputs, name=name, **kwargs)

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        """Return the sum of the task's loss and the retrieval loss."""
        of_task = super().compute_loss(
            x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training
        )
        return of_task + self.get_layer(_ANSWER).loss(x, y, y_pred, sample_weight)


# Each argument is a key of `model.args`.
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
    """Return a model that outputs the logit and both vectors, for the task `recommendation`.

    Args:
        spec: inputs that are ids and attributes of users and items, integers or strings.
        tables: for each id or attribute feature, `EmbeddingTable` arguments: `capacity`, and
            optionally `min_count`, `min_age`, `max_age`, `shards` and `initializer`.
        user: the feature with the id of the user.
        item: the feature with the id of the item.
        user_attributes: other features of the user, each with its own table.
        item_attributes: other features of the item, each with its own table.
        popularity: the feature with the number of times the item was shown (NaN for 0), or empty.
        dimension: the size of a row, and of a tower's vector without its last element.
        hidden_units: the sizes of the ReLU layers in each tower.
        ranking_units: the sizes of the ReLU layers in the network on both vectors.
        shards: the number of variables per table, which may be on different servers.
        retrieval: the weight of the retrieval loss. 0 disables it.
    """
    names = {user: _names("user_attributes", user, user_attributes)}
    names[item] = _names("item_attributes", item, item_attributes)
    _check(spec, tables, [*names[user], *names[item]], popularity)
    dimension, shards = size("dimension", dimension), size("shards", shards)
    given, of = spec.symbols(), tables or {}
    known = {
        side: [growing_table(spec, one, dimension, of[one], shards)(given[one]) for one in of_side]
        for side, of_side in names.items()
    }
    if popularity:
        column = keras.layers.Reshape((1,), name="popularity")(given[popularity])
        known[item].append(_logarithm(column))
    joined = {side: _join(side, parts) for side, parts in known.items()}
    vectors, match = _match_sides(joined, hidden_units, dimension)
    answer = FoundAndRanked(_weight(retrieval), item, popularity, name=_ANSWER)
    parts = _parts(vectors, match, joined[user], joined[item], ranking_units)
    return Recommender(given, answer(parts), name="two_tower_ranker")


def _join(side: str, known: list[Any]) -> Any:
    if len(known) == 1:
        return known[0]
    return keras.layers.Concatenate(name=layer_name(side, "known"))(known)


def _parts(
    vectors: list[Any], match: Any, of_user: Any, of_item: Any, units: Sequence[int]
) -> list[Any]:
    x = keras.layers.Concatenate(name="both")([*vectors, of_user, of_item])
    x = _hidden("ranking_units", units, x, "ranking")
    logit = keras.layers.Add(name="logit")([match, keras.layers.Dense(1, name="ranking")(x)])
    liked = keras.layers.Dense(1, name="liked")(of_item)
    ends = zip(vectors, (keras.ops.ones_like(liked), liked), strict=True)
    return [logit, *(keras.ops.concatenate(each, axis=1) for each in ends)]


def _logarithm(popularity: Any) -> Any:
    """Return log(1 + popularity). A missing value means that the item was never shown."""
    count = keras.ops.nan_to_num(keras.ops.cast(popularity, "float32"))
    return keras.ops.log1p(keras.ops.maximum(count, 0))


def _names(argument: str, of: str, value: Any) -> list[str]:
    if isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
        return [of, *value]
    raise ConfigError(f"{argument}: {value!r} is not allowed; it must be a list of features")


def _weight(retrieval: float) -> float:
    if type(retrieval) not in (int, float) or not 0 <= retrieval < float("inf"):
        raise ConfigError(f"retrieval: {retrieval!r} is not allowed; it must be 0 or more")
    return float(retrieval)


def _check(
    spec: InputSpec,
    tables: Mapping[str, Mapping[str, Any]] | None,
    looked_up: Sequence[str],
    popularity: str,
) -> None:
    wanted = [*looked_up, *filter(None, [popularity])]
    if twice := [name for name, count in Counter(wanted).items() if count > 1]:
        raise ConfigError(
            f"{twice[0]!r} is named twice; a feature can be only one of id, attribute and "
            "popularity"
        )
    if not isinstance(spec.shape, Mapping) or not isinstance(spec.dtype, Mapping):
        raise ConfigError(f"the model needs several inputs; set data.inputs: [{', '.join(wanted)}]")
    for name in wanted:
        if name not in spec.shape:
            hint = nearest(name, spec.shape) or f" (the inputs are {', '.join(spec.shape)})"
            raise ConfigError(f"there is no input {name!r}{hint}")
        if tuple(spec.shape[name]):
            what = f"{spec.dtype[name]} of shape {tuple(spec.shape[name])}"
            raise ConfigError(f"{name!r} must have one value per example, but is {what}")
    if others := [name for name in spec.shape if name not in wanted]:
        raise ConfigError(
            f"the model does not use the input {others[0]!r}; add it to user_attributes or "
            "item_attributes, or remove it from data.inputs"
        )
    if popularity and spec.dtype[popularity] in {"string", "bool"}:
        raise ConfigError(f"popularity: {popularity!r} is {spec.dtype[popularity]}, not a number")
    if not isinstance(tables, Mapping) or tables.keys() != set(looked_up):
        each = ", ".join(f"{name}: {{capacity: COUNT}}" for name in looked_up)
        raise ConfigError(f"tables: {tables!r} is not allowed; it must be {{{each}}}")

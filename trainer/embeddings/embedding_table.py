"""An embedding that grows: ids of 64 bits or texts as they are, without a vocabulary beforehand.

An id gets a row of its own when training has seen it `min_count` times, as long as there is one:
`capacity` says how many there are. When all are given out, those that were not used for longest
are given to others; rows that were not used for `max_age` steps are given up before. No two ids
ever share a row, but the one of all ids without: it is trained by those that training turns away,
and what an unknown id gets in evaluation and in the exported model. It begins with zeros.

Ids are split over shards by their hash, each of which is on one server (`table_shard`); rows are
variables, of which a gradient touches those of its batch only, so that every optimizer works.

A text is known by two fingerprints of 63 bits: the first finds its row, the second proves it. Of n
texts two have the same first by a chance of n^2 / 2^64 (of a hundred million, one in two thousand);
the later one of the two then has no row.

XLA cannot compile it. What is exported has the rows that are used, and needs no code.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from flotilla.trainer.config.model import MIN_AGE, require_sizes
from flotilla.trainer.embeddings import table_shard
from flotilla.trainer.embeddings.count_min_sketch import hash_keys, size_sketch
from flotilla.trainer.embeddings.fingerprints import FINGERPRINTS, strip_spaces
from flotilla.trainer.embeddings.sharded_embedding import table_of
from flotilla.trainer.embeddings.shared_branch import SharedBranch
from flotilla.trainer.embeddings.table_shard import Asked, Noted, Rules, Shard
from flotilla.trainer.embeddings.unique_rows import spread
from flotilla.trainer.runtime.errors import ConfigError

KEYS = ("int64", "string")
# Of SipHash, which gives the fingerprint that proves a text.
_SIP_KEY = [0x466C6F74, 0x696C6C61]
_SHARD_SALT = 2**50
# Of a checkpoint: what counts ids that have no row yet, in this form and in an earlier one.
_COUNTING = re.compile(r"/shard_[0-9]+_(sieve|seen)$")
# Strategies of which each replica has all variables.
_COPIES = (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy)
# What draws new rows, by the initializer without its seed.
_DRAWS: dict[object, Any] = {}
_log = logging.getLogger(__name__)


@keras.saving.register_keras_serializable(package="flotilla")
class EmbeddingTable(keras.layers.Layer):
    """Ids of any shape to their rows: `[...]` to `[..., dimension]`."""

    #: Strategies leave the variables of such a layer on their servers, and do not pull them whole.
    looks_up = True
    #: A strategy calls `connect` and `restored`, and keeps what is in `together` on one server.
    grows = True

    # Each one is a key of the configuration.
    def __init__(  # noqa: PLR0913
        self,
        capacity: int,
        dimension: int,
        *,
        keys: str = "int64",
        shards: int = 2,
        min_count: int = 1,
        min_age: int = MIN_AGE,
        max_age: int = 0,
        initializer: Any = "uniform",
        **kwargs: Any,
    ) -> None:
        """Describe the table; its variables are made by `build`.

        Args:
            capacity: most rows, over all shards. Memory for all of them is taken at the beginning.
            dimension: of a row.
            keys: what ids are: "int64" (or a smaller whole number), or "string".
            shards: that the rows are split over. Part of the model and not of the cluster: a
                checkpoint fits only the same number. More than there are servers is no harm.
            min_count: how often training has to see an id before it gets a row, up to 255.
            min_age: steps without use before a row may be given to another id, as gradients of it
                may be on their way: more than there are workers.
            max_age: steps without use after which a row is given up; 0: only when room is needed.
            initializer: of new rows, without regard to how many there are.
            **kwargs: of a Keras layer.

        Raises:
            ValueError: a number is too small or too large, or another word for `keys`.
        """
        super().__init__(**kwargs)
        sizes = {"capacity": capacity, "dimension": dimension, "shards": shards}
        ages = {"min_count": min_count, "min_age": min_age, "max_age": max_age}
        require_sizes({**sizes, **ages})
        if keys not in KEYS:
            raise ValueError(f"keys: {keys!r} is not one of {', '.join(KEYS)}")
        self.capacity, self.dimension, self.keys, self.shards = capacity, dimension, keys, shards
        self.min_count, self.min_age, self.max_age = min_count, min_age, max_age
        self.initializer = keras.initializers.get(initializer)
        self._draw, self._seed = _draw_of(self.initializer, dimension)
        self.supports_jit = self._is_sorted = False
        self._parts: list[Shard] = []

    def build(self, _input_shape: Any) -> None:
        """Make the shards.

        Raises:
            ConfigError: in the scope of a strategy whose replicas have copies of variables.
        """
        if isinstance(tf.distribute.get_strategy(), _COPIES):
            raise ConfigError(
                f"training.strategy: each GPU or worker would have a copy of {self.name}, a table "
                "that grows, and these grow apart; take one with parameter servers, or one GPU"
            )
        rules = Rules(min_count=self.min_count, min_age=self.min_age, max_age=self.max_age)
        size = -(-self.capacity // self.shards)
        made = partial(Shard, capacity=size, rules=rules, draw=self._draw, branch=SharedBranch())
        self._parts = [
            made(self._noted(n, size), number=self._seed + (n << 32)) for n in range(self.shards)
        ]

    def _noted(self, number: int, size: int) -> Noted:
        def note(name: str, shape: tuple[int, ...], initializer: str, dtype: str = "int64") -> Any:
            # Keras has no initializer of -1.
            return self.add_weight(
                name=f"shard_{number}_{name}",
                shape=shape,
                dtype=dtype,
                initializer=initializer if initializer == "zeros" else _minus_one,
                trainable=False,
            )

        rows = self.add_weight(
            name=f"shard_{number}_rows",
            shape=(size + 1, self.dimension),
            initializer="zeros",
            # A cast would read the whole shard.
            autocast=False,
        )
        has_filter, is_text = self.min_count > 1, self.keys == "string"
        return Noted(
            rows=rows,
            ids=note("ids", (size + 1,), "zeros"),
            used=note("used", (size + 1,), "minus_one"),
            tally=note("tally", (table_shard.COUNTS,), "zeros"),
            checks=note("checks", (size + 1,), "zeros") if is_text else None,
            seen=note("sieve", size_sketch(size), "zeros", "uint8") if has_filter else None,
        )

    def call(self, ids: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        """Return the rows of `ids`, in the layer's compute type; in training new ones get some."""
        self._require_type(ids.dtype)
        with tf.device("/device:CPU:0"):
            parts, places, asked = self._split(tf.reshape(ids, [-1]))
        admits = bool(training) and self.trainable and not self._is_sorted
        step = self._step(ids) if admits else None
        found = [
            self._rows_of(shard, each, step, admits=admits)
            for shard, each in zip(self._parts, asked, strict=True)
        ]
        unique = tf.dynamic_stitch(parts, found)
        rows = tf.reshape(spread(unique, places), tf.concat([tf.shape(ids), [self.dimension]], 0))
        rows.set_shape([*ids.shape, self.dimension])
        return tf.cast(rows, self.compute_dtype)

    def _split(self, ids: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor, list[Asked]]:
        """Return the places of each shard's ids among the unique ones, those of all, and the ids.

        Each id is sent once, however often the batch contains it; and Keras squares a gradient, in
        most optimizers, before it adds up what belongs to one row.
        """
        if self.keys == "string":
            unique, places, counts = tf.unique_with_counts(strip_spaces(ids))
            keys = tf.strings.to_hash_bucket_fast(unique, FINGERPRINTS)
            checks = tf.strings.to_hash_bucket_strong(unique, FINGERPRINTS, key=_SIP_KEY)
        else:
            keys, places, counts = tf.unique_with_counts(tf.cast(ids, tf.int64))
            checks = tf.zeros([0], tf.int64)
        shard_of = tf.cast(hash_keys(keys + _SHARD_SALT, self.shards), tf.int32)
        parts = tf.dynamic_partition(tf.range(tf.size(keys)), shard_of, self.shards)
        asked = [
            Asked(
                keys=tf.gather(keys, part),
                checks=tf.gather(checks, part) if self.keys == "string" else checks,
                counts=tf.gather(counts, part),
            )
            for part in parts
        ]
        return parts, places, asked

    def _step(self, ids: tf.Tensor) -> tf.Tensor | None:
        """Return the count of steps as it is when `ids` are there, where a strategy has one."""
        steps = self._parts[0].steps
        if steps is None:
            return None
        # It would be read otherwise while the input still waits for its batch.
        with tf.control_dependencies([ids]), tf.device(steps.device):
            return steps.read_value()

    def _rows_of(
        self, shard: Shard, asked: Asked, step: tf.Tensor | None, *, admits: bool
    ) -> tf.Tensor:
        rows = shard.noted.rows
        if self._is_sorted:
            return tf.gather(rows.value, shard.found_sorted(asked))
        with tf.device(shard.device):
            slots = shard.admitted(asked, step) if admits and rows.trainable else shard.found(asked)
            return tf.gather(rows.value, slots)

    def compute_output_spec(self, ids: Any, training: bool | None = None) -> keras.KerasTensor:
        """Return type and shape of the rows."""
        del training
        self._require_type(ids.dtype)
        return keras.KerasTensor((*ids.shape, self.dimension), self.compute_dtype)

    def plain(self, ids: Any) -> Any:
        """Return the same of a symbolic tensor, of a table that was shrunk.

        Lookups of Keras's own find the rows, before which are those of all ids without one.
        """
        live = [np.flatnonzero(each.noted.used.numpy() >= 0) for each in self._parts]
        keys, proof = keras.ops.cast(ids, "int64") if self.keys != "string" else ids, None
        if self.keys == "string":
            made = partial(keras.layers.Hashing, FINGERPRINTS, dtype="int64")
            keys = made(name=f"{self.name}_key")(ids)
            proof = made(salt=_SIP_KEY, name=f"{self.name}_check")(ids)
        places = keras.ops.zeros_like(keys)
        if any(map(len, live)):
            places = self._looked_up("ids", live)(keys)
        if proof is not None and any(map(len, live)):
            is_it = keras.ops.equal(places, self._looked_up("checks", live)(proof))
            places = keras.ops.where(is_it, places, keras.ops.zeros_like(places))
        shard = hash_keys(keys + _SHARD_SALT, self.shards)
        places = keras.ops.where(places > 0, places + (self.shards - 1), shard)
        rows = [each.noted.rows.numpy() for each in self._parts]
        known = [each[there] for each, there in zip(rows, live, strict=True)]
        return table_of(self, np.concatenate([*(each[-1:] for each in rows), *known]))(places)

    def _looked_up(self, noted: str, live: list[Any]) -> keras.layers.IntegerLookup:
        """Return a layer from what is noted of rows to their numbers from 1 on, else 0."""
        parts = [getattr(each.noted, noted).numpy() for each in self._parts]
        values = np.concatenate([each[there] for each, there in zip(parts, live, strict=True)])
        none = next(n for n in range(len(values) + 1) if n not in set(values.tolist()))
        return keras.layers.IntegerLookup(
            vocabulary=values.tolist(), oov_token=none, name=f"{self.name}_{noted}"
        )

    def _require_type(self, dtype: Any) -> None:
        name = tf.as_dtype(dtype).name
        fits = name == "string" if self.keys == "string" else "int" in name and name != "uint64"
        if not fits:
            wanted = "texts" if self.keys == "string" else "whole numbers of up to 64 bits"
            what = f"{self.name}: the ids of the table have to be {wanted}, not {name}"
            raise ValueError(what + advise_type(name))

    def connect(
        self, steps: tf.Variable, slots_of: Any, alike: EmbeddingTable | None = None
    ) -> None:
        """Take the counter of steps, and what an optimizer has for each variable of rows.

        `slots_of` returns pairs for a Keras variable: a slot of its shape, and the value of a new
        row there, or None for the row itself. `alike` is a table of the same model: what is traced
        for one shard serves all that are like it.
        """
        (first, *_) = (alike or self)._parts
        for shard in self._parts:
            shard.steps, shard.slots = steps, slots_of(shard.noted.rows)
            shard.branch = first.branch

    def restored(self, was_on: Callable[[str], bool] = lambda _device: True) -> None:
        """Find rows by the variables again: to be called when these were assigned, on a device."""
        for shard in self._parts:
            if was_on(shard.device):
                shard.restored()
                _recount(shard)

    def parts(self) -> list[Shard]:
        """Return the shards."""
        return list(self._parts)

    def together(self) -> list[list[tf.Variable]]:
        """Return the variables of each shard, which have to be on one server."""
        return [
            [
                *(each._value for each in (shard.noted.rows, *shard.noted.bookkeeping())),
                *shard.unsaved,
            ]
            for shard in self._parts
        ]

    def bookkeeping(self) -> list[keras.Variable]:
        """Return the state that no worker has to have: all of it that is not trained."""
        return [each for shard in self._parts for each in shard.noted.bookkeeping()]

    def metrics(self) -> dict[str, int]:
        """Return rows in use, rows given to other ids since the beginning, and ids without a row.

        An id without a row counts at each lookup of training.
        """
        tally = np.sum([shard.noted.tally.numpy() for shard in self._parts], axis=0)
        given, evicted = int(tally[table_shard.GIVEN]), int(tally[table_shard.EVICTED])
        away = int(tally[table_shard.TURNED_AWAY])
        return {"rows": given - evicted, "evicted": evicted, "turned_away": away}

    def shrink(self) -> None:
        """Become as small as the rows in use, to be exported; nothing is looked up otherwise."""
        live = []
        for shard in self._parts:
            there = np.flatnonzero(shard.noted.used.numpy()[: shard.capacity] >= 0)
            ids = shard.noted.ids.numpy()[there]
            live.append(there[np.argsort(ids, kind="stable")].tolist())
        size = max(1, *map(len, live))
        for shard, slots in zip(self._parts, live, strict=True):
            shard.shrink(slots, size)
        self.capacity = size * self.shards
        self._is_sorted = True
        if not any(map(len, live)):
            why = "it was frozen, or training never looked it up"
            if self.min_count > 1:
                why = f"training saw no id {self.min_count} times: lower min_count, or train longer"
            _log.warning("table %s has no row, so that all ids get one: %s", self.name, why)

    def load_own_variables(self, store: Any) -> None:
        """Take the values of a file; a sieve begins empty where the file has another form of it."""
        sieves = {id(shard.noted.seen) for shard in self._parts}
        values = {name: store[name] for name in store.keys()}  # noqa: SIM118
        for number, each in enumerate([*self._trainable_variables, *self._non_trainable_variables]):
            name = f"{number}"
            if id(each) in sieves and name in values and values[name].shape != each.shape:
                values[name] = each.numpy()
        super().load_own_variables(values)
        self.restored()

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the layer, for saving."""
        own = ("capacity", "dimension", "keys", "shards", "min_count", "min_age", "max_age")
        return {
            **super().get_config(),
            **{name: getattr(self, name) for name in own},
            "initializer": keras.initializers.serialize(self.initializer),
        }


def may_lack(path: str) -> bool:
    """Say whether a checkpoint of the same model may be without a variable of this path.

    That is the count of ids without a row, which then begins anew.
    """
    return bool(_COUNTING.search(path))


def shrink(model: keras.Model) -> None:
    """Make the tables of a model as small as their rows in use, before it is exported."""
    for layer in model._flatten_layers():
        if isinstance(layer, EmbeddingTable):
            layer.shrink()


def _recount(shard: Shard) -> None:
    """Make the count of rows what the rows are: those of a snapshot may be younger than it."""
    with tf.device(shard.device):
        tally = shard.noted.tally.value
        given, evicted = (
            tally.read_value()[each] for each in (table_shard.GIVEN, table_shard.EVICTED)
        )
        more = shard.capacity - shard.room.read_value() - (given - evicted)
        which = tf.where(more > 0, table_shard.GIVEN, table_shard.EVICTED)
        tally.assign_add(tf.abs(more) * tf.one_hot(which, table_shard.COUNTS, dtype=tf.int64))


def advise_type(dtype: str) -> str:
    """Return what to do where ids are floats; empty for another type."""
    if "float" not in dtype:
        return ""
    return (
        "; whole numbers are read as floats where some are missing or beyond 64 bits: fill them, "
        "or read texts (data.types)"
    )


def _minus_one(shape: Any, dtype: Any = None) -> tf.Tensor:
    return tf.fill(shape, tf.constant(-1, dtype))


class _Seed(keras.random.SeedGenerator):
    """A seed that is given: two numbers of a graph."""

    # Keras would make a variable.
    def __init__(self, seed: tf.Tensor) -> None:
        self._seed = seed

    def next(self, ordered: bool = True) -> tf.Tensor:  # noqa: ARG002
        """Return it."""
        return self._seed


def _draw_of(initializer: Any, dimension: int) -> tuple[Any, int]:
    """Return the function from a number, a count, and how many were drawn before, to new rows.

    With it comes the number of the first shard, which says the seed. Initializers that differ by
    their seeds alone have the same function.

    Raises:
        ValueError: the initializer has to know the whole table.
    """
    seed = getattr(initializer, "seed", None)
    first = seed if isinstance(seed, int) else 0
    make = partial(_drawing, initializer, dimension, has_seed=seed is not None)
    # One of the user's may depend on more than its `get_config` has, and an array is no text.
    with suppress(TypeError):
        if type(initializer).__module__.startswith("keras."):
            text = json.dumps({**initializer.get_config(), "seed": seed is not None})
            key = type(initializer), text, dimension
            if key not in _DRAWS:
                _DRAWS[key] = make()
            return _DRAWS[key], first
    return make(), first


def _drawing(initializer: Any, dimension: int, *, has_seed: bool) -> Any:
    def draw(number: tf.Tensor, count: Any, before: Any) -> tf.Tensor:
        drawn = initializer
        if has_seed:
            drawn = type(initializer).from_config(initializer.get_config())
            drawn.seed = _Seed(tf.stack([number, before]))
        return drawn((count, dimension), dtype="float32")

    try:
        with tf.Graph().as_default():
            draw(
                tf.constant(0, tf.int64),
                tf.compat.v1.placeholder(tf.int32, []),
                tf.constant(0, tf.int64),
            )
    except Exception as error:
        name = type(initializer).__name__
        raise ValueError(
            f"initializer: {name} needs the size of the whole table, and rows come one by one; "
            "take uniform, random_normal, truncated_normal, zeros or a constant"
        ) from error
    return draw

"""A dynamic embedding table: ids are 64-bit integers or strings, without a vocabulary.

An id gets one of `capacity` rows once training has seen it `min_count` times. When all rows are in
use, new ids get the least recently used ones. With a `max_age`, rows that were not used for that
many steps are evicted earlier. Two ids never share a row, except for ids without a row: those of
one shard share an extra row. This shared row starts with zeros and learns from the ids in training
that get no row. Unknown ids use it in evaluation and in the exported model.

A hash distributes the ids over shards, each of which is on one server (`table_shard`). Rows are
variables, and a gradient touches only the rows of its batch, so every optimizer works.

A string is identified by two fingerprints of 63 bits: the first one finds its row, and the second
one verifies it. The probability that two of n strings have the same first fingerprint is n^2 / 2^64
(for a hundred million strings, one in two thousand). In that case, the later string gets no row.

XLA cannot compile the lookup. An exported table contains only the rows in use and the shared rows,
and needs no custom code.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from flotilla.trainer.config.model import MIN_AGE, require_sizes
from flotilla.trainer.config.schema import Config
from flotilla.trainer.config.topology import find_topology
from flotilla.trainer.embeddings import hashes, table_shard
from flotilla.trainer.embeddings.hashes import FINGERPRINTS, hash_keys, strip_spaces
from flotilla.trainer.embeddings.sharded_embedding import make_embedding, spread
from flotilla.trainer.embeddings.table_shard import Asked, Noted, Rules, Shard, SharedBranch
from flotilla.trainer.runtime.errors import ConfigError

KEYS = ("int64", "string")
_SIP_KEY = [0x466C6F74, 0x696C6C61]
_SHARD_SALT = 2**50
# Paths of the variables that count ids without a row, in the current and in an earlier format.
_COUNTING = re.compile(r"/shard_[0-9]+_(sieve|seen)$")
#: The attribute that holds the initializer of a variable that was created without values.
BEGINS = "begins_by"
#: The end of a seed variable's path. The second number of a seed counts the draws.
SEED = "seed_generator_state"
# Strategies that keep a copy of all variables in each replica.
_COPIES = (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy)
# Functions that draw new rows, keyed by the initializer without its seed and the row length.
_DRAWS: dict[object, Any] = {}
_log = logging.getLogger(__name__)


@keras.saving.register_keras_serializable(package="flotilla")
class EmbeddingTable(keras.layers.Layer):
    """A layer from ids of any shape `[...]` to their rows `[..., dimension]`."""

    #: Strategies leave the variables on their servers instead of pulling them whole.
    looks_up = True

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
        """Store the arguments. `build` creates the variables.

        Args:
            capacity: the maximum number of rows over all shards. Their memory is allocated in
                advance.
            dimension: the length of a row.
            keys: the type of ids: "int64" (or a smaller integer), or "string".
            shards: the number of shards. It belongs to the model, not to the cluster, so a
                checkpoint can only be restored with the same number. It may exceed the number of
                servers.
            min_count: how often training must see an id before the id gets a row, at most 255.
            min_age: the number of steps without use before another id may get the row, because
                gradients for it may be in transit. Use several times the number of workers.
            max_age: the number of steps without use after which a row is evicted, or 0 to evict
                rows only to make room.
            initializer: the initializer of new rows. It must not depend on the number of rows.
            **kwargs: arguments of a Keras layer.

        Raises:
            ValueError: if a number is too small or too large, or `keys` is unknown.
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
        self._draw, self._seed = _make_draw(self.initializer, dimension)
        self.supports_jit = self._is_sorted = False
        #: The shards, after `build`.
        self.parts: list[Shard] = []

    def build(self, _input_shape: Any) -> None:
        """Create the shards.

        Raises:
            ConfigError: if the current strategy keeps a copy of all variables in each replica.
        """
        if isinstance(tf.distribute.get_strategy(), _COPIES):
            raise ConfigError(
                f"training.strategy: each GPU or worker would have a copy of {self.name}, a table "
                "that grows, and the copies would diverge; choose a strategy with parameter "
                "servers, or use one GPU"
            )
        rules = Rules(min_count=self.min_count, min_age=self.min_age, max_age=self.max_age)
        size = -(-self.capacity // self.shards)
        made = partial(Shard, capacity=size, rules=rules, draw=self._draw, branch=SharedBranch())
        self.parts = [
            made(self._make_noted(n, size), number=self._seed + (n << 32))
            for n in range(self.shards)
        ]

    def _make_noted(self, number: int, size: int) -> Noted:
        def note(name: str, *shape: int, value: int = 0, dtype: str = "int64", **named: Any) -> Any:
            first = keras.initializers.Constant(value) if value else "zeros"
            given = {"dtype": dtype, "initializer": first, "trainable": False, **named}
            return self.add_weight(name=f"shard_{number}_{name}", shape=shape, **given)

        has_filter, is_text = self.min_count > 1, self.keys == "string"
        cells = (max(hashes.FEWEST_BLOCKS, size), hashes.CELLS)
        # Disable the automatic cast of the rows, because it would read the whole shard.
        trained: dict[str, Any] = {"dtype": None, "trainable": True, "autocast": False}
        return Noted(
            rows=note("rows", size + 1, self.dimension, **trained),
            ids=note("ids", size + 1),
            used=note("used", size + 1, value=-1),
            tally=note("tally", table_shard.COUNTS),
            checks=note("checks", size + 1) if is_text else None,
            seen=note("sieve", *cells, dtype="uint8") if has_filter else None,
        )

    def call(self, ids: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        """Return the rows of `ids` in the compute dtype. In training, new ids may get rows."""
        self._require_type(ids.dtype)
        with tf.device("/device:CPU:0"):
            parts, places, asked = self._split(tf.reshape(ids, [-1]))
        admits = bool(training) and self.trainable and not self._is_sorted
        step = self._step(ids) if admits else None
        found = [
            self._gather_rows(shard, each, step, admits=admits)
            for shard, each in zip(self.parts, asked, strict=True)
        ]
        unique = tf.dynamic_stitch(parts, found)
        rows = tf.reshape(spread(unique, places), tf.concat([tf.shape(ids), [self.dimension]], 0))
        rows.set_shape([*ids.shape, self.dimension])
        return tf.cast(rows, self.compute_dtype)

    def _split(self, ids: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor, list[Asked]]:
        """Return indices of unique ids by shard, each id's index among them, and the lookups.

        Each id is sent once, even if the batch contains it several times. This also matters because
        most Keras optimizers square a gradient before they sum the duplicates of a row.
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
        """Read the step counter after `ids` are available, or return None without a counter."""
        steps = self.parts[0].steps
        if steps is None:
            return None
        # Without this dependency, the counter could be read while the input pipeline still waits
        # for a batch.
        with tf.control_dependencies([ids]), tf.device(steps.device):
            return steps.read_value()

    def _gather_rows(
        self, shard: Shard, asked: Asked, step: tf.Tensor | None, *, admits: bool
    ) -> tf.Tensor:
        rows = shard.noted.rows
        if self._is_sorted:
            return tf.gather(rows.value, shard.find_sorted(asked))
        with tf.device(shard.device):
            slots = (
                shard.admit(asked, step) if admits and rows.trainable else shard.find_slots(asked)
            )
            return tf.gather(rows.value, slots)

    def compute_output_spec(self, ids: Any, training: bool | None = None) -> keras.KerasTensor:  # noqa: ARG002
        """Return the dtype and shape of the rows."""
        self._require_type(ids.dtype)
        return keras.KerasTensor((*ids.shape, self.dimension), self.compute_dtype)

    def plain(self, ids: Any) -> Any:
        """Return the rows for a symbolic tensor of ids, from a shrunk table.

        Keras lookup layers find the rows. The shared rows come first in the exported table.
        """
        live = [np.flatnonzero(each.noted.used.numpy() >= 0) for each in self.parts]
        keys, proof = keras.ops.cast(ids, "int64") if self.keys != "string" else ids, None
        if self.keys == "string":
            made = partial(keras.layers.Hashing, FINGERPRINTS, dtype="int64")
            keys = made(name=f"{self.name}_key")(ids)
            proof = made(salt=_SIP_KEY, name=f"{self.name}_check")(ids)
        places = keras.ops.zeros_like(keys)
        if any(map(len, live)):
            places = self._make_lookup("ids", live)(keys)
        if proof is not None and any(map(len, live)):
            is_it = keras.ops.equal(places, self._make_lookup("checks", live)(proof))
            places = keras.ops.where(is_it, places, keras.ops.zeros_like(places))
        shard = hash_keys(keys + _SHARD_SALT, self.shards)
        places = keras.ops.where(places > 0, places + (self.shards - 1), shard)
        rows = [each.noted.rows.numpy() for each in self.parts]
        known = [each[there] for each, there in zip(rows, live, strict=True)]
        return make_embedding(self, np.concatenate([*(each[-1:] for each in rows), *known]))(places)

    def _make_lookup(self, noted: str, live: list[Any]) -> keras.layers.IntegerLookup:
        """Return a layer that maps recorded values to row numbers from 1 on, and others to 0."""
        parts = [getattr(each.noted, noted).numpy() for each in self.parts]
        values = np.concatenate([each[there] for each, there in zip(parts, live, strict=True)])
        none = next(n for n in range(len(values) + 1) if n not in set(values.tolist()))
        return keras.layers.IntegerLookup(
            vocabulary=values.tolist(), oov_token=none, name=f"{self.name}_{noted}"
        )

    def _require_type(self, dtype: Any) -> None:
        name = tf.as_dtype(dtype).name
        fits = name == "string" if self.keys == "string" else "int" in name and name != "uint64"
        if not fits:
            wanted = "strings" if self.keys == "string" else "whole numbers of up to 64 bits"
            what = f"{self.name}: the ids of the table must be {wanted}, not {name}"
            raise ValueError(what + advise_type(name))

    def connect(
        self, steps: tf.Variable, slots_of: Any, alike: EmbeddingTable | None = None
    ) -> None:
        """Connect the step counter and the optimizer slots of each shard's rows.

        `slots_of` maps a Keras variable to pairs of a slot and the slot's value in a new row. None
        stands for a copy of the row itself. `alike` is another table of the model: shards of the
        same structure share one trace.
        """
        (first, *_) = (alike or self).parts
        for shard in self.parts:
            shard.steps, shard.slots = steps, slots_of(shard.noted.rows)
            shard.branch = first.branch

    def rebuild(self, was_on: Callable[[str], bool] = lambda _device: True) -> None:
        """Rebuild the index after an assignment, for shards on devices that `was_on` accepts."""
        for shard in self.parts:
            if was_on(shard.device):
                shard.rebuild()
                _recount(shard)

    def metrics(self) -> dict[str, int]:
        """Return the counts of rows in use, of evicted rows, and of ids without a row.

        An id without a row is counted at each lookup in training.
        """
        tally = np.sum([shard.noted.tally.numpy() for shard in self.parts], axis=0)
        given, evicted = int(tally[table_shard.GIVEN]), int(tally[table_shard.EVICTED])
        away = int(tally[table_shard.TURNED_AWAY])
        return {"rows": given - evicted, "evicted": evicted, "turned_away": away}

    def shrink(self) -> None:
        """Remove unused rows before an export."""
        live = []
        for shard in self.parts:
            there = np.flatnonzero(shard.noted.used.numpy()[: shard.capacity] >= 0)
            ids = shard.noted.ids.numpy()[there]
            live.append(there[np.argsort(ids, kind="stable")].tolist())
        size = max(1, *map(len, live))
        for shard, slots in zip(self.parts, live, strict=True):
            shard.shrink(slots, size)
        self.capacity = size * self.shards
        self._is_sorted = True
        if not any(map(len, live)):
            why = "it was frozen, or training never looked up an id in it"
            if self.min_count > 1:
                why = f"no id occurred {self.min_count} times; lower min_count, or train longer"
            _log.warning(
                "table %s has no rows, so its ids share one row per shard: %s", self.name, why
            )

    def load_own_variables(self, store: Any) -> None:
        """Load the values from a file. A sketch that has another format there starts empty."""
        sieves = {id(shard.noted.seen) for shard in self.parts}
        values = {name: store[name] for name in store.keys()}  # noqa: SIM118
        for number, each in enumerate([*self._trainable_variables, *self._non_trainable_variables]):
            name = f"{number}"
            if id(each) in sieves and name in values and values[name].shape != each.shape:
                values[name] = each.numpy()
        super().load_own_variables(values)
        self.rebuild()

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the layer, for saving."""
        own = ("capacity", "dimension", "keys", "shards", "min_count", "min_age", "max_age")
        return {
            **super().get_config(),
            **{name: getattr(self, name) for name in own},
            "initializer": keras.initializers.serialize(self.initializer),
        }


def may_lack(path: str) -> bool:
    """Return whether a checkpoint of the same model may lack the variable with this path.

    It may lack the counts of ids without a row, which then start at zero, and the seeds, because
    only one of the runs may augment images.
    """
    return bool(_COUNTING.search(path)) or path.endswith(SEED)


def shrink(model: keras.Model) -> None:
    """Remove unused rows from all tables of a model before an export."""
    for table in list_tables(model):
        table.shrink()


def _recount(shard: Shard) -> None:
    """Correct the count of rows, because a checkpoint may read the rows after the count."""
    with tf.device(shard.device):
        tally = shard.noted.tally.value
        given, evicted = (
            tally.read_value()[each] for each in (table_shard.GIVEN, table_shard.EVICTED)
        )
        more = shard.capacity - shard.room.read_value() - (given - evicted)
        which = tf.where(more > 0, table_shard.GIVEN, table_shard.EVICTED)
        tally.assign_add(tf.abs(more) * tf.one_hot(which, table_shard.COUNTS, dtype=tf.int64))


def advise_type(dtype: str) -> str:
    """Return a suggestion for ids that are floats, or an empty string for other types."""
    if "float" not in dtype:
        return ""
    return (
        "; whole numbers are read as floats if some are missing or beyond 64 bits: fill missing "
        "values, or read the ids as strings (data.types)"
    )


class _Seed(keras.random.SeedGenerator):
    """A seed generator that always returns the same seed, a tensor of two numbers."""

    # Skip Keras's constructor, because it would create a variable.
    def __init__(self, seed: tf.Tensor) -> None:
        self._seed = seed

    def next(self, ordered: bool = True) -> tf.Tensor:  # noqa: ARG002
        return self._seed


def _make_draw(initializer: Any, dimension: int) -> tuple[Any, int]:
    """Return a function that draws new rows, and the seed of the first shard.

    The function takes a number that replaces the seed, the count of rows, and the count of rows
    drawn before. Initializers that differ only in their seeds share a function.

    Raises:
        ValueError: if the initializer needs the whole table.
    """
    seed = getattr(initializer, "seed", None)
    first = seed if isinstance(seed, int) else 0
    make = partial(_build_draw, initializer, dimension, has_seed=seed is not None)
    # Share only Keras's own initializers, because a user's initializer may depend on more than its
    # `get_config`. If the configuration contains an array, JSON raises TypeError: do not share.
    with suppress(TypeError):
        if type(initializer).__module__.startswith("keras."):
            text = json.dumps({**initializer.get_config(), "seed": seed is not None})
            key = type(initializer), text, dimension
            if key not in _DRAWS:
                _DRAWS[key] = make()
            return _DRAWS[key], first
    return make(), first


def _build_draw(initializer: Any, dimension: int, *, has_seed: bool) -> Any:
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
            f"initializer: {name} needs the size of the whole table, but rows are created one at "
            "a time; use uniform, random_normal, truncated_normal, zeros or a constant"
        ) from error
    return draw


# Strategies call the following functions. The variables of a table change in place: no worker pulls
# them, the variables of a shard are on the same server, and a reassigned row gets new optimizer
# slots.
def list_tables(model: keras.Model) -> list[EmbeddingTable]:
    """Return the layers of a model that are dynamic tables."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, EmbeddingTable)]


def list_shards(model: keras.Model) -> list[Shard]:
    """Return the shards of the dynamic tables of a model."""
    return [shard for table in list_tables(model) for shard in table.parts]


def list_state(model: keras.Model) -> list[keras.Variable]:
    """Return the non-trainable variables of a model that workers pull and push."""
    kept = {id(each) for shard in list_shards(model) for each in shard.noted.bookkeeping()}
    return [each for each in model.non_trainable_variables if id(each) not in kept]


def list_groups(model: keras.Model) -> list[list[tf.Variable]]:
    """Return groups of variables. Each group must be on one server."""
    return [shard.variables for shard in list_shards(model)]


def connect(model: keras.Model, optimizer: keras.optimizers.Optimizer, steps: tf.Variable) -> None:
    """Connect the tables of a built model to the step counter and to their optimizer slots."""
    tables = list_tables(model)
    for table in tables:
        table.connect(steps, lambda variable: list(list_slots(optimizer, variable)), tables[0])


def restore_tables(
    model: keras.Model, is_meant: Callable[[str], bool] = lambda _device: True
) -> None:
    """Rebuild the index of the tables on devices that `is_meant` accepts, after an assignment."""
    for table in list_tables(model):
        table.rebuild(is_meant)


def metrics(model: keras.Model) -> Mapping[str, Any]:
    """Return the metrics of the tables for the history, by name, or {} without tables."""
    found = {table.name: table.metrics() for table in list_tables(model)}
    return {"tables": found} if found else {}


def require(config: Config, model: keras.Model) -> None:
    """Raise `ConfigError` if the configuration does not suit the tables of the model."""
    workers, needed = config.cluster.workers, config.training.replicas_to_aggregate
    may = find_topology(config.training.strategy).capabilities
    for table in list_tables(model):
        if may.mixes_steps and table.min_age <= workers > 1:
            _log.warning(
                "the table %s gives a row to another id after %d steps without use, but with %d "
                "workers a gradient may be that old; set its min_age to several times the number "
                "of workers",
                table.name,
                table.min_age,
                workers,
            )
        if config.training.pull_every > 1:
            raise ConfigError(
                f"training.pull_every: workers cannot pull the table {table.name}, because it "
                "grows during training; leave the key out"
            )
        if may.aggregates and 0 < needed < workers:
            raise ConfigError(
                f"training.replicas_to_aggregate: with {needed} of {workers} workers, a late "
                f"worker may change the table {table.name} during a checkpoint; leave the key out"
            )
        if may.copies:
            raise ConfigError(
                f"training.strategy: {config.training.strategy} has a copy of the table "
                f"{table.name} in each worker, and the copies would diverge; use a "
                "strategy with parameter servers"
            )


def list_slots(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable
) -> Iterator[tuple[tf.Variable, Any]]:
    """Yield a variable's optimizer slots and initial values. None means the variable's value."""
    trained = optimizer._trainable_variables
    index = next((i for i, each in enumerate(trained) if each is variable), None)
    if index is None:
        return
    averages = optimizer._model_variables_moving_average if optimizer.use_ema else None
    for name, slots in vars(optimizer).items():
        if not isinstance(slots, list) or len(slots) != len(trained) or slots is trained:
            continue
        slot = slots[index]
        if not isinstance(slot, keras.Variable) or slot is variable:
            continue
        # Adafactor has one slot with a value per row, and one (`_c`) with a value per column. Only
        # the first one belongs to the rows.
        if slot.shape != variable.shape and (slot.shape != variable.shape[:1] or name == "_c"):
            continue
        yield slot.value, None if slots is averages else _first_value(slot)


def _first_value(slot: keras.Variable) -> float:
    if initializer := getattr(slot, BEGINS, None):
        return float(tf.reshape(initializer([1] * len(slot.shape), dtype=slot.dtype), [-1])[0])
    with tf.device(slot.value.device):
        return float(tf.reshape(slot.value.sparse_read([0]), [-1])[0])

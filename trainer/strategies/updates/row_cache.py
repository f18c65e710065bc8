"""A cache of hot rows on each worker, with bounded staleness.

A worker keeps the rows that it looks up most often, moves its copies by plain SGD, and sums up
their gradients. After `staleness` of its own updates that use a row it pushes the sum, and reads
the row again at the next use: one message in each direction for so many (Miao et al. 2022, "HET:
Scaling out Huge Embedding Model Training via Cache-enabled Distributed Framework", VLDB 15(2), with
the clock of an embedding counted on its worker alone). With a staleness of 1 nothing is kept.

All of it is variables in the memory of the worker, which its first closure makes. At the end of
each closure, and so before each checkpoint and validation, all sums are pushed
(`RowCache.push_all`). What a worker has not pushed when it dies is lost: at most `staleness - 1`
gradients of each row that it keeps, all since the last boundary. So is that of a closure which did
not come to its end on a worker that goes on, as its connection to the chief was lost: half of an
update may be written, so that the next one forgets all that is kept. Should the first one run on,
it changes nothing of that any more, and pushes its gradients as they are; but for the update that
it writes while the next one begins, as each update asks once, before it writes. What that leaves is
gone after `staleness` uses of a row.

An id has a choice of two slots, by two hashes (Seznec 1993, "A Case for Two-Way Skewed-Associative
Caches"), and tries that of the lower score. A slot is that of the id which comes more often: a use
of it adds to a score up to a limit, each other id that tries it takes one away, and takes over at
zero (Boyer and Moore 1991, "MJRTY: A Fast Majority Vote Algorithm").
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer.config.schema import Config
from trainer.errors import ConfigError
from trainer.strategies.updates.batch_rows import RowsOnce, Sent, Table, Vectors, tables_of

# Above it a row that was hot once would stay for long.
MOST_SCORE = 3
# Slots and their ids are small tensors, which a GPU would only wait for.
_DEVICE = "/device:CPU:0"


# Odd numbers with no pattern in their bits.
_FACTORS = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F))
# AUC 0.739 in place of 0.762 with a staleness of 16; see docs/decisions/0095.
SLOWER = (
    "training.cached_rows: Adam makes one step of all gradients that were summed up of a row, so "
    "that hot rows learn more slowly: take adagrad or sgd, or a smaller training.cache_staleness"
)
_LAZY = ("adam", "adamw", "adagrad", "ftrl", "sgd")
# A sum of many gradients would be clipped as one.
_CLIPPING = ("clipnorm", "global_clipnorm", "clipvalue")


def require(config: Config, model: keras.Model) -> None:
    """Raise `ConfigError` where hot rows of the model cannot be cached as it is configured."""
    training = config.training
    if not training.cached_rows:
        return
    optimizer = training.optimizer
    clips = [name for name in _CLIPPING if optimizer.args.get(name) is not None]
    remedies = {
        "take training.strategy async_parameter_server": training.strategy
        != "async_parameter_server",
        "take data.partition disjoint or reshuffle": config.data.partition == "dynamic",
        "leave out training.pull_every": training.pull_every > 1,
        "leave out training.accumulate": training.accumulate > 1,
        "leave out training.mixed_precision float16": training.mixed_precision == "float16",
        "leave out training.jit_compile": training.jit_compile,
        "leave out training.ema": training.ema > 0,
        "leave out training.optimizer.dense_updates": optimizer.dense_updates,
        f"take one of {', '.join(_LAZY)} as training.optimizer.name": optimizer.name not in _LAZY,
        f"leave out training.optimizer.args.{', '.join(clips)}": bool(clips),
        "give each worker one GPU at most": config.cluster.gpus_per_worker > 1,
        "take a model whose tables are all of Keras's Embedding or ShardedEmbedding, trained, "
        "without regularizer": not tables_of(model),
    }
    for remedy, is_needed in remedies.items():
        if is_needed:
            raise ConfigError(
                f"training.cached_rows: hot rows cannot be cached as it is configured; {remedy}, "
                "or leave the key out"
            )


class _Local:
    """A variable of the worker that runs the graph."""

    def __init__(self, name: str, shape: Sequence[int], dtype: tf.DType) -> None:
        self._shape, self._dtype = shape, dtype
        # A name is what makes it outlive the graph.
        self._handle = tf.raw_ops.VarHandleOp(dtype=dtype, shape=shape, shared_name=name)

    def is_there(self) -> tf.Tensor:
        return tf.raw_ops.VarIsInitializedOp(resource=self._handle)

    def clear(self) -> None:
        self.fill(tf.zeros(self._shape, self._dtype))

    def fill(self, value: tf.Tensor) -> None:
        tf.raw_ops.AssignVariableOp(resource=self._handle, value=value)

    def at(self, places: tf.Tensor) -> tf.Tensor:
        return tf.raw_ops.ResourceGather(resource=self._handle, indices=places, dtype=self._dtype)

    def put(self, places: tf.Tensor, values: Any) -> tf.Operation:
        values = tf.cast(values, self._dtype)
        return tf.raw_ops.ResourceScatterUpdate(
            resource=self._handle, indices=places, updates=values
        )

    def subtract(self, places: tf.Tensor, values: Any) -> None:
        tf.raw_ops.ResourceScatterSub(resource=self._handle, indices=places, updates=values)

    def read(self) -> tf.Tensor:
        return tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=self._dtype)


@dataclass(frozen=True, kw_only=True)
class _Slots:
    """The slots of a table.

    Attributes:
        ids: the id of each.
        clock: uses since the row was read, which it has to be from `staleness` on; 0: a free slot.
        unpushed: uses since the sum was pushed.
        score: see the module.
        claims: which id of a batch takes a slot.
        rows: as they were read, and moved since.
        sums: of the gradients that are not pushed.
    """

    ids: _Local
    clock: _Local
    unpushed: _Local
    score: _Local
    claims: _Local
    rows: _Local
    sums: _Local


class _Owner:
    """The run of a closure whose cache it is; 0 where the last one has come to its end."""

    def __init__(self, name: str, run: tf.Tensor) -> None:
        self.kept = _Local(name, [], tf.int64)
        self._run = tf.identity(run)

    def is_other(self) -> tf.Tensor:
        found = self.kept.read()
        return tf.not_equal(found, 0) & tf.not_equal(found, self._run)

    def take(self) -> None:
        self.kept.fill(self._run)

    def is_this(self) -> tf.Tensor:
        return tf.equal(self.kept.read(), self._run)

    def leave(self) -> None:
        found = self.kept.read()
        self.kept.fill(tf.where(tf.equal(found, self._run), tf.zeros_like(found), found))


class RowCache:
    """The cache of all tables; the same on each worker, with rows of its own."""

    def __init__(self, tables: Sequence[Table], *, rows: int, staleness: int) -> None:
        """Describe it: at most so many rows of each table, and uses until one is read again."""
        self._tables, self._staleness = list(tables), staleness
        self._sizes = [min(rows, table.rows) for table in self._tables]
        # Workers outlive a chief. The cache of another run of the closure is emptied (`open`), also
        # where the next chief goes on with this one's graph, and so with this name.
        self._name = uuid.uuid4().hex
        self._opened: list[_Slots] = []

    def open(self, run: tf.Tensor) -> None:
        """Make the variables where they are missing: where the graph of a closure begins.

        `run` is a number above 0 which no other run of a closure has on this worker.
        """
        with tf.device(_DEVICE):
            self._owner = owner = _Owner(f"cache-{self._name}-owner", run)
            made = [
                self._slots(number, table.dimension, table.shards[0].value.dtype)
                for number, table in enumerate(self._tables)
            ]
            found = [local for slots in made for local in slots.values()]

            def clear() -> None:
                for each in found:
                    each.clear()

            def clear_if_torn() -> None:
                tf.cond(owner.is_other(), clear, lambda: None)

            # All were made together.
            tf.cond(owner.kept.is_there(), clear_if_torn, clear)
            owner.take()
        self._opened = [_Slots(**slots) for slots in made]

    def _slots(self, number: int, dimension: int, kind: tf.DType) -> dict[str, _Local]:
        size = self._sizes[number]
        counts = ("clock", "unpushed", "score", "claims")
        shapes: dict[str, tuple[list[int], tf.DType]] = {
            "ids": ([size], tf.int64),
            **dict.fromkeys(counts, ([size], tf.int32)),
            "rows": ([size, dimension], kind),
            "sums": ([size, dimension], kind),
        }
        return {
            name: _Local(f"cache-{self._name}-{number}-{name}", *shape)
            for name, shape in shapes.items()
        }

    def sent(self, rate: Callable[[], tf.Tensor], ids: Vectors) -> Cached:
        """Ask for rows, those that are kept and others, as `Sent` does.

        `rate` is the learning rate of the worker's own steps.
        """
        uses = []
        for slots, table, size, each in zip(
            self._opened, self._tables, self._sizes, ids, strict=True
        ):
            all_fit = size == table.rows
            use = _Use(
                slots, each, self._owner, size=size, staleness=self._staleness, all_fit=all_fit
            )
            uses.append(use)
        return Cached(self._tables, uses, rate)

    def push_all(self) -> dict[int, RowsOnce]:
        """Return all sums as `Sent.gradients` does; where the graph of a closure ends."""
        ids, sums, done = Vectors(), Vectors(), list[tf.Operation]()
        with tf.device(_DEVICE):
            is_own = self._owner.is_this()
            for slots in self._opened:
                kept = tf.where((slots.unpushed.read() > 0) & is_own)[:, 0]
                ids.append(slots.ids.at(kept))
                sums.append(slots.sums.at(kept))
                done.append(slots.unpushed.put(kept, tf.zeros_like(kept)))
            with tf.control_dependencies(done):
                self._owner.leave()
        return Sent(self._tables, ids).gradients(sums)

    def apply_all(
        self, optimizer: keras.optimizers.Optimizer, trained: Sequence[keras.Variable]
    ) -> None:
        """Push all sums, and let the optimizer move their rows; see `push_all`."""
        found = self.push_all()
        variables = [each for each in trained if id(each) in found]
        sums = optimizer._clip_gradients([found[id(each)] for each in variables])
        optimizer._backend_update_step(sums, variables, optimizer.learning_rate)


class Cached:
    """The ids of a batch, of which some rows are kept; `rows` comes before `gradients`."""

    def __init__(
        self,
        tables: Sequence[Table],
        uses: Sequence[_Use],
        rate: Callable[[], tf.Tensor],
    ) -> None:
        """Ask the servers for the rows that are not kept, or were used too often."""
        self._tables, self._uses, self._rate = tables, uses, rate
        self._asked = Sent(tables, [use.lacking for use in uses])

    def rows(self) -> list[tf.Tensor]:
        """Return the rows of each table, in the order of its ids."""
        read = self._asked.rows()
        return [use.with_read(rows) for use, rows in zip(self._uses, read, strict=True)]

    def gradients(self, values: Sequence[tf.Tensor]) -> dict[int, RowsOnce]:
        """Sum up gradients of rows that are kept, and return what is to be applied now."""
        rate = self._rate()
        pushed = [use.moved(each, rate) for use, each in zip(self._uses, values, strict=True)]
        return Sent(self._tables, [ids for ids, _ in pushed]).gradients(
            [sums for _, sums in pushed]
        )


class _Use:
    """The use of slots by the ids [n] of one batch, each of which comes once."""

    def __init__(  # noqa: PLR0913
        self,
        slots: _Slots,
        ids: tf.Tensor,
        owner: _Owner,
        *,
        size: int,
        staleness: int,
        all_fit: bool,
    ) -> None:
        self._slots, self._staleness, self._ids, self._owner = slots, staleness, ids, owner
        with tf.device(_DEVICE):
            self._at = ids if all_fit else self._chosen(ids, size)
            self._clock = slots.clock.at(self._at)
            is_there = (slots.ids.at(self._at) == ids) & (self._clock > 0)
            self._own = is_there & owner.is_this()
            self._is_kept = self._own & (self._clock < staleness)
            self._read_at = tf.where(~self._is_kept)
            self.lacking = tf.gather_nd(ids, self._read_at)

    def _chosen(self, ids: tf.Tensor, size: int) -> tf.Tensor:
        """Return the slot of each id, or that which it is to have."""
        slots = self._slots
        one, other = (_hashed(ids, size, factor) for factor in _FACTORS)
        in_one, in_other = (
            (slots.ids.at(each) == ids) & (slots.clock.at(each) > 0) for each in (one, other)
        )
        is_lower = slots.score.at(other) < slots.score.at(one)
        return tf.where(~in_one & (in_other | is_lower), other, one)

    def with_read(self, read: tf.Tensor) -> tf.Tensor:
        """Return the rows [n, dimension], those kept and those that were read."""
        with tf.device(_DEVICE):
            kept = self._slots.rows.at(self._at)
            self._rows = tf.tensor_scatter_nd_update(kept, self._read_at, read)
            return self._rows

    def moved(self, gradient: tf.Tensor, rate: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Move the rows that are kept, and return the ids and sums that are to be pushed now."""
        with tf.device(_DEVICE):
            gradient = tf.identity(gradient)
            ids, sums = tf.cond(
                self._owner.is_this(),
                lambda: self._kept(gradient, rate),
                lambda: (self._ids, gradient),
            )
            return ids, sums

    def _kept(self, gradient: tf.Tensor, rate: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        slots, at = self._slots, self._at
        with tf.device(_DEVICE):
            taken = self._taken()
            left, left_sums = self._evicted(tf.boolean_mask(at, taken))
            used = tf.where(self._is_kept, self._clock, 0) + 1
            before = tf.where(self._own, slots.unpushed.at(at), 0)
            sums = gradient + tf.where((before > 0)[:, tf.newaxis], slots.sums.at(at), 0)
            stays = self._own | taken
            pushed = ~stays | (used >= self._staleness)
            rows = self._rows - tf.cast(rate, gradient.dtype) * gradient
            place, mine = tf.boolean_mask(at, stays), tf.where(stays)
            slots.ids.put(place, tf.gather_nd(self._ids, mine))
            slots.clock.put(place, tf.gather_nd(used, mine))
            unpushed = tf.where(pushed, 0, before + 1)
            slots.unpushed.put(place, tf.gather_nd(unpushed, mine))
            slots.rows.put(place, tf.gather_nd(rows, mine))
            slots.sums.put(place, tf.gather_nd(sums, mine))
            ids = tf.concat([left, tf.boolean_mask(self._ids, pushed)], 0)
            return ids, tf.concat([left_sums, tf.boolean_mask(sums, pushed)], 0)

    def _taken(self) -> tf.Tensor:
        """Return which of the ids take over the slot of another one."""
        slots, at = self._slots, self._at
        own_at, other = tf.boolean_mask(at, self._own), tf.where(~self._own)[:, 0]
        slots.score.put(own_at, tf.minimum(slots.score.at(own_at) + 1, MOST_SCORE))
        slots.score.subtract(tf.gather(at, other), tf.ones_like(other, tf.int32))
        wins = tf.boolean_mask(other, slots.score.at(tf.gather(at, other)) <= 0)
        # Of several ids that take one slot the last one that is written has it.
        number = tf.range(tf.size(at))
        slots.claims.put(tf.gather(at, wins), tf.gather(number, wins))
        slots.claims.put(own_at, tf.boolean_mask(number, self._own))
        claimed = tf.gather(slots.claims.at(at), wins) == tf.cast(wins, tf.int32)
        wins = tf.boolean_mask(wins, claimed)
        slots.score.put(tf.gather(at, wins), tf.ones_like(wins, tf.int32))
        shape = tf.shape(at, out_type=tf.int64)
        return tf.scatter_nd(wins[:, tf.newaxis], tf.ones_like(wins, tf.int32), shape) > 0

    def _evicted(self, at: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the ids that lose these slots, and what is summed up there."""
        at = tf.boolean_mask(at, self._slots.unpushed.at(at) > 0)
        return self._slots.ids.at(at), self._slots.sums.at(at)


def _hashed(ids: tf.Tensor, size: int, factor: np.uint64) -> tf.Tensor:
    """Return a slot for each id (Knuth 1998, "Sorting and Searching", section 6.4)."""
    product = tf.bitcast(ids, tf.uint64) * factor
    return tf.cast(tf.bitwise.right_shift(product, np.uint64(33)), tf.int64) % size

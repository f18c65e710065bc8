"""One shard of a dynamic table: its rows, and the map from ids to rows.

The rows are a plain variable with a fixed number of slots. Other variables record the id in each
slot and the step of its last use. Only the map from ids to slots is a TensorFlow hash table, which
is rebuilt from the recorded ids (`Shard.rebuild`). All of them are on one device, where a mutex
makes each lookup of a training step atomic.

A row loses its slot only after `Rules.min_age` steps without use, because a gradient for it may be
in transit.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from flotilla.trainer.embeddings.hashes import CELLS, count_ids

# Indices into `Noted.tally`: lookups in training, assigned rows, evicted rows, ids that got no row,
# ids in the sketch, and the step of the last search by age.
CLOCK, GIVEN, EVICTED, TURNED_AWAY, SIEVED, SWEPT = range(6)
COUNTS = 6
# A full shard evicts 1/16 of its rows at a time, if they are old enough. Evicting fewer rows would
# be slower, because each eviction searches all slots.
AT_ONCE = 16
_NEVER = np.int64(-1)
_LATEST = np.int64(2**63 - 1)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Rules for when ids get and lose rows. Ages are in steps. A `max_age` of 0 means no limit."""

    min_count: int
    min_age: int
    max_age: int


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The unique ids of a lookup: keys, checks that tell ids with equal keys apart, and counts."""

    keys: tf.Tensor
    checks: tf.Tensor
    counts: tf.Tensor


@dataclass(frozen=True, kw_only=True)
class Noted:
    """The Keras variables of a shard. `checks` and `seen` are None if they are not needed."""

    rows: Any
    ids: Any
    used: Any
    tally: Any
    checks: Any = None
    seen: Any = None

    def bookkeeping(self) -> list[Any]:
        """Return all variables except the rows."""
        found = (self.ids, self.used, self.tally, self.checks, self.seen)
        return [each for each in found if each is not None]


class Shard:
    """A shard with `capacity + 1` slots. All ids without a row share the last slot."""

    def __init__(  # noqa: PLR0913
        self,
        noted: Noted,
        capacity: int,
        rules: Rules,
        draw: Callable[..., Any],
        *,
        number: int = 0,
        branch: SharedBranch | None = None,
    ) -> None:
        """Create a shard without rows.

        Args:
            noted: the variables of the shard.
            capacity: the number of slots, without the last one.
            rules: the rules of the table.
            draw: creates new rows from `number`, the count of new rows, and the count of rows
                created before.
            number: distinguishes the shard's rows from those of other shards.
            branch: the branch that several shards share.
        """
        self.noted, self.capacity = noted, capacity
        self._rules, self._draw = rules, draw
        self._number = np.int64(number)
        self.branch = branch or SharedBranch()
        #: The step counter of the strategy. Without one, each lookup counts as a step.
        self.steps: tf.Variable | None = None
        #: The optimizer slots of shape [capacity + 1, ...], and the value of each in a new row.
        #: None stands for a copy of the row itself.
        self.slots: list[tuple[tf.Variable, Any]] = []
        with tf.init_scope():
            # Pass functions, so that the device creates the values and nothing is sent there.
            made = partial(tf.Variable, dtype=tf.int64, trainable=False)
            self.free = made(lambda: tf.range(capacity - 1, -1, -1, dtype=tf.int64))
            self.room = made(capacity)
            # The number of steps of earlier runs. Ages are measured by this number plus the global
            # step.
            self.earlier = made(0)
            # The number of ids that the sketch has counted since it was last halved, and the
            # largest number counted in one lookup. The second number is halved with the sketch.
            self.window = made(lambda: tf.zeros([2], tf.int64))
            # Use random names, because servers outlive this process, and a sequential name might
            # belong to another table.
            self._names = f"ids-{uuid.uuid4().hex}", f"mutex-{uuid.uuid4().hex}"
            self.make_map()
        self.unsaved = (self.free, self.room, self.earlier, self.window)

    @property
    def variables(self) -> list[tf.Variable]:
        """All variables except optimizer slots. They must be on a single server."""
        noted = (self.noted.rows, *self.noted.bookkeeping())
        return [*(each._value for each in noted), *self.unsaved]

    @property
    def device(self) -> str:
        """The device of all variables."""
        return str(self.free.device)

    def make_map(self) -> None:
        """Create the map, which `rebuild` fills, and the mutex, or open existing ones."""
        ids, mutex = self._names
        with tf.device(self.device):
            self.map = tf.raw_ops.MutableHashTableV2(
                key_dtype=tf.int64, value_dtype=tf.int64, shared_name=ids
            )
            self.mutex = tf.raw_ops.MutexV2(shared_name=mutex)

    def rename(self, ids: str, mutex: str) -> None:
        """Rename the map and the mutex, which are created or opened under the new names."""
        self._names = ids, mutex
        self.make_map()

    def find_slots(self, asked: Asked) -> tf.Tensor:
        """Return the slots [n] of ids without changing the shard."""
        found = self._find(asked.keys)
        return self._none_to_last(self._check_keys(found, asked.checks))

    def find_sorted(self, asked: Asked) -> tf.Tensor:
        """Return the slots [n] of ids in a shard with sorted ids, without using the map."""
        ids = self.noted.ids.value.read_value()[: self.capacity]
        place = tf.searchsorted(ids, asked.keys, out_type=tf.int64)
        place = tf.minimum(place, self.capacity - 1)
        is_it = tf.equal(tf.gather(ids, place), asked.keys)
        is_it &= tf.gather(self.noted.used.value, place) >= 0
        return self._none_to_last(self._check_keys(tf.where(is_it, place, _NEVER), asked.checks))

    def admit(self, asked: Asked, step: tf.Tensor | None) -> tf.Tensor:
        """Assign slots to new ids, and return the slots [n] of all ids at global step `step`."""
        here = [tf.identity(each) for each in (asked.keys, asked.checks, asked.counts)]
        keys, checks, counts = here
        step = None if step is None else tf.identity(step)
        asked = Asked(keys=keys, checks=checks, counts=counts)
        # Wait for the inputs before locking the mutex, so that it is held only briefly.
        with tf.control_dependencies([*here, *([] if step is None else [step])]):
            (slots,) = self.run_locked(lambda: [self._update(asked, step)])
        return slots

    def run_locked(self, work: Callable[[], list[tf.Tensor]]) -> list[tf.Tensor]:
        """Run `work` in a graph while no id gets or loses a slot, and return its tensors."""
        lock = tf.raw_ops.MutexLock(mutex=self.mutex)
        with tf.control_dependencies([lock]):
            made = work()
        with tf.control_dependencies(made):
            released = tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
        _run_unordered(released)
        return made

    def _update(self, asked: Asked, step: tf.Tensor | None) -> tf.Tensor:
        tally = self.noted.tally.value
        tally.assign_add(tf.one_hot(CLOCK, COUNTS, dtype=tf.int64))
        counted = tally.read_value()
        now = counted[CLOCK] if step is None else self.earlier + step
        found = self._find(asked.keys)
        slots = self._check_keys(found, asked.checks)
        # Before an eviction, mark the rows of this batch as used, so that they are kept.
        used, places = self.noted.used.value, self._none_to_last(slots)
        # Keep the maximum, because another worker may already have used the row at a later step.
        _put(used, places, tf.maximum(used.sparse_read(places), now))
        changes = tf.reduce_any(found < 0)
        if self._rules.max_age:
            changes |= now - counted[SWEPT] >= max(1, self._rules.max_age // 8)
        known = tf.concat([[now, self._number], counted], 0)
        given = (slots, asked.keys, asked.checks, asked.counts, known)
        resources, kind = self._resources(), self._kind()
        slots = self.branch.run(changes, self._add_ids, given, resources, self.device, kind)
        slots = self._none_to_last(slots)
        # All changes must be finished before the mutex is released.
        with tf.control_dependencies([self.noted.used.value.sparse_read(slots[:1])]):
            return tf.identity(slots)

    def _resources(self) -> list[tf.Tensor]:
        slots = (slot for slot, _ in self.slots)
        return [self.map, *(each.handle for each in (*self.variables, *slots))]

    def _kind(self) -> Hashable:
        """Return everything that `_add_ids` depends on, except resources."""
        noted = self.noted
        variables = [noted.rows.value, *(slot for slot, _ in self.slots)]
        there = (noted.checks is None, noted.seen is None)
        shapes = tuple((tuple(each.shape), each.dtype) for each in variables)
        begins = tuple(value for _, value in self.slots)
        return self.capacity, self._rules, self._draw, there, shapes, begins

    def _add_ids(
        self,
        slots: tf.Tensor,
        keys: tf.Tensor,
        checks: tf.Tensor,
        counts: tf.Tensor,
        known: tf.Tensor,
    ) -> tf.Tensor:
        now, number, counted = known[0], known[1], known[2:]
        absent = tf.where(slots < 0)[:, 0]
        halved = tf.constant(0, tf.int64)
        if self.noted.seen is not None:
            often, halved = count_ids(
                tf.gather(keys, absent),
                tf.gather(counts, absent),
                counted[SIEVED],
                seen=self.noted.seen.value,
                window=self.window,
                min_count=self._rules.min_count,
            )
            absent = _those(absent, often)
        evicted, swept = self._evict(tf.size(absent, tf.int64), now, counted[SWEPT])
        room = self.room.read_value()
        taken = tf.minimum(room, tf.size(absent, tf.int64))
        absent = absent[:taken]
        places = tf.gather(self.free, room - 1 - tf.range(taken))
        if self.noted.checks is not None:
            checks = tf.gather(checks, absent)
        rows = self._draw(number, tf.cast(taken, tf.int32), counted[GIVEN])
        self._give(tf.gather(keys, absent), checks, places, now, rows)
        away = tf.math.count_nonzero(slots < 0) - taken
        change = tf.stack([np.int64(0), taken, evicted, away, halved, swept])
        total = self.noted.tally.value.assign_add(change, read_value=True)
        with tf.control_dependencies([total]):
            return tf.tensor_scatter_nd_update(slots, absent[:, tf.newaxis], places)

    def _evict(
        self, needed: tf.Tensor, now: tf.Tensor, swept: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Make room for `needed` rows. Return how many were evicted, and the change in `swept`."""
        room, max_age = self.room.read_value(), self._rules.max_age
        due = tf.constant(False)
        if max_age:
            due = now - swept >= max(1, max_age // 8)

        def evict() -> tuple[tf.Tensor, tf.Tensor]:
            slots = self._oldest(needed - room, now)
            return self._take(slots, room), tf.where(due, now - swept, 0)

        nothing = tf.constant(0, tf.int64)
        evicted: tuple[tf.Tensor, tf.Tensor] = tf.cond(
            due | (needed > room), evict, lambda: (nothing, nothing)
        )
        return evicted

    def _oldest(self, lacking: tf.Tensor, now: tf.Tensor) -> tf.Tensor:
        """Return the slots of expired rows and, if more are needed, of least recently used rows."""
        used = self.noted.used.value.read_value()[: self.capacity]
        aged = tf.zeros_like(used, tf.bool)
        if self._rules.max_age:
            aged = (used >= 0) & (used < now - self._rules.max_age)
        old = tf.where(aged)[:, 0]
        lacking -= tf.size(old, tf.int64)
        most = tf.minimum(tf.maximum(lacking, self.capacity // AT_ONCE), self.capacity)
        most = tf.where(lacking > 0, most, 0)
        idle = (used >= 0) & ~aged & (used <= now - max(1, self._rules.min_age))
        since = tf.where(idle, used, _LATEST)
        _, least = tf.math.top_k(-since, tf.cast(most, tf.int32), sorted=False)
        least = _those(least, tf.gather(idle, least))
        return tf.concat([old, tf.cast(least, tf.int64)], 0)

    def _take(self, slots: tf.Tensor, room: tf.Tensor) -> tf.Tensor:
        """Remove the ids from these slots, and return the number of slots."""
        keys = tf.gather(self.noted.ids.value, slots)
        # If another slot has the same id, because a step was interrupted, keep the id in the map.
        keys = _those(keys, tf.equal(self._find(keys), slots))
        count = tf.size(slots, tf.int64)
        # A worker may die at any point, so free a slot only when no id refers to it anymore.
        last = tf.raw_ops.LookupTableRemoveV2(table_handle=self.map, keys=keys)
        with tf.control_dependencies([last]):
            last = _put(self.noted.used.value, slots, tf.fill(tf.shape(slots), _NEVER))
        with tf.control_dependencies([last]):
            last = _put(self.free, tf.range(room, room + count), slots)
        with tf.control_dependencies([last]):
            total = self.room.assign_add(count, read_value=True)
        with tf.control_dependencies([total]):
            return tf.identity(count)

    def _give(
        self, keys: tf.Tensor, checks: tf.Tensor, places: tf.Tensor, now: tf.Tensor, rows: tf.Tensor
    ) -> None:
        """Assign free slots to ids, with new rows and new optimizer slots."""
        count = tf.size(places, tf.int64)
        noted = self.noted
        new = [(noted.rows.value, rows), (noted.ids.value, keys)]
        if noted.checks is not None:
            new.append((noted.checks.value, checks))
        for slot, value in self.slots:
            shape = [count, *slot.shape[1:]]
            first = rows if value is None else tf.fill(shape, tf.cast(value, slot.dtype))
            new.append((slot, tf.cast(first, slot.dtype)))
        # A worker may die at any point. Therefore, first remove the slots from the free list, then
        # write their new values, and only then let the ids refer to them.
        with tf.control_dependencies([places]):
            room = self.room.assign_sub(count, read_value=True)
        with tf.control_dependencies([room]):
            written = [_put(variable, places, values) for variable, values in new]
        # `rebuild` adds each slot that is marked as used to the map, so mark a slot only when its
        # values are complete.
        with tf.control_dependencies(written):
            used = _put(noted.used.value, places, tf.fill(tf.shape(places), now))
        with tf.control_dependencies([used]):
            tf.raw_ops.LookupTableInsertV2(table_handle=self.map, keys=keys, values=places)

    def rebuild(self) -> None:
        """Rebuild the map and the list of free slots from the variables."""
        with tf.device(self.device):
            used = self.noted.used.value.read_value()
            if self.steps is not None:
                # A run that was warm-started counts its steps from 0, so add the steps of the
                # earlier run. Use the step of the last eviction if it is later, because the most
                # recently used rows may have been evicted since.
                swept = self.noted.tally.value.read_value()[SWEPT]
                latest = tf.maximum(tf.reduce_max(used), swept)
                self.earlier.assign(tf.maximum(self.earlier, latest - self.steps.read_value()))
            used = used[: self.capacity]
            live = tf.where(used >= 0)[:, 0]
            # If a dead worker left two slots for an id, keep the one that was used later.
            live = tf.gather(live, tf.argsort(tf.gather(used, live), stable=True))
            keys = tf.gather(self.noted.ids.value, live)
            tf.raw_ops.LookupTableImportV2(table_handle=self.map, keys=keys, values=live)
            twice = _those(live, tf.not_equal(self._find(keys), live))
            _put(self.noted.used.value, twice, tf.fill(tf.shape(twice), _NEVER))
            free = tf.where(self.noted.used.value.read_value()[: self.capacity] < 0)[::-1, 0]
            _put(self.free, tf.range(tf.size(free)), free)
            self.room.assign(tf.size(free, tf.int64))

    def shrink(self, live: Sequence[int], capacity: int) -> None:
        """Keep only the rows in these slots, in this order, and the last slot."""
        wanted = np.array([*live, *[self.capacity] * (capacity + 1 - len(live))])
        noted = self.noted
        for each in (noted.rows, noted.ids, noted.used, noted.checks):
            if each is not None:
                _replace(each, each.numpy()[wanted])
        for each, value in ((noted.ids, _LATEST), (noted.used, _NEVER)):
            each.assign(np.where(np.arange(capacity + 1) < len(live), each.numpy(), value))
        if noted.seen is not None:
            _replace(noted.seen, np.zeros([1, CELLS], np.uint8))
        self.capacity = capacity
        self.free = tf.Variable(np.arange(capacity), dtype=tf.int64, trainable=False)
        self.slots = []
        self.rebuild()

    def _find(self, keys: tf.Tensor) -> tf.Tensor:
        found = tf.raw_ops.LookupTableFindV2(table_handle=self.map, keys=keys, default_value=_NEVER)
        found.set_shape(keys.shape)
        return found

    def _check_keys(self, found: tf.Tensor, checks: tf.Tensor) -> tf.Tensor:
        """Return the slots, but the last slot for each id whose key belongs to another id."""
        if self.noted.checks is None:
            return found
        there = tf.gather(self.noted.checks.value, tf.maximum(found, 0))
        other = (found >= 0) & tf.not_equal(there, checks)
        return tf.where(other, np.int64(self.capacity), found)

    def _none_to_last(self, slots: tf.Tensor) -> tf.Tensor:
        return tf.where(slots < 0, np.int64(self.capacity), slots)


def _those(values: tf.Tensor, wanted: tf.Tensor) -> tf.Tensor:
    """Return the selected values [n], with a sixth of the operations of `tf.boolean_mask`."""
    return tf.gather(values, tf.where(wanted)[:, 0])


def _run_unordered(operation: tf.Operation | None) -> None:
    """Make a function run an operation before returning, in any order relative to others.

    TensorFlow runs stateful operations without a resource in program order. The release of one
    mutex would then wait for the release of another one, which another worker may hold: a deadlock.
    """
    if not tf.executing_eagerly():
        manager = tf.compat.v1.get_default_graph().experimental_acd_manager
        if manager is not None:
            manager.run_independently(operation)


def _put(variable: tf.Variable, places: tf.Tensor, values: tf.Tensor) -> tf.Operation | None:
    return tf.raw_ops.ResourceScatterUpdate(
        resource=variable.handle, indices=places, updates=values
    )


def _replace(variable: keras.Variable, value: np.ndarray[Any, Any]) -> None:
    """Change the size of a Keras variable. Keras has no method for this."""
    variable._value = tf.Variable(value, trainable=variable.trainable, name=variable.name)
    variable._shape = value.shape


class SharedBranch:
    """A rare branch that is traced once for all shards, which differ only in their resources.

    `tf.cond` would trace the branch for each shard and add all of its operations to the graph of a
    step. Tracing a table would take the chief longer than tracing the rest of a model, and each
    worker would prepare operations that are rarely needed. Here, the branch is a function of a
    shard's resources, and a single operation of the graph calls it when needed.
    """

    def __init__(self) -> None:
        """Create the branch, which is traced at its first use."""
        # Both branches, and the order in which they take their resources.
        self._traced: dict[object, tuple[Any, Any, list[int]]] = {}

    def run(  # noqa: PLR0913, PLR0917
        self,
        is_needed: tf.Tensor,
        work: Callable[..., tf.Tensor],
        given: Sequence[tf.Tensor],
        resources: Sequence[tf.Tensor],
        device: str,
        kind: Hashable = None,
    ) -> tf.Tensor:
        """Return `work(*given)` if `is_needed` is true. Otherwise, return the first of `given`.

        Outside of a graph, for example in a debugger, `work` runs as Python code.

        Args:
            is_needed: a bool scalar.
            work: a function from `given` to a tensor like the first of them. It may use only
                `resources`.
            given: tensors.
            resources: handles, in the same order for all shards. A different number of them needs
                another branch.
            device: the device of all resources.
            kind: everything else that `work` depends on. A different kind needs another branch.
        """
        if tf.executing_eagerly():
            return work(*given) if is_needed else given[0]
        signature = [tf.TensorSpec(each.shape, each.dtype) for each in given]
        key = (kind, tuple(signature), len(resources))
        if key not in self._traced:
            self._traced[key] = _trace(work, signature, resources)
        taken, passed, order = self._traced[key]
        (found,) = tf.raw_ops.If(
            cond=is_needed,
            input=[*given, *(resources[number] for number in order)],
            Tout=[given[0].dtype],
            then_branch=taken,
            else_branch=passed,
        )
        if tf.DeviceSpec.from_string(device).device_type != "CPU":
            # Inline the branches: a hash table is on the CPU, but a variable may be on a GPU, so no
            # device fits the whole operation.
            found.op._set_attr("_lower_using_switch_merge", tf.compat.v1.AttrValue(b=True))
        found.set_shape(given[0].shape)
        return found


def _trace(
    work: Callable[..., tf.Tensor],
    signature: Sequence[tf.TensorSpec],
    resources: Sequence[tf.Tensor],
) -> tuple[Any, Any, list[int]]:
    numbers = {id(each): number for number, each in enumerate(resources)}
    with tf.device(None):
        taken = tf.function(work, autograph=False).get_concrete_function(*signature)
        order = [numbers[id(each)] for each in taken.captured_inputs]
        handles = [tf.TensorSpec([], tf.resource)] * len(order)
        passed = tf.function(
            lambda *every: tf.identity(every[0]), autograph=False
        ).get_concrete_function(*signature, *handles)
    return taken, passed, order

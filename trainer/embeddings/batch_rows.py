"""The embedding rows of a batch: one message per server, and each row once.

A table is a layer that looks up rows of variables on servers: Keras's embedding, or
`ShardedEmbedding`, whose rows are split over several variables. `Lookups.find_ids` finds the ids of
a batch before the model runs: it prunes the graph of the forward pass to the operations that
compute the ids. For each server and dtype, one message then brings the rows that the model uses,
and one returns their gradients, summed per row.

A model has no `Lookups` if one of its tables must do its own lookup, such as a dynamic table or a
table with a regularizer. `find_ids` raises `Unforeseen` if the ids of a batch cannot be known in
advance, for example because they are computed from rows. In both cases, the layers of the model
look up their rows one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from flotilla.trainer.embeddings.sharded_embedding import spread

# Stateful operations that return the same value at each call: vocabulary lookups, and reads of
# variables that training does not change.
_SAME = ("Lookup", "HashTable", "VarHandle", "ReadVariable")
_NOT_DENSE = (tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices)
# For each table, a vector of ids or of places.
Vectors = list[tf.Tensor]


class RowsOnce(tf.IndexedSlices):
    """A sparse gradient without duplicate rows."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A layer with n variables. Row `id` of the layer is row `id div n` of variable `id mod n`."""

    layer: Any
    shards: tuple[keras.Variable, ...]
    known: Callable[[Any], tf.Tensor]

    @property
    def dimension(self) -> int:
        """The length of a row."""
        return int(self.shards[0].shape[1])


class Unforeseen(Exception):  # noqa: N818
    """The rows of a batch cannot be known before the model runs."""


class Lookups:
    """The lookups of a model's layers, which are intercepted while a graph is traced."""

    def __init__(self, tables: Sequence[Table]) -> None:
        """Replace the `call` of each layer. Outside of a trace, the layers behave as before."""
        self.tables = list(tables)
        #: The function that replaces lookups while it is set. It maps a table's number and ids to
        #: rows.
        self._answer: Callable[[int, tf.Tensor], tf.Tensor] | None = None
        for number, table in enumerate(self.tables):
            table.layer.call = self._wrap_call(number, table)

    def variables(self) -> list[keras.Variable]:
        """Return the variables of all tables."""
        return [shard for table in self.tables for shard in table.shards]

    def find_ids(
        self, forward: Callable[[Any], Sequence[tf.Tensor]], batch: Any
    ) -> tuple[Vectors, Vectors]:
        """Return the unique ids of each table, and their places in all of its lookups.

        `forward` runs the model and returns the tensors that it uses instead of variables. Raises
        `Unforeseen` if the ids depend on more than the batch.
        """
        ids = self._trace_ids(forward, batch)(*tf.nest.flatten(batch))
        unique, places = zip(*map(tf.unique, ids), strict=True)
        return list(unique), list(places)

    @contextmanager
    def answer(self, rows: Sequence[tf.Tensor], places: Sequence[tf.Tensor]) -> Iterator[None]:
        """Make the lookups in this block return `rows[places]` of each table, in order."""
        begins: list[Any] = [0] * len(self.tables)

        def answer(number: int, ids: tf.Tensor) -> tf.Tensor:
            begin = begins[number]
            begins[number] = begin + tf.size(ids)
            return spread(rows[number], places[number][begin : begins[number]])

        with self._set_answer(answer):
            yield

    def _trace_ids(
        self, forward: Callable[[Any], Sequence[tf.Tensor]], batch: Any
    ) -> Callable[..., Vectors]:
        if any(isinstance(each, _NOT_DENSE) for each in tf.nest.flatten(batch)):
            raise Unforeseen("accepts ragged or sparse tensors")
        asked: list[list[tf.Tensor]] = [[] for _ in self.tables]
        answers, variables = list[tf.Tensor](), list[tf.Tensor]()

        def compute_ids(*given: tf.Tensor) -> Vectors:
            graph = tf.compat.v1.get_default_graph()

            def answer(number: int, ids: tf.Tensor) -> tf.Tensor:
                if ids.graph is not graph:
                    raise Unforeseen("looks up rows in a branch or a loop")
                asked[number].append(ids)
                table = self.tables[number]
                answers.append(tf.zeros([tf.size(ids), table.dimension], table.shards[0].dtype))
                return answers[-1]

            with self._set_answer(answer):
                variables.extend(forward(tf.nest.pack_sequence_as(batch, given)))
            return [tf.concat(each, 0) if each else tf.zeros([0], tf.int64) for each in asked]

        specs = [tf.TensorSpec(each.shape, each.dtype) for each in tf.nest.flatten(batch)]
        try:
            traced = tf.compat.v1.wrap_function(compute_ids, specs)
        except (TypeError, ValueError, NotImplementedError) as error:
            raise Unforeseen(f"cannot be traced: {error}".partition("\n")[0]) from error
        handles = {id(shard.value.handle) for shard in self.variables()}
        if any(id(outer) in handles for outer, _ in traced.graph.captures):
            raise Unforeseen("uses a table for something other than lookups")
        ids = traced.graph.structured_outputs
        needed = _find_dependencies(ids)
        if needed & {each.op for each in answers}:
            raise Unforeseen("computes ids from rows")
        # The traced model uses zeros in place of the variables, so ids that are computed from
        # variables would be wrong.
        if needed & {each.op for each in variables}:
            raise Unforeseen("computes ids from variables")
        if any(each.op_def.is_stateful and not each.type.startswith(_SAME) for each in needed):
            raise Unforeseen("draws ids at random, or calls a function for them")
        # Drop the rest of the forward pass, which runs later with the actual rows.
        only: Callable[..., Vectors] = traced.prune(traced.inputs[: len(specs)], ids)
        return only

    @contextmanager
    def _set_answer(self, answer: Callable[[int, tf.Tensor], tf.Tensor]) -> Iterator[None]:
        before, self._answer = self._answer, answer
        try:
            yield
        finally:
            self._answer = before

    def _wrap_call(self, number: int, table: Table) -> Callable[..., Any]:
        directly = table.layer.call

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._answer is None:
                return directly(*args, **kwargs)
            (given,) = (*args, *kwargs.values())
            if isinstance(given, _NOT_DENSE):
                raise Unforeseen("looks up ids of a ragged or sparse tensor")
            ids = tf.convert_to_tensor(given)
            known = table.known(tf.reshape(tf.cast(ids, tf.int64), [-1]))
            shape = tf.concat([tf.shape(ids), [table.dimension]], 0)
            rows = tf.reshape(self._answer(number, known), shape)
            rows.set_shape([*ids.shape, table.dimension])
            return tf.cast(rows, table.layer.compute_dtype)

        return call


def find_lookups(model: keras.Model) -> Lookups | None:
    """Intercept the lookups of a built model. Other code must not replace `call` later.

    Return None if the model has no tables, or if any layer must do its own lookup.
    """
    layers = model._flatten_layers()
    found = [_make_table(each) for each in layers if is_table(each)]
    tables = [each for each in found if each is not None]
    # A spectral normalization changes rows outside of the optimizer.
    if any(isinstance(each, keras.layers.SpectralNormalization) for each in layers):
        return None
    return Lookups(tables) if tables and len(tables) == len(found) else None


def is_table(layer: Any) -> bool:
    """Return whether a layer looks up rows of its variables."""
    return isinstance(layer, keras.layers.Embedding) or getattr(layer, "looks_up", False)


def _make_table(layer: Any) -> Table | None:
    known: Callable[[Any], Any] | None
    if type(layer) is keras.layers.Embedding:
        if not layer.built or layer.lora_enabled or layer.quantization_mode:
            return None
        rows = layer.input_dim
        # As in Keras, count a negative id from the end.
        shards, known = (layer._embeddings,), lambda ids: tf.where(ids < 0, ids + rows, ids)
    else:
        # A layer with these attributes looks up rows as described for `Table`, unless a subclass
        # overrides `call`.
        shards, known = tuple(getattr(layer, "tables", ())), getattr(layer, "known", None)
        looks_up = next(each for each in type(layer).__mro__ if "call" in vars(each))
        if "known" not in vars(looks_up):
            return None
    if not shards or known is None:
        return None
    if any(not each.trainable or each.regularizer or each.constraint for each in shards):
        return None
    return Table(layer=layer, shards=shards, known=known)


def _find_dependencies(ends: Sequence[tf.Tensor]) -> set[Any]:
    """Return all operations on which the values of these graph tensors depend."""
    found, left = set[Any](), [each.op for each in ends]
    while left:
        op = left.pop()
        if op not in found:
            found.add(op)
            # Skip control inputs, such as checks, because they do not affect values.
            left += [each.op for each in op.inputs]
    return found


class Sent:
    """The ids of each table, sent to their servers in one message per server and dtype."""

    def __init__(self, tables: Sequence[Table], ids: Sequence[tf.Tensor]) -> None:
        """Send the unique ids, one vector for each table. Runs in a worker's graph."""
        self._tables = tables
        self._sizes = [tf.size(each) for each in ids]
        self._where: dict[tuple[int, int], tf.Tensor] = {}
        self._there: dict[tuple[int, int], tf.Tensor] = {}
        local = dict[tuple[int, int], tf.Tensor]()
        self._servers: dict[tuple[str, tf.DType], list[tuple[int, int]]] = {}
        for number, (table, wanted) in enumerate(zip(tables, ids, strict=True)):
            count = len(table.shards)
            shard_of = tf.cast(wanted % count, tf.int32)
            parts = tf.dynamic_partition(tf.range(self._sizes[number]), shard_of, count)
            for n, (shard, part) in enumerate(zip(table.shards, parts, strict=True)):
                key = (number, n)
                self._where[key], local[key] = part, tf.gather(wanted, part) // count
                together = self._servers.setdefault((shard.value.device, shard.value.dtype), [])
                together.append(key)
        self._send(local)

    def rows(self) -> list[tf.Tensor]:
        """Return the rows of each table, in the order of the ids, on the current device."""
        found = dict[tuple[int, int], tf.Tensor]()
        for (device, _), keys in self._servers.items():
            with tf.device(device):
                parts = [tf.gather(self._shard(key).value, self._there[key]) for key in keys]
                packed = tf.concat([tf.reshape(each, [-1]) for each in parts], 0)
            found.update(self._unpack(tf.identity(packed), keys))
        return [
            tf.ensure_shape(
                tf.dynamic_stitch(
                    [self._where[number, n] for n in range(len(table.shards))],
                    [found[number, n] for n in range(len(table.shards))],
                ),
                [None, table.dimension],
            )
            for number, table in enumerate(self._tables)
        ]

    def gradients(self, values: Sequence[tf.Tensor]) -> dict[int, RowsOnce]:
        """Return each variable's gradient on the variable's server, keyed by `id(variable)`."""
        found = dict[int, RowsOnce]()
        for (device, dtype), keys in self._servers.items():
            parts = [tf.gather(values[key[0]], self._where[key]) for key in keys]
            packed = tf.concat([tf.reshape(tf.cast(each, dtype), [-1]) for each in parts], 0)
            with tf.device(device):
                for key, part in self._unpack(tf.identity(packed), keys, there=True).items():
                    shard = self._shard(key)
                    shape = tf.constant(list(shard.shape), tf.int64)
                    found[id(shard)] = RowsOnce(part, self._there[key], shape)
        return found

    def _send(self, local: dict[tuple[int, int], tf.Tensor]) -> None:
        for (device, _), keys in self._servers.items():
            # If all row numbers fit into int32, send them as int32 to halve the message.
            rows = max(self._shard(key).shape[0] for key in keys)
            kind = tf.int32 if rows < tf.int32.max else tf.int64
            sizes = tf.stack([tf.size(local[key], kind) for key in keys])
            sent = tf.concat([sizes, *(tf.cast(local[key], kind) for key in keys)], 0)
            with tf.device(device):
                arrived = tf.identity(sent)
                sizes = arrived[: len(keys)]
                parts = tf.split(arrived[len(keys) :], sizes, num=len(keys))
                self._there.update(zip(keys, parts, strict=True))

    def _unpack(
        self, packed: tf.Tensor, keys: list[tuple[int, int]], *, there: bool = False
    ) -> dict[tuple[int, int], tf.Tensor]:
        places = self._there if there else self._where
        widths = [self._tables[number].dimension for number, _ in keys]
        sizes = [tf.size(places[key]) * width for key, width in zip(keys, widths, strict=True)]
        parts = tf.split(packed, tf.stack(sizes), num=len(keys))
        return {
            key: tf.reshape(part, [-1, width])
            for key, part, width in zip(keys, parts, widths, strict=True)
        }

    def _shard(self, key: tuple[int, int]) -> keras.Variable:
        return self._tables[key[0]].shards[key[1]]

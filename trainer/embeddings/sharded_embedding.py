"""An embedding whose rows are split over several variables, which may be on several servers.

Row `id` is row `id div shards` of shard `id mod shards`. Therefore, consecutive ids, which are
often equally popular, are on different servers. Each shard is a plain Keras variable, which the
strategy places. A server gathers its rows, and their gradient is `tf.IndexedSlices`, so the table
itself is never sent.

The optimizer applies this gradient on the server of the shard (`trainer/embeddings/row_updates.py`;
for measurements see `docs/decisions/0017-tables-of-embeddings.md`):

- Adam, AdamW, Adagrad, Ftrl and SGD are lazy: they update only the touched rows and their slots,
  unless `training.optimizer.dense_updates` is set.
- Other element-wise optimizers (RMSprop, Nadam and so on) update every row in every step, as
  defined by Keras. The network traffic is the same, but the work grows with the table.
- LAMB, Adafactor and Muon use a variable as a whole, so the number of shards affects the result.

XLA cannot compile the lookup, because its shapes depend on the ids. An exported SavedModel or
`.keras` file needs no custom code (`plain`).
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

UNKNOWN = ("error", "wrap")


@keras.saving.register_keras_serializable(package="flotilla")
class ShardedEmbedding(keras.layers.Layer):
    """An embedding layer from integers of any shape `[...]` to rows `[..., dimension]`.

    Unlike `keras.layers.Embedding`, this layer never counts a negative id from the end.
    """

    #: Strategies leave the variables on their servers instead of pulling them whole.
    looks_up = True

    def __init__(
        self,
        rows: int,
        dimension: int,
        *,
        shards: int = 2,
        initializer: Any = "uniform",
        unknown: str = "error",
        **kwargs: Any,
    ) -> None:
        """Store the arguments. `build` creates the variables.

        Args:
            rows: the number of rows. Ids go from 0 to `rows - 1`.
            dimension: the length of a row.
            shards: the number of variables that hold the rows. It belongs to the model, not to the
                cluster, so a checkpoint can only be restored with the same number. It may exceed
                the number of servers.
            initializer: the initializer of the shards. Each shard has its own seed.
            unknown: what to do with an id outside of the table: "error" raises
                InvalidArgumentError. "wrap" returns the row `id mod rows`, which a known id also
                uses.
            **kwargs: arguments of a Keras layer.

        Raises:
            ValueError: if a size is below 1, there are more shards than rows, or `unknown` has
                another value.
        """
        super().__init__(**kwargs)
        for name, value in {"rows": rows, "dimension": dimension, "shards": shards}.items():
            if value < 1:
                raise ValueError(f"{name}: {value!r} is not allowed; it must be at least 1")
        if shards > rows:
            raise ValueError(f"shards: {rows} rows cannot be split over {shards} shards")
        if unknown not in UNKNOWN:
            raise ValueError(f"unknown: {unknown!r} is not one of {', '.join(UNKNOWN)}")
        self.rows = rows
        self.dimension = dimension
        self.shards = shards
        self.initializer = keras.initializers.get(initializer)
        self.unknown = unknown
        self.supports_jit = False
        self.tables: list[keras.Variable] = []

    def build(self, _input_shape: Any) -> None:
        """Create the shards."""
        self.tables = [
            self.add_weight(
                name=f"shard_{shard}",
                shape=((self.rows - shard - 1) // self.shards + 1, self.dimension),
                initializer=self._initializer(shard),
                # Disable the automatic cast, because it would read the whole shard.
                autocast=False,
            )
            for shard in range(self.shards)
        ]

    def call(self, ids: tf.Tensor) -> tf.Tensor:
        """Return the rows of `ids` in the compute dtype of the layer."""
        known = self.known(tf.reshape(tf.cast(ids, tf.int64), [-1]))
        # Send each row once in each direction, even if the batch contains it several times. This
        # also matters because most Keras optimizers square a gradient before they sum the
        # duplicates of a row.
        wanted, places = tf.unique(known)
        found = tf.compat.v1.nn.embedding_lookup(
            [table.value for table in self.tables], wanted, partition_strategy="mod"
        )
        rows = tf.reshape(spread(found, places), tf.concat([tf.shape(ids), [self.dimension]], 0))
        rows.set_shape([*ids.shape, self.dimension])
        return tf.cast(rows, self.compute_dtype)

    def plain(self, ids: Any) -> Any:
        """Return the rows for a symbolic tensor of ids, from a single Keras embedding."""
        ids = keras.ops.cast(ids, "int64")
        if self.unknown == "wrap":
            ids = keras.ops.mod(ids, self.rows)
        else:
            # Keras counts a negative id from the end, so replace it with an invalid id.
            ids = keras.ops.where(ids < 0, keras.ops.full_like(ids, self.rows), ids)
        table = np.empty((self.rows, self.dimension), self.tables[0].dtype)
        for shard, each in enumerate(self.tables):
            table[shard :: self.shards] = each.numpy()
        return make_embedding(self, table)(ids)

    def compute_output_shape(self, input_shape: Any) -> tuple[int | None, ...]:
        """Return the shape of the rows for the shape of the ids."""
        return (*input_shape, self.dimension)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the layer, for saving."""
        return {
            **super().get_config(),
            "rows": self.rows,
            "dimension": self.dimension,
            "shards": self.shards,
            "initializer": keras.initializers.serialize(self.initializer),
            "unknown": self.unknown,
        }

    def known(self, ids: tf.Tensor) -> tf.Tensor:
        """Return the row numbers [n] of ids [n]. Strategies use it to find the rows of a batch."""
        if self.unknown == "wrap":
            return tf.math.floormod(ids, self.rows)
        inside = tf.logical_and(ids >= 0, ids < self.rows)
        # Check the ids, because a GPU would return zeros for an invalid id, without an error.
        message = f"{self.name}: ids outside of 0 to {self.rows - 1}:"
        check = tf.debugging.Assert(tf.reduce_all(inside), [message, tf.boolean_mask(ids, ~inside)])
        with tf.control_dependencies([check] if check is not None else []):
            return tf.identity(ids)

    def _initializer(self, shard: int) -> Any:
        """Return an initializer for a shard. A shared one would repeat its values in each shard."""
        if not isinstance(self.initializer, keras.initializers.Initializer):
            return self.initializer
        config = self.initializer.get_config()
        if isinstance(config.get("seed"), int):
            config["seed"] += shard
        return type(self.initializer).from_config(config)


def make_embedding(layer: keras.layers.Layer, rows: Any) -> keras.layers.Embedding:
    """Return a Keras embedding with these rows and with the name of `layer`."""
    found = keras.layers.Embedding(
        *rows.shape, name=layer.name, dtype=layer.dtype_policy, trainable=layer.trainable
    )
    found.build()
    found.set_weights([rows])
    return found


@tf.custom_gradient
def spread(rows: tf.Tensor, places: tf.Tensor) -> Any:
    """Return `rows[places]`. The gradient of a row is the sum over all of its positions."""

    def gradient(given: tf.Tensor) -> tuple[tf.Tensor, None]:
        return tf.math.unsorted_segment_sum(given, places, tf.shape(rows)[0]), None

    return tf.gather(rows, places), gradient

"""A queue on a server, by a name of its own.

`tf.queue.FIFOQueue` passes over the name that it is given and takes a number, which a later process
on the same servers takes again: it would share the queue with loops of the one before.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


class Line:
    """First in, first out; whoever takes from it waits until there is something."""

    def __init__(
        self,
        dtypes: Sequence[tf.DType],
        shapes: Sequence[Sequence[int]],
        *,
        name: str = "",
        handle: tf.Tensor | None = None,
    ) -> None:
        """Open a queue on the device of the scope, or use the one of `handle`."""
        self._dtypes = list(dtypes)
        self._shapes = [list(shape) for shape in shapes]
        self.handle = handle
        if handle is None:
            self.handle = tf.raw_ops.FIFOQueueV2(
                component_types=self._dtypes, shapes=self._shapes, shared_name=name
            )

    def like(self, handle: tf.Tensor) -> Line:
        """Return another queue of this kind."""
        return Line(self._dtypes, self._shapes, handle=handle)

    def put(self, *values: tf.Tensor) -> tf.Operation:
        """Put one element at the end."""
        return tf.raw_ops.QueueEnqueueV2(handle=self.handle, components=values)

    def take(self) -> list[tf.Tensor]:
        """Wait for an element and take it."""
        values = tf.raw_ops.QueueDequeueV2(handle=self.handle, component_types=self._dtypes)
        return [
            tf.ensure_shape(value, shape) for value, shape in zip(values, self._shapes, strict=True)
        ]

    def close(self) -> None:
        """Let everyone who waits fail."""
        tf.raw_ops.QueueCloseV2(handle=self.handle, cancel_pending_enqueues=True)

"""Parameter servers that were started again, to a chief that goes on.

TensorFlow connects a chief again with a worker that was restarted, and gives a server up: what it
held is gone, and the graphs that the chief has traced name it. Here the chief connects with the new
process as with a worker. Each variable of Python stays, and gets a new handle (`Remade`), which
takes the place of the old one in each graph that was traced. Nothing is built or traced again.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction


def connect_again(coordinator: tf.distribute.coordinator.ClusterCoordinator) -> None:
    """Connect with tasks that were restarted, and wait until all of the cluster answer.

    Raises:
        OpError: of TensorFlow, where a task is gone meanwhile.
    """
    cluster = coordinator._cluster
    # What connects with a worker that was restarted, on a thread of its own, may be at it.
    with cluster.failure_handler._cluster_update_lock:
        context.context().update_server_def(context.get_server_def())
    # The first losses of a server are passed over as a fault of the network.
    cluster._potential_ps_failures_count = [0] * len(cluster._potential_ps_failures_count)


class Remade:
    """What servers held that were started again: resources without their values."""

    def __init__(self, servers: Collection[int]) -> None:
        """Remake what these servers held, by their numbers."""
        self.servers = frozenset(servers)
        # The old and the new handle, by the `id` of the old one, which is kept for it.
        self._handles: dict[int, tuple[Any, Any]] = {}
        self._variables: list[tf.Variable] = []

    def was_on(self, device: str) -> bool:
        """Say whether what is on a device is gone."""
        spec = tf.DeviceSpec.from_string(device)
        return spec.job == "ps" and spec.task in self.servers

    def variable(self, variable: tf.Variable, value: Callable[..., Any] = tf.zeros) -> bool:
        """Make a variable again where it is gone, and return whether it was.

        Its first value is of `value`, from a shape and a type.
        """
        if not self.was_on(variable.device):
            return False
        if any(each is variable for each in self._variables):
            return True
        with tf.device(variable.device):
            first = value(variable.shape, variable.dtype)
            new = tf.Variable(first, trainable=False, shape=variable.shape)
        self.handle(variable.handle, new.handle)
        variable._handle = new.handle
        self._variables.append(variable)
        return True

    def handle(self, old: tf.Tensor, new: tf.Tensor) -> None:
        """Note the new handle of a resource."""
        self._handles[id(old)] = (old, new)

    def rebind(self) -> None:
        """Give the graphs of this process that were traced with old handles the new ones.

        TensorFlow has no list of them.
        """
        for each in gc.get_objects():
            if type(each) is not ConcreteFunction:
                continue
            captured = each._captured_inputs
            if any(id(one) in self._handles for one in captured):
                each.set_external_captures(
                    [
                        self._handles[id(one)][1] if id(one) in self._handles else one
                        for one in captured
                    ]
                )

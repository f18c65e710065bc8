"""Parameter servers that were started again, to a chief that goes on.

TensorFlow connects a chief again with a worker that was restarted, and gives a server up: what it
held is gone, and the graphs that the chief has traced name it. Here the chief connects with the new
process as with a worker. Each variable of Python stays, and gets a new handle (`Remade`), which
takes the place of the old one in each graph that was traced. Nothing is built or traced again.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction
from tensorflow.python.ops import handle_data_util
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable

from trainer.errors import ClusterLostError

# A channel that was refused again and again waits for seconds before it tries once more.
CONNECT_SECONDS, PAUSE_SECONDS = 20.0, 0.1
# What TensorFlow raises in the chief when a server that it relies on is gone or was restarted.
_LOST = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.FailedPreconditionError,
    tf.errors.NotFoundError,
)
# What it says of a server that was restarted, and connected again with a worker that was restarted:
# to the chief itself, and in the closure of a worker; see `_is_ps_failure` of its coordinator.
_RESTARTED = "some remote workers have been restarted"
_GONE = (
    ("remote target /job:ps", "unable to find the relevant tensor remote_handle"),
    # Also where a worker is connected again meanwhile, so that the chief knows no such device.
    ("/job:ps", "unknown device"),
)


def is_lost(error: Exception) -> bool:
    """Say whether an error means that a task, or a message to one, is gone; and not a bad step."""
    if isinstance(error, tf.errors.InternalError):
        # A message that was damaged on its way, so that the server cannot parse it.
        return "Unable to parse request" in str(error)
    if isinstance(error, tf.errors.InvalidArgumentError):
        text = str(error).lower()
        return _RESTARTED in text or any(all(each in text for each in one) for one in _GONE)
    return isinstance(error, (ClusterLostError, *_LOST))


def connect_again(coordinator: tf.distribute.coordinator.ClusterCoordinator) -> None:
    """Connect with tasks that were restarted, and wait until all of the cluster answer.

    Raises:
        OpError: of TensorFlow, where a task is gone meanwhile.
        ClusterLostError: the coordinator does not use a worker any more.
    """
    cluster = coordinator._cluster
    # A worker that was lost just before a server, and found it gone when it was connected again,
    # ends the coordinator's thread for it, or that of another worker, by an error in its books.
    living = {each.name for each in threading.enumerate()}
    for worker in cluster.workers:
        if f"WorkerClosureProcessingLoop-{worker.worker_index}" not in living:
            raise ClusterLostError(f"worker-{worker.worker_index} gets nothing to do any more")
    # What connects with a worker that was restarted, on a thread of its own, may be at it.
    with cluster.failure_handler._cluster_update_lock:
        _when_connected(lambda: context.context().update_server_def(context.get_server_def()))
    # The first losses of a server are passed over as a fault of the network.
    cluster._potential_ps_failures_count = [0] * len(cluster._potential_ps_failures_count)


def with_name(shape: Any, dtype: tf.DType, device: str, name: str) -> tf.Variable:
    """Return the variable of a device that has a name, and does not end with this process.

    It has no value where there is none of this name yet.
    """
    with tf.device(device):
        handle = tf.raw_ops.VarHandleOp(shape=shape, dtype=dtype, shared_name=name)
    handle = with_data(handle, shape, dtype)
    return BaseResourceVariable(
        handle=handle, shape=shape, dtype=dtype, trainable=False, handle_name=name, unique_id=name
    )


def without_name(shape: Any, dtype: tf.DType, device: str, first: tf.Tensor) -> tf.Variable:
    """Return a variable of a device that has a first value, which is there, and no name.

    It is two messages, and as `tf.Variable` five.
    """
    with tf.device(device):
        # No two variables are the same by it.
        name = context.anonymous_name()
        handle = tf.raw_ops.VarHandleOp(shape=shape, dtype=dtype, shared_name=name)
        tf.raw_ops.AssignVariableOp(resource=handle, value=first)
    handle = with_data(handle, shape, dtype)
    return BaseResourceVariable(
        handle=handle, shape=shape, dtype=dtype, trainable=False, handle_name="", unique_id=""
    )


class FirstValues:
    """First values of variables, of which those that are alike share one until they change."""

    def __init__(self) -> None:
        """Begin without a value."""
        self._made: dict[Any, tf.Tensor] = {}

    def of(
        self, shape: tf.TensorShape, dtype: tf.DType, device: str, value: Callable[..., Any]
    ) -> tf.Tensor:
        """Return what `value` makes of a shape and a type, on a device."""
        key = (tuple(shape), dtype, device, value)
        if key not in self._made:
            with tf.device(device):
                self._made[key] = value(shape, dtype)
        return self._made[key]


def with_data(handle: tf.Tensor, shape: Any, dtype: tf.DType) -> tf.Tensor:
    """Return the handle of a variable, with what TensorFlow notes of those that it makes itself."""
    handle._handle_data = handle_data_util.create_handle_data(tf.TensorShape(shape), dtype)
    return handle


class Remade:
    """What servers held that were started again: resources without their values."""

    def __init__(
        self, servers: Collection[int], names: Mapping[int, str] = MappingProxyType({})
    ) -> None:
        """Remake what these servers held, by their numbers.

        `names` are those of variables that have one, by their `id`; they keep it.
        """
        self.servers = frozenset(servers)
        self._names = names
        # The old and the new handle, by the `id` of the old one, which is kept for it.
        self._handles: dict[int, tuple[Any, Any]] = {}
        self._variables: list[tf.Variable] = []
        self._first = FirstValues()

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
        of = variable.shape, variable.dtype, variable.device
        first, name = self._first.of(*of, value), self._names.get(id(variable))
        if name:
            new = with_name(*of, name)
            new.assign(first, read_value=False)
        else:
            new = without_name(*of, first)
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

        Raises:
            ClusterLostError: one needs something of a lost server that was not made again.
        """
        # A large variable would be copied as it changes, as long as its first value is held too.
        self._first = FirstValues()
        functions = _traced()
        if any(map(self._forgets, functions)):
            # What nobody needs any more may have been of what is gone.
            del functions
            gc.collect()
            functions = _traced()
        for each in functions:
            if self._forgets(each):
                raise ClusterLostError(f"nobody knows how to make again what {each.name} uses")
            if any(id(one) in self._handles for one in each._captured_inputs):
                each.set_external_captures(self._renewed(each))

    def _renewed(self, function: ConcreteFunction) -> list[Any]:
        """Return what a function was traced with, with new handles in the place of old ones."""
        return [
            self._handles[id(one)][1] if id(one) in self._handles else one
            for one in function._captured_inputs
        ]

    def _forgets(self, function: ConcreteFunction) -> bool:
        """Say whether a function needs something that is gone, and was not made again."""
        made = {id(new) for _, new in self._handles.values()}
        return any(
            isinstance(one, tf.__internal__.EagerTensor)
            and id(one) not in made
            and self.was_on(one.device)
            for one in self._renewed(function)
        )

    def require_reached(self, workers: int) -> None:
        """Have each worker read of each server that was started again.

        One that was connected again while a server died looks for its old process, without end.

        Raises:
            OpError: of TensorFlow, where a worker does not reach a server.
        """
        smallest = {
            each.device: each
            for each in sorted(self._variables, key=lambda one: -(one.shape.num_elements() or 0))
        }

        @partial(tf.function, autograph=False)
        def read() -> tf.Tensor:
            found = []
            for device, variable in smallest.items():
                with tf.device(device):
                    found.append(tf.reshape(variable.read_value(), [-1])[:1])
            return tf.add_n([tf.reduce_sum(tf.cast(each, tf.float32)) for each in found])

        for number in range(workers if smallest else 0):
            # The worker splits the function, as it does its steps.
            with tf.device(f"/job:worker/replica:0/task:{number}/device:CPU:0"):
                _when_connected(lambda: read().numpy())


def _when_connected(work: Callable[[], Any]) -> None:
    """Do what fails as long as a channel waits before it tries again a server that is there."""
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            work()
        except tf.errors.UnavailableError:
            if time.monotonic() > deadline:
                raise
            time.sleep(PAUSE_SECONDS)
        else:
            return


def _traced() -> list[ConcreteFunction]:
    return [each for each in gc.get_objects() if type(each) is ConcreteFunction]

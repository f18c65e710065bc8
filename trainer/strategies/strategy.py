"""The interface of strategies, and the functions that they share.

A strategy builds the model on its devices, applies updates (the inner loop), and computes the sums
for validation. Saving, logging and decisions are left to `flotilla.trainer.training.loop`. The
variables of a checkpoint have the same paths under every strategy. `MeasuredCopy` is a copy of the
model in this process, which validation uses with the variables of a strategy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf
from tensorflow.python.autograph.impl import api

from flotilla.trainer.config.schema import Config
from flotilla.trainer.config.topology import Capabilities, Cluster, Task, find_topology
from flotilla.trainer.embeddings import embedding_table
from flotilla.trainer.optimizers.loss_scale import LossScale
from flotilla.trainer.optimizers.optimizers import AVERAGE, MODEL, find_averages, keep_averages
from flotilla.trainer.runtime import user_code
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.strategies.input_position import Position, Stream
from flotilla.trainer.strategies.server_state import ServerState

# As in Keras: inputs, labels and, optionally, example weights.
Batch = tuple[Any, ...]
# A function from model, batch and outputs to a scalar: the mean loss of the batch, including the
# losses that layers add.
Loss = Callable[[keras.Model, Batch, Any], tf.Tensor]
# A function of a model, a part's index and the number of parts. It returns sums for metrics.
Totals = Callable[[keras.Model, tf.Tensor, int], tf.Tensor]
Sums = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A model with its loss, optimizer and data.

    Attributes:
        build_model: builds the model. It is called once on each device that needs a copy.
        build_optimizer: creates the optimizer, not yet built.
        check: raises `ConfigError` if the configuration does not suit the model.
        loss: the mean loss of a batch. See `Loss`.
        chance_loss: the loss of an uninformed guess. A training loss far above it means divergence.
        batches: builds the endless training dataset of one task, with elements as in `Batch`. The
            function is traced, and runs in the working directory of a worker.
        totals: returns a vector of sums over a part of the validation examples. Every worker has
            all of these examples. It is traced like `batches`.
        stream: the examples by position. `data.partition: dynamic` uses it instead of `batches`.
        weighed: adds the training weights to a batch, for a model with its own `train_step`.
    """

    build_model: Callable[[], keras.Model]
    build_optimizer: Callable[[], keras.optimizers.Optimizer]
    loss: Loss
    chance_loss: float
    batches: Callable[[], tf.data.Dataset]
    check: Callable[[keras.Model], None] = field(default=lambda _model: None)
    totals: Totals = field(default=lambda _model, _part, _of: tf.zeros([0], tf.float64))
    stream: Stream | None = None
    weighed: Callable[[Batch], Batch] = field(default=lambda batch: batch)


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of one inner loop.

    Attributes:
        loss: the mean loss over the updates.
        metrics: JSON values for the history: staleness, dropped gradients, and `workers`, which
            maps a worker to its local steps and examples.
        global_step: the global step of the report, or None if the workers are now idle.
    """

    loss: float
    metrics: Mapping[str, Any] = field(default_factory=dict)
    global_step: int | None = None


class Strategy(ABC):
    """The base class of strategies, which apply updates to one model on one cluster."""

    #: The device that reads and writes checkpoints. It belongs to the leading task.
    io_device: str | None = None
    capabilities = Capabilities()
    #: Whether a graph is running for the first time, which includes tracing and compiling it.
    warming: bool = False
    #: The last global step that was read, or -1 before the first read.
    read_step: int = -1

    def __init__(self, config: Config, cluster: Cluster, task: Task) -> None:
        """Store the arguments without connecting to the cluster, which `build` does."""
        self.config, self.cluster, self.task = config, cluster, task
        self._copy: MeasuredCopy | None = None
        self.stream: Stream | None = None
        self.position = Position()

    def begin_visits(self, stream: Stream | None) -> None:
        """Start at the input position of `stream`, if there is one."""
        self.stream = stream
        self.position = stream.position if stream else Position()

    def advance_position(self, batches: int) -> None:
        """Advance the input position past `batches` batches."""
        if self.stream:
            examples = batches * self.config.training.batch_size
            self.position = self.position.advance([(0, examples)])

    def describe_position(self) -> dict[str, Any]:
        """Return the input position for a checkpoint, or an empty mapping without a stream."""
        return self.stream.to_json(self.position) if self.stream else {}

    @property
    def publishes(self) -> bool:
        """Whether this task writes the journal. Only one of the tasks with an outer loop does."""
        return True

    def barrier(self, *values: int) -> tuple[int, ...]:
        """Wait for all tasks that run the outer loop. Return the maximum of each value over them.

        All tasks must pass the same number of values. If a task is lost, TensorFlow raises an
        error.
        """
        return values

    def batches(self, problem: Problem, index: int = 0, of: int = 1) -> tf.data.Dataset:
        """Return every `of`-th batch of the stream or, without one, the batches of `problem`."""
        if not self.stream:
            return self.stack(problem.batches())
        return self.stack(self.stream.endless(self.config.training.batch_size, index, of))

    def stack(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        """Return stacks of `training.accumulate` batches, or `batches` if that number is 1."""
        parts = self.config.training.accumulate
        return batches.batch(parts, drop_remainder=True).prefetch(1) if parts > 1 else batches

    @abstractmethod
    def build(self, problem: Problem) -> None:
        """Connect to the cluster, and build the model, the optimizer and the input there."""

    @abstractmethod
    def run(self, steps: int) -> Report:
        """Apply `steps` updates. For errors about lost tasks, see `server_state.is_lost`."""

    def advance(self, steps: int, boundary: int) -> Report:
        """Apply about `steps` updates, at most up to the global step `boundary`.

        Workers may continue after it returns, until they reach the boundary or `rest` is called.
        """
        del boundary
        return self.run(steps)

    def rest(self) -> Report:
        """Stop the workers that are still running, and return the final report."""
        raise AssertionError("no worker is still running")

    def totals(self, problem: Problem) -> Sums:
        """Return the sums of `problem.totals` over all parts, with the current variables."""
        return self.measured_copy(problem).totals(self.variables(), 0, 1)

    def measured_copy(self, problem: Problem) -> MeasuredCopy:
        """Return the copy of the model in this process. The first call builds it."""
        if self._copy is None:
            self._copy = MeasuredCopy(problem.build_model, problem.totals)
        return self._copy

    @abstractmethod
    def global_step(self) -> int:
        """Return the number of updates applied to the model, over all attempts."""

    @abstractmethod
    def variables(self) -> Mapping[str, tf.Variable]:
        """Return the variables of a checkpoint: `model/...`, `optimizer/...`, `global_step`."""

    def refresh(self) -> None:  # noqa: B027
        """Update derived state after values were assigned to the variables."""

    @abstractmethod
    def learning_rate(self) -> float:
        """Return the learning rate of the next update."""

    def leave(self) -> None:  # noqa: B027
        """After the last checkpoint, wait until the other tasks with an outer loop may exit."""

    def find_state(self, uri: str) -> ServerState | None:  # noqa: ARG002
        """Return the state that an earlier attempt left on the servers. Called before `build`."""
        return None

    def settle(self, *, is_whole: bool) -> None:  # noqa: B027
        """Record whether the values on the servers are complete, so that they can be reused."""

    def close(self) -> None:  # noqa: B027
        """Disconnect from the cluster."""


class KerasStrategy(Strategy):
    """A strategy that builds a Keras `model` and `optimizer`, with the exact counter `applied`."""

    model: keras.Model
    optimizer: keras.optimizers.Optimizer
    applied: tf.Variable
    scale: LossScale | None = None

    def make_optimizer(self, problem: Problem) -> keras.optimizers.Optimizer:
        """Create the optimizer without building it. It averages the weights if configured."""
        optimizer = problem.build_optimizer()
        if self.config.training.ema:
            keep_averages(optimizer, self.config.training.ema)
        return optimizer

    def make_scale(self, *, gradients: int = 1, **options: Any) -> LossScale | None:
        """Create the loss scale on the current device, if the precision requires one."""
        training = self.config.training
        if training.mixed_precision != "float16":
            return None
        return LossScale(gradients=gradients * training.accumulate, **options)

    def resolver(self, **accelerators: int) -> tf.distribute.cluster_resolver.ClusterResolver:
        """Return a resolver with the cluster, this task, and its number of accelerators by kind."""
        return tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(self.cluster.spec()),
            task_type=self.task.role,
            task_id=self.task.index,
            rpc_layer="grpc",
            num_accelerators=accelerators,
        )

    def global_step(self) -> int:
        """Read the exact counter from its device."""
        self.read_step = int(self.applied.numpy())
        return self.read_step

    def variables(self) -> Mapping[str, tf.Variable]:
        """Return the variables of a checkpoint.

        For a mirrored variable, TensorFlow reads its first copy in this process.
        """
        named = checkpoint_variables(self.model, self.optimizer)
        return named | (self.scale.named if self.scale else {})

    def refresh(self) -> None:
        """Rebuild the index of each dynamic table from the assigned values."""
        embedding_table.restore_tables(self.model)

    def learning_rate(self) -> float:
        """Return the learning rate of the next update."""
        return float(tf.convert_to_tensor(self.optimizer.learning_rate))


def build_gradient(
    model: keras.Model, loss: Loss, *, jit: bool = False
) -> Callable[[Batch], tuple[tf.Tensor, list[Any]]]:
    """Return a function from a batch to its loss and the gradient of each trainable variable.

    The gradient of a lookup is `IndexedSlices`. `jit` requires local variables.
    """

    # AutoGraph converts only functions that the model passes to `tf.map_fn`.
    @api.call_with_unspecified_conversion_status
    def gradient(batch: Batch) -> tuple[tf.Tensor, list[Any]]:
        with tf.GradientTape() as tape:
            value = tf.cast(loss(model, batch, model(batch[0], training=True)), tf.float32)
        weights = [variable.value for variable in model.trainable_variables]
        # Use zeros if the loss ignores a variable, so that all replicas average the same list.
        unknown = tf.UnconnectedGradients.ZERO
        return value, tape.gradient(value, weights, unconnected_gradients=unknown)

    return tf.function(gradient, jit_compile=True, autograph=False) if jit else gradient  # type: ignore[no-any-return]


def has_own_step(model: keras.Model) -> bool:
    """Return whether a model has its own `train_step` instead of Keras's."""
    return type(model).train_step is not keras.Model.train_step


def build_own_step(
    model: keras.Model, optimizer: keras.optimizers.Optimizer, weighed: Callable[[Batch], Batch]
) -> Callable[[Batch], tf.Tensor]:
    """Return a function that runs the model's own `train_step` as one update."""
    # Call Keras's `compile`, because the model's `compile` may need other arguments. Without a loss
    # argument, Keras keeps the loss that the model was compiled with.
    keras.Model.compile(model, optimizer)
    counter = optimizer.iterations.value

    def step(batch: Batch) -> tf.Tensor:
        before = counter.read_value()
        # Without a reset, the logs of `train_step` would be means that include earlier steps.
        model.reset_metrics()
        logs = model.train_step(weighed(batch))
        counter.assign(before + 1)
        if "loss" not in logs:
            found = ", ".join(logs) or "an empty dictionary"
            raise ConfigError(f"its train_step must return a loss, but it returns {found}")
        return tf.cast(tf.convert_to_tensor(logs["loss"]), tf.float32)

    # Like `fit`, do not let AutoGraph convert the user's code.
    as_it_is: Callable[[Batch], tf.Tensor] = tf.autograph.experimental.do_not_convert(step)
    return as_it_is


def exact_counter(optimizer: keras.optimizers.Optimizer) -> tf.Variable:
    """Make the optimizer count every update once, and return its counter: the global step.

    Keras reads, adds and assigns, so concurrent increments get lost: when two workers applied 1,000
    steps, the counter reached 650 to 700. TensorFlow's `assign_add` is atomic on the server.
    """
    counter: tf.Variable = optimizer.iterations.value
    optimizer.iterations.assign_add = counter.assign_add
    return counter


def checkpoint_variables(
    model: keras.Model, optimizer: keras.optimizers.Optimizer
) -> dict[str, tf.Variable]:
    """Return the variables of a checkpoint, keyed by path, without the learning rate."""
    named = {f"{MODEL}{variable.path}": variable.value for variable in model.variables}
    averages = find_averages(optimizer)
    named |= {f"{AVERAGE}{path}": each.value for path, each in averages.items()}
    averaging = {id(each) for each in averages.values()}
    for variable in optimizer.variables:
        if id(variable) in averaging:
            continue
        if variable is not optimizer.iterations and variable.path.split("/")[-1] != "learning_rate":
            named[_free(f"optimizer/{variable.path}", named)] = variable.value
    named["global_step"] = optimizer.iterations.value
    return named


def _free(path: str, taken: Mapping[str, object]) -> str:
    """Return `path`, plus a number if taken, because Adafactor names all row factors `kernel`."""
    names = (f"{path}-{number}" if number else path for number in count())
    return next(name for name in names if name not in taken)


class MeasuredCopy:
    """A copy of the model on one device, for validation under any strategy."""

    def __init__(self, build_model: Callable[[], keras.Model], totals: Totals) -> None:
        """Build the copy.

        Connect to the cluster first, because connecting would remove the devices of the copy.
        """
        self._model = build_model()
        self._graph = tf.function(partial(totals, self._model))

    def totals(self, variables: Mapping[str, tf.Variable], part: int, of: int) -> Sums:
        """Assign the checkpoint `variables`, and return the sums over part `part` of `of`."""
        for variable in self._model.variables:
            variable.assign(variables[f"model/{variable.path}"])
        embedding_table.restore_tables(self._model)
        sums: Sums = self._graph(tf.constant(part), of).numpy()
        return sums


def create(config: Config, cluster: Cluster, task: Task) -> Strategy:
    """Create the strategy that `training.strategy` names, for a task. Raises `ConfigError`."""
    return find_class(config)(config, cluster, task)


def find_class(config: Config) -> type[Strategy]:
    """Return the class that `training.strategy` names. Raises `ConfigError`."""
    name = config.training.strategy
    implementation = find_topology(name).implementation
    strategy = user_code.find_named("training.strategy", implementation, "Strategy")
    if not (isinstance(strategy, type) and issubclass(strategy, Strategy)):
        raise ConfigError(f"training.strategy: {name!r} is not a subclass of Strategy")
    if former := [each for each in ("spares_workers", "mixes_steps") if hasattr(strategy, each)]:
        raise ConfigError(
            f"training.strategy: {name!r} sets {former[0]}, which is no longer supported; set "
            f"capabilities = Capabilities({former[0]}=True), from flotilla.trainer.config.topology"
        )
    if lacking := sorted(strategy.__abstractmethods__):
        raise ConfigError(f"training.strategy: {name!r} does not define {', '.join(lacking)}")
    if not issubclass(strategy, KerasStrategy):
        _refuse_updates(
            config, f"{name!r} is not derived from KerasStrategy, which this key requires"
        )
    return strategy


def require_updates(config: Config, model: keras.Model) -> None:
    """Raise `ConfigError` if the model does not support the configured kind of update."""
    embedding_table.require(config, model)
    if has_own_step(model):
        _refuse_updates(config, f"{type(model).__name__}.train_step applies its updates itself")
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.SpectralNormalization):
            why = f"{layer.name} (SpectralNormalization) changes weights outside the update"
            _refuse_updates(config, why, averages=False)


def _refuse_updates(config: Config, why: str, *, averages: bool = True) -> None:
    training = config.training
    is_set = {
        "accumulate": training.accumulate > 1,
        "mixed_precision": training.mixed_precision == "float16",
        "ema": averages and training.ema > 0,
    }
    for key, value in is_set.items():
        if value:
            raise ConfigError(f"training.{key}: {why}; leave the key out")

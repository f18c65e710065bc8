"""Problems for the strategies under test, and strategies on virtual devices."""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.losses.loss import unscale_loss_for_distribution
from keras.src.utils.naming import reset_uids
from tensorflow.python.data.experimental.ops.testing import sleep
from tensorflow.python.distribute import parameter_server_strategy_v2 as upstream

from flotilla.trainer import storage
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.schema import Config
from flotilla.trainer.data.blocks import complete, encode_blocks, fill_batches, parse_blocks
from flotilla.trainer.data.columns import make_columns, make_table
from flotilla.trainer.embeddings.embedding_table import EmbeddingTable
from flotilla.trainer.embeddings.sharded_embedding import ShardedEmbedding
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.models.spec import InputSpec
from flotilla.trainer.optimizers.optimizers import build_optimizer
from flotilla.trainer.strategies.async_parameter_server import AsyncParameterServer
from flotilla.trainer.strategies.mirrored import Replicated
from flotilla.trainer.strategies.strategy import Problem
from flotilla.trainer.tasks.base import Target, Task
from flotilla.trainer.tasks.classification import Classification
from flotilla.trainer.tasks.multi_output import MultiOutput
from flotilla.trainer.tasks.objective import Objective
from flotilla.trainer.tasks.regression import Regression
from tests.trainer.objectives import of_classes

FEATURES = 6
CLASSES = 3


def examples(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and labels that are the same in every process."""
    random = np.random.default_rng(seed)
    inputs = random.normal(size=(count, FEATURES)).astype("float32")
    return inputs, random.integers(0, CLASSES, size=count)


def number() -> tf.Tensor:
    """Return the index of the task that executes this graph."""
    return tf.strings.to_number(tf.io.read_file("number.txt"), tf.int64)


def seeded(build: Callable[[], keras.Model]) -> Callable[[], keras.Model]:
    """Make a function build a model with the same names and values in every process."""

    @wraps(build)
    def model() -> keras.Model:
        # `clear_session` would break a strategy's active scope.
        reset_uids()
        keras.utils.set_random_seed(7)
        return build()

    return model


def network(*layers: keras.layers.Layer) -> keras.Model:
    return keras.Sequential([keras.layers.Input((FEATURES,)), *layers])


@seeded
def two_layers() -> keras.Model:
    hidden = keras.layers.Dense(5, activation="tanh", name="hidden")
    return network(hidden, keras.layers.Dense(CLASSES, name="logits"))


def problem(
    batches: Callable[[], tf.data.Dataset],
    model: Callable[[], keras.Model] = two_layers,
    optimizer: str = "sgd",
    learning_rate: float = 0.1,
) -> Problem:
    objective = of_classes(CLASSES)
    return Problem(
        build_model=lambda: objective.attach(model()),
        build_optimizer=lambda: keras.optimizers.get(
            {"class_name": optimizer, "config": {"learning_rate": learning_rate}}
        ),
        loss=lambda model, batch, outputs: objective.loss(objective.attach(model), batch, outputs),
        chance_loss=objective.task.chance_loss(),
        batches=batches,
    )


def equal(batch_size: int = 8, **named: object) -> Problem:
    """Return a problem in which every worker gets the same batches in the same order."""

    def batches() -> tf.data.Dataset:
        data = tf.data.Dataset.from_tensor_slices(examples(10 * batch_size))
        return data.batch(batch_size, drop_remainder=True).repeat()

    return problem(batches, **named)


def located() -> Problem:
    """Return the problem `equal`, but with 100 times the task's index added to the loss."""
    known = equal()

    def loss(*of_batch: object) -> tf.Tensor:
        return known.loss(*of_batch) + 100 * tf.cast(number(), tf.float32)

    return replace(known, loss=loss)


def dealt(
    batch_size: int = 8, workers: int = 2, batches_each: int = 12, **named: object
) -> Problem:
    """Return a problem in which worker i of n gets every n-th batch.

    One batch per worker forms a batch n times as large.
    """
    data = examples(batches_each * batch_size * workers)
    return problem(lambda: in_turn(data, batch_size, workers), **named)


def in_turn(data: object, batch_size: int, workers: int) -> tf.data.Dataset:
    """Return every `workers`-th batch of the examples, starting at this worker's index."""
    batches = tf.data.Dataset.from_tensor_slices(data).batch(batch_size, drop_remainder=True)
    mine = batches.enumerate().filter(lambda i, _: i % workers == number())
    return mine.map(lambda _, batch: batch).repeat()


def of_ids(
    config: Config, looked_up: Callable[[Any], Any], example: Callable[[tf.Tensor], Any], batch: int
) -> Problem:
    """Return a two-class problem; `looked_up` maps IDs to the input of the last layer."""

    def build_model() -> keras.Model:
        keras.utils.set_random_seed(0)
        given = keras.Input((), dtype="int64")
        return keras.Model(given, keras.layers.Dense(2, name="logits")(looked_up(given)))

    objective = of_classes(2)
    return Problem(
        build_model=lambda: objective.attach(build_model()),
        build_optimizer=lambda: build_optimizer(config.training),
        loss=objective.loss,
        chance_loss=1.0,
        batches=lambda: tf.data.Dataset.counter().map(example).batch(batch),
    )


ROWS = 12


def net(spec: InputSpec) -> keras.Model:
    """Return a network with BatchNorm, Dropout and an L2 loss."""
    image = keras.Input(spec.shape, dtype=spec.dtype)
    hidden = keras.layers.Flatten()(keras.layers.Rescaling(1 / 255)(image))
    hidden = keras.layers.Dense(32, kernel_regularizer=keras.regularizers.L2(1e-4))(hidden)
    hidden = keras.layers.BatchNormalization()(hidden)
    hidden = keras.layers.Dropout(0.2)(keras.layers.ReLU()(hidden))
    return keras.Model(image, keras.layers.Dense(spec.num_classes)(hidden))


class Idle(keras.layers.Layer):
    def build(self, _shape: object) -> None:
        self.idle = self.add_weight(shape=(2,), name="idle")

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return inputs


def clipped(batch_size: int = 8, workers: int = 2) -> Problem:
    """Return a problem with an L2 loss, in which each step clips the gradient by its norm."""

    @seeded
    def model() -> keras.Model:
        decay = keras.regularizers.L2(0.1)
        hidden = keras.layers.Dense(5, activation="tanh", kernel_regularizer=decay)
        return network(hidden, Idle(), keras.layers.Dense(CLASSES))

    return replace(
        dealt(batch_size, workers),
        build_model=model,
        build_optimizer=lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.05),
    )


def normed(batch_size: int = 8, workers: int = 2) -> Problem:
    """Return a problem whose model has moving averages, which each step updates."""

    @seeded
    def model() -> keras.Model:
        layers = keras.layers
        return network(layers.Dense(5), layers.BatchNormalization(), layers.Dense(CLASSES))

    return replace(dealt(batch_size, workers), build_model=model)


def sharded(batch_size: int = 8, workers: int = 2) -> Problem:
    """Return a problem whose batches look up any number of rows in each part of a table."""
    return embedded(batch_size, workers, ShardedEmbedding)


def embedded(
    batch_size: int = 8,
    workers: int = 2,
    table: Callable[..., keras.layers.Layer] = keras.layers.Embedding,
) -> Problem:
    """Return a problem whose batches look up rows of a table, one of them several times."""

    @seeded
    def model() -> keras.Model:
        layers = [table(ROWS, 3), keras.layers.Flatten(), keras.layers.Dense(CLASSES)]
        return keras.Sequential([keras.layers.Input((4,), dtype="int64"), *layers])

    def batches() -> tf.data.Dataset:
        random = np.random.default_rng(0)
        count = 6 * batch_size * workers
        rows = random.integers(0, ROWS, size=(count, 4))
        return in_turn((rows, random.integers(0, CLASSES, size=count)), batch_size, workers)

    return problem(batches, model=model)


def regressed(batch_size: int = 8, workers: int = 2) -> Problem:
    """Return a problem with weighted examples, each with two labels that are standardized."""
    count = 12 * batch_size * workers
    random = np.random.default_rng(1)
    numbers = (50 + 10 * random.normal(size=(count, 2))).astype("float32")
    moments = {"mean": 50.0, "std": 10.0, "min": 0.0, "max": 100.0}
    target = Target(name="numbers", shape=(2,), dtype="float32", moments=moments)
    weights = random.uniform(0.5, 1.5, size=count).astype("float32")

    @seeded
    def model() -> keras.Model:
        return network(keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(2))

    data = (examples(count)[0], numbers, weights)
    task = Regression(target, standardize=True)
    return _of_task(task, model, lambda: in_turn(data, batch_size, workers))


def two_outputs(batch_size: int = 8, workers: int = 2) -> Problem:
    """Return a problem with a class and a number, whose losses have the weights 0.25 and 2."""
    inputs, classes = examples(12 * batch_size * workers)
    labels = {"kind": classes, "size": inputs.sum(axis=1)}
    parts = {
        "kind": Classification(Target(name="kind", shape=(), dtype="int64", num_classes=CLASSES)),
        "size": Regression(Target(name="size", shape=(), dtype="float32")),
    }

    @seeded
    def model() -> keras.Model:
        given = keras.Input((FEATURES,))
        hidden = keras.layers.Dense(5, activation="tanh")(given)
        heads = {"kind": keras.layers.Dense(CLASSES), "size": keras.layers.Dense(1)}
        return keras.Model(given, {name: head(hidden) for name, head in heads.items()})

    task = MultiOutput(parts, {"kind": 0.25, "size": 2.0})
    return _of_task(task, model, lambda: in_turn((inputs, labels), batch_size, workers))


def _of_task(
    task: Task, model: Callable[[], keras.Model], batches: Callable[[], tf.data.Dataset]
) -> Problem:
    objective = Objective(task)
    return replace(
        problem(batches),
        build_model=lambda: objective.attach(model()),
        loss=objective.loss,
        chance_loss=task.chance_loss(),
    )


class OwnLoss(keras.Sequential):
    """A model that computes its own loss and tracks its mean, as the Keras documentation shows."""

    def __init__(self, layers):
        super().__init__(layers)
        self.kept = keras.metrics.Mean(name="kept")

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        del x, sample_weight, training
        loss = keras.ops.mean(keras.ops.square(y_pred - keras.ops.one_hot(y, CLASSES)))
        self.kept.update_state(loss)
        return loss


class OwnStep(keras.Sequential):
    """A model that applies the gradient of twice its loss."""

    def train_step(self, data):
        inputs, labels, weights = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = 2 * self.compute_loss(inputs, labels, self(inputs, training=True), weights)
        found = tape.gradient(loss, [each.value for each in self.trainable_variables])
        self.optimizer.apply(found, self.trainable_variables)
        self._loss_tracker.update_state(unscale_loss_for_distribution(loss))
        return {"loss": self._loss_tracker.result()}


def _own(kind: type[keras.Sequential]) -> keras.Model:
    reset_uids()
    keras.utils.set_random_seed(7)
    shape = keras.layers.Input((FEATURES,))
    return kind([shape, keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(CLASSES)])


def computed(batch_size: int = 8, workers: int = 2) -> Problem:
    return replace(dealt(batch_size, workers), build_model=lambda: _own(OwnLoss))


def stepped(batch_size: int = 8, workers: int = 2) -> Problem:
    problem = dealt(batch_size, workers)
    objective = of_classes(CLASSES)
    return replace(problem, build_model=lambda: objective.attach(_own(OwnStep)))


def halved(problem: str, batch_size: int, workers: int) -> Problem:
    """Return a problem in which each batch of another problem is split into two halves."""
    whole = PROBLEMS[problem](batch_size, workers)
    return replace(whole, batches=lambda: whole.batches().rebatch(batch_size // 2))


def dropped(batch_size: int = 8) -> Problem:
    """Return a problem in which only Dropout makes the losses differ between tasks."""

    @seeded
    def model() -> keras.Model:
        layers = keras.layers
        return network(layers.BatchNormalization(), layers.Dropout(0.5), layers.Dense(CLASSES))

    def batches() -> tf.data.Dataset:
        random = np.random.default_rng(0)
        inputs = random.normal(size=(batch_size, FEATURES)).astype("float32")
        labels = random.integers(0, CLASSES, size=batch_size)
        # Each task adds its number to the inputs, so the moving averages must reflect different
        # means.
        shift = tf.cast(number(), tf.float32)
        data = tf.data.Dataset.from_tensors((inputs, labels))
        return data.map(lambda x, y: (x + shift, y)).repeat()

    return problem(batches, model=model)


PROBLEMS = {"clipped": clipped, "embedded": embedded, "computed": computed}
SEQUENCES, LONGEST, VOCABULARY = 60, 9, 12
SEQUENCE_FEATURES = {
    "tokens": FeatureSpec(shape=(None,), dtype="int64", stored="sequence"),
    "tokens_length": FeatureSpec(shape=(), dtype="int64", stored="int"),
    "label": FeatureSpec(shape=(), dtype="int64", stored="int", num_classes=CLASSES),
}


@seeded
def recurrent() -> keras.Model:
    """Return a small network with fixed weights that masks padding."""
    given = keras.Input((None,), dtype="int64")
    x = keras.layers.Embedding(VOCABULARY, 4, mask_zero=True, name="tokens")(given)
    x = keras.layers.GRU(5, name="gru")(x)
    return keras.Model(given, keras.layers.Dense(CLASSES, name="logits")(x))


def sequences(batch_size: int = 8) -> Problem:
    """Return a problem with equal batches, and an evaluation of 23 examples in six batches."""
    objective = of_classes(CLASSES)
    draw = np.random.RandomState(3)
    tokens = [draw.randint(1, VOCABULARY, draw.randint(0, LONGEST)) for _ in range(SEQUENCES)]
    given = {"tokens": tokens, "label": draw.randint(0, CLASSES, SEQUENCES)}
    table = make_table(SEQUENCE_FEATURES, make_columns(SEQUENCE_FEATURES, given))
    blocks = list(encode_blocks(SEQUENCE_FEATURES, table, 7))
    spec = DatasetSpec(
        features=SEQUENCE_FEATURES,
        inputs=("tokens",),
        targets=("label",),
        shards={"train": (SEQUENCES,)},
    )

    def batches() -> tf.data.Dataset:
        data = tf.data.Dataset.from_tensor_slices(blocks).repeat()
        windows = data.batch(2).map(lambda each: parse_blocks(SEQUENCE_FEATURES, each))
        filled = fill_batches(spec, windows, (3, 6), batch_size)
        found = filled.rebatch(batch_size, drop_remainder=True)
        found = found.map(lambda each: complete(SEQUENCE_FEATURES, each))
        return found.map(lambda each: (each["tokens"], each["label"]))

    def totals(model: keras.Model, part: tf.Tensor, of: int) -> tf.Tensor:
        random = np.random.default_rng(1)
        examples = random.integers(0, VOCABULARY, (23, 5)), random.integers(0, CLASSES, 23)
        mine = tf.data.Dataset.from_tensor_slices(examples).batch(4)
        mine = mine.shard(of, tf.cast(part, tf.int64))
        # Decimal digit i is the number of parts that worker i has evaluated.
        where = tf.cast([10 ** number()], tf.float64)
        return tf.concat([objective.totals(model, mine), where], 0)

    return replace(problem(batches, model=recurrent), totals=totals)


GROWING_BATCH = 16
TABLE = "table"


def ids_of(numbers: tf.Tensor) -> tf.Tensor:
    """Return raw 64-bit IDs that are far apart."""
    return numbers * (2**55 + 12345) - 2**62


def growing(ids: int, capacity: int, **training: object) -> Problem:
    """Return a problem with a growing table; its examples cycle through `ids` IDs."""
    config = parse_config({"training": training})

    def example(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return ids_of(number % ids), number % ids % 2

    def looked_up(given: Any) -> Any:
        return EmbeddingTable(capacity, 4, shards=3, name=TABLE)(given)

    return of_ids(config, looked_up, example, GROWING_BATCH)


FAILURE = "the well is dry"


def slowed(worker: int, times: int, microseconds: int) -> Problem:
    """Return a problem whose batches take `microseconds`, or `times` as long on one worker."""
    usual = equal()

    def batches() -> tf.data.Dataset:
        factor = tf.where(number() == worker, tf.constant(times, tf.int64), 1)
        return usual.batches().apply(sleep(factor * microseconds))

    return replace(usual, batches=batches)


def failing(worker: int, after: int) -> Problem:
    """Return a problem in which the input of one worker fails after some batches."""
    usual = equal()

    def checked(index: tf.Tensor, batch: tuple[tf.Tensor, tf.Tensor]) -> object:
        fine = (index < after) | (number() != worker)
        with tf.control_dependencies([tf.debugging.Assert(fine, [FAILURE])]):
            return tf.nest.map_structure(tf.identity, batch)

    return replace(usual, batches=lambda: usual.batches().enumerate().map(checked))


EXAMPLES = 192
# With a loss multiplied by this factor, the gradient at the initial loss scale overflows float16.
LARGE = 64.0


def dense(batch_size: int, workers: int = 1) -> Problem:
    """Return a problem whose examples have the same order for any number of workers."""
    each = EXAMPLES // (batch_size * workers)
    return dealt(batch_size, workers, each, model=two_layers, optimizer="adam", learning_rate=0.01)


def rows(batch_size: int, workers: int = 1) -> Problem:
    """Return the problem `embedded`, with the examples of `dense` as row numbers."""
    floats = dense(batch_size, workers).batches

    def batches() -> tf.data.Dataset:
        return floats().map(lambda x, y: (tf.cast(tf.abs(x[:, :4]) * 4, tf.int64) % ROWS, y))

    return replace(embedded(), batches=batches)


def exact(batch_size: int, workers: int = 1) -> Problem:
    return large(batch_size, workers, "")


def large(batch_size: int, workers: int = 1, precision: str = "float16") -> Problem:
    """Return a problem whose gradient overflows in float16 with the initial loss scale."""

    def model() -> keras.Model:
        keras.mixed_precision.set_global_policy(f"mixed_{precision}" if precision else "float32")
        network = two_layers()
        keras.mixed_precision.set_global_policy("float32")
        return network

    batches = dense(batch_size, workers).batches
    plain = problem(batches, model, learning_rate=0.1 / LARGE)
    return replace(plain, loss=lambda *args: plain.loss(*args) * LARGE)


class TwoDevices(Replicated):
    """A process with two replicas, as on a machine with two GPUs."""

    def replicate(self) -> tf.distribute.Strategy:
        (processor,) = tf.config.list_physical_devices("CPU")
        part = tf.config.LogicalDeviceConfiguration()
        tf.config.set_logical_device_configuration(processor, [part, part])
        return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


class TwoGpus(AsyncParameterServer):
    """Asynchronous training on workers that have two GPUs each."""

    def connect(self) -> None:
        listed = tf.config.list_logical_devices
        worker = "/job:worker/replica:0/task:0"

        def with_gpus(kind: str | None = None) -> list[tf.config.LogicalDevice]:
            gpus = [tf.config.LogicalDevice(f"{worker}/device:GPU:{n}", "GPU") for n in range(2)]
            return [*listed(kind), *gpus]

        tf.config.list_logical_devices = with_gpus
        upstream.config.list_logical_devices = with_gpus
        super().connect()
        tf.config.list_logical_devices = upstream.config.list_logical_devices = listed


def values_of(uri: str) -> dict[str, Any]:
    """Return the values of the model's variables in a checkpoint by key."""
    reader = tf.train.load_checkpoint(f"{storage.local_path(uri)}/variables")
    keys = [
        key for key in reader.get_variable_to_shape_map() if key.startswith("variables/model.S")
    ]
    return {key: reader.get_tensor(key) for key in keys}

"""Models and problems with what a cluster easily loses: state, L2, clipping, sparse rows.

`net` is a model for a configuration (`model.name=tests.cluster.stateful:net`); the others are
problems for `tests.cluster.servers.Trial`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import keras
import numpy as np
import tensorflow as tf
from keras.src.losses.loss import unscale_loss_for_distribution
from keras.src.utils.naming import reset_uids

from tests.cluster.problems import CLASSES, FEATURES, dealt, examples, in_turn, number, problem
from tests.trainer.objectives import of_classes
from trainer.models.sharded_embedding import ShardedEmbedding
from trainer.models.spec import InputSpec
from trainer.strategies.strategy import Problem
from trainer.tasks.base import Target, Task
from trainer.tasks.classification import Classification
from trainer.tasks.multi_output import MultiOutput
from trainer.tasks.objective import Objective
from trainer.tasks.regression import Regression

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
    """Has a variable that the loss does not know."""

    def build(self, _shape: object) -> None:
        self.idle = self.add_weight(shape=(2,), name="idle")

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return inputs


def clipped(batch_size: int = 8, workers: int = 2) -> Problem:
    """A loss with L2 in it and a gradient that is clipped by its global norm at every step."""

    def model() -> keras.Model:
        reset_uids()
        keras.utils.set_random_seed(7)
        decay = keras.regularizers.L2(0.1)
        return keras.Sequential(
            [
                keras.layers.Input((FEATURES,)),
                keras.layers.Dense(5, activation="tanh", kernel_regularizer=decay),
                Idle(),
                keras.layers.Dense(CLASSES),
            ]
        )

    return replace(
        dealt(batch_size, workers),
        build_model=model,
        build_optimizer=lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.05),
    )


def normed(batch_size: int = 8, workers: int = 2) -> Problem:
    """Moving averages that each step changes."""

    def model() -> keras.Model:
        reset_uids()
        keras.utils.set_random_seed(7)
        return keras.Sequential(
            [
                keras.layers.Input((FEATURES,)),
                keras.layers.Dense(5),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(CLASSES),
            ]
        )

    return replace(dealt(batch_size, workers), build_model=model)


def sharded(batch_size: int = 8, workers: int = 2) -> Problem:
    """A table in two parts: of each, a batch looks up any number of rows."""
    return embedded(batch_size, workers, ShardedEmbedding)


def embedded(
    batch_size: int = 8,
    workers: int = 2,
    table: Callable[..., keras.layers.Layer] = keras.layers.Embedding,
) -> Problem:
    """A table of which each batch looks up some rows, several times the same one."""

    def model() -> keras.Model:
        reset_uids()
        keras.utils.set_random_seed(7)
        return keras.Sequential(
            [
                keras.layers.Input((4,), dtype="int64"),
                table(ROWS, 3),
                keras.layers.Flatten(),
                keras.layers.Dense(CLASSES),
            ]
        )

    def batches() -> tf.data.Dataset:
        random = np.random.default_rng(0)
        count = 6 * batch_size * workers
        rows = random.integers(0, ROWS, size=(count, 4))
        return in_turn((rows, random.integers(0, CLASSES, size=count)), batch_size, workers)

    return problem(batches, model=model)


def regressed(batch_size: int = 8, workers: int = 2) -> Problem:
    """Two numbers an example, in units of their deviation, with weights of the examples."""
    count = 12 * batch_size * workers
    random = np.random.default_rng(1)
    numbers = (50 + 10 * random.normal(size=(count, 2))).astype("float32")
    moments = {"mean": 50.0, "std": 10.0, "min": 0.0, "max": 100.0}
    target = Target(name="numbers", shape=(2,), dtype="float32", moments=moments)
    weights = random.uniform(0.5, 1.5, size=count).astype("float32")

    def model() -> keras.Model:
        reset_uids()
        keras.utils.set_random_seed(7)
        hidden = keras.layers.Dense(5, activation="tanh")
        return keras.Sequential([keras.layers.Input((FEATURES,)), hidden, keras.layers.Dense(2)])

    data = (examples(count)[0], numbers, weights)
    task = Regression(target, standardize=True)
    return _of_task(task, model, lambda: in_turn(data, batch_size, workers))


def two_outputs(batch_size: int = 8, workers: int = 2) -> Problem:
    """A class and a number, whose losses weigh 0.25 and 2."""
    inputs, classes = examples(12 * batch_size * workers)
    labels = {"kind": classes, "size": inputs.sum(axis=1)}
    parts = {
        "kind": Classification(Target(name="kind", shape=(), dtype="int64", num_classes=CLASSES)),
        "size": Regression(Target(name="size", shape=(), dtype="float32")),
    }

    def model() -> keras.Model:
        reset_uids()
        keras.utils.set_random_seed(7)
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
    """Computes its loss, and keeps the mean of it as Keras documents it."""

    def __init__(self, layers):
        super().__init__(layers)
        self.kept = keras.metrics.Mean(name="kept")

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        del x, sample_weight, training
        loss = keras.ops.mean(keras.ops.square(y_pred - keras.ops.one_hot(y, CLASSES)))
        self.kept.update_state(loss)
        return loss


class OwnStep(keras.Sequential):
    """Applies the gradient of twice its loss."""

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
    """A loss that the model computes."""
    return replace(dealt(batch_size, workers), build_model=lambda: _own(OwnLoss))


def stepped(batch_size: int = 8, workers: int = 2) -> Problem:
    """A model that applies its updates."""
    problem = dealt(batch_size, workers)
    objective = of_classes(CLASSES)
    return replace(problem, build_model=lambda: objective.attach(_own(OwnStep)))


def halved(problem: str, batch_size: int, workers: int) -> Problem:
    """The batches of another problem in two halves, one after the other."""
    whole = PROBLEMS[problem](batch_size, workers)
    return replace(whole, batches=lambda: whole.batches().rebatch(batch_size // 2))


def dropped(batch_size: int = 8) -> Problem:
    """Each task has the same batches: losses that differ from task to task come from Dropout."""

    def model() -> keras.Model:
        reset_uids()
        keras.utils.set_random_seed(7)
        layers = keras.layers
        shape = layers.Input((FEATURES,))
        return keras.Sequential(
            [shape, layers.BatchNormalization(), layers.Dropout(0.5), layers.Dense(CLASSES)]
        )

    def batches() -> tf.data.Dataset:
        random = np.random.default_rng(0)
        inputs = random.normal(size=(batch_size, FEATURES)).astype("float32")
        labels = random.integers(0, CLASSES, size=batch_size)
        # The tasks differ in the mean of what they see, as the moving averages have to tell.
        shift = tf.cast(number(), tf.float32)
        data = tf.data.Dataset.from_tensors((inputs, labels))
        return data.map(lambda x, y: (x + shift, y)).repeat()

    return problem(batches, model=model)


PROBLEMS = {"clipped": clipped, "embedded": embedded, "computed": computed}

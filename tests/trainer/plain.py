"""A single-process strategy that trains a Keras model, and a problem for it."""

from collections.abc import Callable, Mapping
from functools import partial

import keras
import numpy as np
import tensorflow as tf

from flotilla.trainer.config.model import OptimizerConfig
from flotilla.trainer.config.schema import Config, TrainingConfig
from flotilla.trainer.config.topology import Cluster, Task
from flotilla.trainer.models.registry import reset_uids
from flotilla.trainer.optimizers.optimizers import build_optimizer
from flotilla.trainer.strategies.strategy import (
    Batch,
    Loss,
    Problem,
    Report,
    Strategy,
    build_gradient,
    checkpoint_variables,
    exact_counter,
)
from tests.trainer.objectives import of_classes

CLASSES = 3
NOBODY = Cluster(addresses={})
CHIEF = Task(role="chief", index=0)


def build_step(
    model: keras.Model, optimizer: keras.optimizers.Optimizer, loss: Loss
) -> Callable[[Batch], tf.Tensor]:
    """Return a function that applies the gradient of a batch and returns the loss."""
    gradient = build_gradient(model, loss)

    def step(batch: Batch) -> tf.Tensor:
        value, gradients = gradient(batch)
        optimizer.apply(gradients, model.trainable_variables)
        return value

    return step


class Plain(Strategy):
    """Implements the whole strategy interface without a cluster."""

    def __init__(
        self, config: Config | None = None, cluster: Cluster = NOBODY, task: Task = CHIEF
    ) -> None:
        super().__init__(config or Config(), cluster, task)

    def build(self, problem: Problem) -> None:
        self.model = problem.build_model()
        self.optimizer = problem.build_optimizer()
        self.optimizer.build(self.model.trainable_variables)
        self._global_step = exact_counter(self.optimizer)
        self._step = tf.function(build_step(self.model, self.optimizer, problem.loss))
        self._batches = iter(problem.batches())

    def run(self, steps: int) -> Report:
        losses = [float(self._step(next(self._batches))) for _ in range(steps)]
        return Report(loss=sum(losses) / steps)

    def global_step(self) -> int:
        return int(self._global_step.numpy())

    def variables(self) -> Mapping[str, tf.Variable]:
        return checkpoint_variables(self.model, self.optimizer)

    def learning_rate(self) -> float:
        return float(self.optimizer.learning_rate)


def examples() -> tuple[tf.Tensor, tf.Tensor]:
    """Return points in the plane, and for each the closest of three directions."""
    points = np.random.default_rng(0).normal(size=(60, 2)).astype(np.float32)
    directions = np.array([[1, 0], [-1, 1], [-1, -1]], np.float32)
    return tf.constant(points), tf.argmax(points @ directions.T, axis=1)


def whole(_start: int = 0) -> tf.data.Dataset:
    """Return an endless dataset with all examples in one batch; all attempts read the same."""
    return tf.data.Dataset.from_tensors(examples()).repeat()


def dense(dropout: float = 0.0, name: str = "hidden") -> keras.Model:
    """Return a small model with moving averages and, if it has dropout, a seed generator state."""
    reset_uids()
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Dense(8, activation="relu", name=name),
        keras.layers.BatchNormalization(name="norm"),
        *([keras.layers.Dropout(dropout, name="dropout")] if dropout else []),
        keras.layers.Dense(CLASSES, name="logits", kernel_regularizer="l2"),
    ]
    return keras.Sequential([keras.Input((2,)), *layers], name="dense")


def problem_of(
    model: Callable[[], keras.Model] = dense, optimizer: str = "adam", rate: float = 0.01
) -> Callable[[int], Problem]:
    """Return a function that makes the problem of an attempt from the attempt's first step."""

    def problem(start: int) -> Problem:
        objective = of_classes(CLASSES)
        settings = TrainingConfig(optimizer=OptimizerConfig(name=optimizer, learning_rate=rate))
        return Problem(
            build_model=lambda: objective.attach(model()),
            build_optimizer=partial(build_optimizer, settings),
            loss=objective.loss,
            chance_loss=objective.task.chance_loss(),
            batches=partial(whole, start),
        )

    return problem

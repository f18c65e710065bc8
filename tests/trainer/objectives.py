"""The objective of a classifier, for tests that define their own problem."""

from typing import Any

import keras
import tensorflow as tf

from flotilla.trainer.tasks.base import Target
from flotilla.trainer.tasks.classification import Classification
from flotilla.trainer.tasks.objective import Objective

#: Manifest fields of a dataset without weights, groups or target statistics.
NO_ROLES = {"weight": "", "group": "", "target_counts": {}, "target_moments": {}}


def of_classes(count: int) -> Objective:
    target = Target(name="label", shape=(), dtype="int64", num_classes=count)
    return Objective(Classification(target))


def cross_entropy(model: keras.Model, batch: tuple[Any, ...], outputs: Any) -> tf.Tensor:
    """Return the mean loss of a model's logits, plus the losses of its layers."""
    objective = of_classes(2)
    return objective.loss(objective.attach(model), batch, outputs)

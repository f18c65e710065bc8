"""One step of a model on two examples: the first ones of a dataset, or made up before there is one.

The values of those that are made up are such as no model should fail on: bytes of any value,
numbers from 0 to 1, whole numbers 0 and 1, the first two classes, short texts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer import storage, user_code
from trainer.config.schema import TrainingConfig
from trainer.data.read import evaluation_batches, stage_shards
from trainer.data.records import encode
from trainer.data.spec import DatasetSpec, FeatureSpec, length_name
from trainer.errors import ConfigError, UserError
from trainer.strategies.gradients import pulled_gradient_of
from trainer.strategies.strategy import gradient_of, has_own_step, own_step_of
from trainer.strategies.updates.loss_scale import LossScale
from trainer.tasks.objective import Objective
from trainer.training.optimizers import build_optimizer

EXAMPLES = 2
# Of what varies in length.
LENGTH = 4
# Of a shard that is fetched for them, in a step that asks for little disk.
MOST_BYTES = 1 << 30


def examples(spec: DatasetSpec) -> dict[str, Any]:
    """Return the examples, an array for each feature that a batch is made of."""
    random = np.random.default_rng(0)
    found = {name: _values(spec.features[name], random) for name in spec.roles}
    for name in spec.roles:
        if spec.features[name].varies:
            found[length_name(name)] = np.full(EXAMPLES, LENGTH, np.int64)
    if spec.weight:
        found[spec.weight] = np.ones_like(found[spec.weight])
    return found


def batches_of(spec: DatasetSpec, folder: Path, uri: str = "") -> tf.data.Dataset:
    """Return one batch: of the first shard of a dataset, or of examples that are made up."""
    if uri and _first_bytes(spec, uri) <= MOST_BYTES:
        shards = stage_shards(uri, folder, "train", of=len(spec.shards["train"]))
        return evaluation_batches(spec, shards, batch_size=EXAMPLES).take(1)
    path = folder / "made-up.tfrecord"
    with tf.io.TFRecordWriter(str(path)) as writer:
        made = examples(spec)
        features = {name: spec.features[name] for name in made}
        for record in encode(features, made):
            writer.write(record)
    return evaluation_batches(spec, [path], batch_size=EXAMPLES)


def _first_bytes(spec: DatasetSpec, uri: str) -> int:
    name = spec.files("train")[0]
    return sum(each.bytes for each in storage.read_manifest(uri).files if each.path == name)


def require_step(
    training: TrainingConfig,
    model: keras.Model,
    objective: Objective,
    batches: tf.data.Dataset,
) -> None:
    """Take one step, and measure; the model has values, and keeps them but for an own step.

    Raises:
        ConfigError: it fails, or its loss or a gradient is no finite number.
    """
    (batch,) = batches
    with _refused("a step"):
        loss, gradients = _step(training, model, objective, batch)
        largest = ""
        if training.mixed_precision == "float16":
            largest = f", or for a value beyond {np.finfo(np.float16).max:.0f}, the most of float16"
        _require_finite(loss, model, gradients, largest)
    with _refused("a validation"):
        objective.means(objective.totals(model, batches).numpy())


@contextmanager
def _refused(what: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    # Code of the user's may fail in any way.
    except Exception as error:
        line = user_code.line_of(error)
        raise ConfigError(f"{what} on two examples fails: {line}") from error


def _step(
    training: TrainingConfig, model: keras.Model, objective: Objective, batch: Any
) -> tuple[tf.Tensor, list[Any]]:
    optimizer = build_optimizer(training, objective.optimizer)
    if has_own_step(model):
        optimizer.build(model.trainable_variables)
        step = own_step_of(model, optimizer, objective.weighed)
        return tf.function(step, autograph=False)(batch), []
    gradient = gradient_of(model, objective.loss)
    if training.mixed_precision == "float16":
        scale = LossScale()
        gradient = pulled_gradient_of(model, objective.loss, jit=False, scale=scale, in_place=True)
    value, gradients = tf.function(gradient, autograph=False)(batch)
    return value, gradients


def _require_finite(
    loss: tf.Tensor, model: keras.Model, gradients: list[Any], further: str
) -> None:
    if not np.isfinite(loss.numpy()):
        raise ConfigError(
            f"its loss on two examples is {float(loss)}: look for a logarithm, a root or a "
            f"division of zero{further}"
        )
    values = [tf.convert_to_tensor(each).numpy() for each in gradients]
    for variable, value in zip(model.trainable_variables, values, strict=False):
        if not np.isfinite(value).all():
            raise ConfigError(
                f"the gradient of {variable.path} on two examples is not finite, though "
                f"the loss is: look for a root or a norm of zero{further}"
            )
    if values and not any(each.any() for each in values):
        raise ConfigError(
            "no variable has a gradient: the loss does not depend on what the model computes"
        )


def _values(feature: FeatureSpec, random: np.random.Generator) -> Any:
    shape = (EXAMPLES, *(LENGTH if size is None else max(size, 1) for size in feature.shape))
    if feature.dtype == "string":
        return np.full(shape, b"a", object)
    dtype = np.dtype(feature.dtype)
    if dtype.kind == "f":
        return random.random(shape).astype(dtype)
    if dtype == np.uint8 and not feature.num_classes:
        return random.integers(0, 256, shape).astype(dtype)
    # One of each, where an example is a single number.
    return (np.arange(np.prod(shape)).reshape(shape) % EXAMPLES).astype(dtype)

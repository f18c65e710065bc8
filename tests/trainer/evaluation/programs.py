"""Checkpoints as users' own programs would save them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

from flotilla.trainer import storage
from tests.trainer.small_run import GLOBAL_STEP, SmallRun

Write = Callable[[Path], object]


def publish(folder: Path, write: Write, **fields: Any) -> str:
    """Publish a program's checkpoint; `write` fills its model folder."""
    source = folder.with_name(f"{folder.name}-source")
    (source / "model").mkdir(parents=True)
    write(source / "model")
    said = {"checkpoint": "", "model": "model", "layout": "saved_model"}
    own = {"global_step": GLOBAL_STEP, "fingerprint": "0" * 8, "metrics": {}, "program": said}
    storage.publish(source, storage.uri_of(folder), kind="checkpoint", fields={**own, **fields})
    return storage.uri_of(folder)


def trained_by(run: SmallRun, write: Write, folder: Path) -> SmallRun:
    """Return the run with its checkpoint replaced by one of a program."""
    root = folder / "program"
    root.mkdir(parents=True)
    return dataclasses.replace(run, root=root, checkpoint=publish(root / "checkpoint", write))


def save(function: Callable[..., Any], takes: Mapping[str, tf.TensorSpec], **held: Any) -> Write:
    """Return a function that saves `function` with named inputs under the serving signature."""
    module = tf.Module()
    for name, value in held.items():
        setattr(module, name, value)

    def call(*values: Any) -> Any:
        return function(**dict(zip(takes, values, strict=True)))

    named = [tf.TensorSpec(each.shape, each.dtype, name=name) for name, each in takes.items()]
    concrete = tf.function(call, input_signature=named).get_concrete_function()
    return lambda folder: tf.saved_model.save(module, folder, {"serving_default": concrete})


def softmax_weights(run: SmallRun) -> tuple[tf.Variable, tf.Variable]:
    kernel, bias = (variable.numpy() for variable in run.model.variables)
    return tf.Variable(kernel), tf.Variable(bias)


def saved_softmax(run: SmallRun, *, activate: bool = True) -> Write:
    """Return a function that saves the run's model with flattened pixels as its only input `x`."""
    kernel, bias = softmax_weights(run)

    def answer(x: Any) -> dict[str, Any]:
        logits = x / 255.0 @ kernel + bias
        return {"y": tf.nn.softmax(logits) if activate else logits}

    return save(answer, {"x": tf.TensorSpec((None, 64))}, kernel=kernel, bias=bias)


def keras_softmax(run: SmallRun) -> keras.Model:
    """Return the run's model as a program would build it with Keras."""
    given = keras.Input((8, 8, 1))
    flat = keras.layers.Flatten()(keras.layers.Rescaling(1 / 255)(given))
    model = keras.Model(given, keras.layers.Dense(10, activation="softmax")(flat))
    model.layers[-1].set_weights([each.numpy() for each in run.model.variables])
    return model


def saved_by_tensorflow_1(run: SmallRun) -> Write:
    """Return a function that saves a TensorFlow 1 graph with variables on a parameter server."""
    v1 = tf.compat.v1
    values = [each.numpy() for each in run.model.variables]

    def write(folder: Path) -> None:
        with tf.Graph().as_default() as graph, v1.Session() as session:
            kernel, bias = (
                v1.get_variable(name, initializer=each, use_resource=False)
                for name, each in zip(("kernel", "bias"), values, strict=True)
            )
            x = v1.placeholder(tf.float32, (None, 64), name="x")
            y = tf.nn.softmax(tf.matmul(x / 255.0, kernel) + bias)
            session.run(v1.global_variables_initializer())
            place = folder / "1"
            v1.saved_model.simple_save(session, str(place), {"pixels": x}, {"scores": y})
            del graph
        _place_on_server(place / "saved_model.pb")

    return write


def _place_on_server(path: Path) -> None:
    proto = SavedModel.FromString(path.read_bytes())
    for node in proto.meta_graphs[0].graph_def.node:
        node.device = "/job:ps/task:0"
    path.write_bytes(proto.SerializeToString())

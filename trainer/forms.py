"""The written forms of a model: how each is written, and asked once it is read back from disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer import lite
from trainer.data.records import encode, parse
from trainer.data.spec import DatasetSpec
from trainer.signature import SERIALIZED, SERVING, serving_name

Inputs = Mapping[str, Any]
Answers = Mapping[str, np.ndarray[Any, np.dtype[np.floating[Any]]]]
Predictor = Callable[[Inputs], Answers]


@dataclass(frozen=True, kw_only=True)
class Form:
    """One written form of a model.

    Attributes:
        path: of the file below the model's directory; empty for the one that is laid out to be
            served, which `form_path` places.
        write: writes a model; the last argument are examples to calibrate with, by feature.
        read: returns one predictor for each way to ask it; all have to give the same answers.
        tolerance: largest difference of an answer from the original's.
        calibrated: whether answers are rounded by calibration; such a form may lose `tolerance` of
            accuracy instead.
    """

    path: str
    write: Callable[[keras.Model, DatasetSpec, Path, Inputs | None], None]
    read: Callable[[DatasetSpec, Path], tuple[Predictor, ...]]
    tolerance: float
    calibrated: bool = False


def form_path(form: str, name: str, version: int) -> str:
    """Return where a form stands below a model's directory.

    What is served lies as TensorFlow Serving and KServe take it: a number below the model's name.
    """
    return FORMS[form].path or f"serving/{name}/{version}"


def called(model: keras.Model, inputs: Inputs) -> tf.Tensor:
    """Return the logits of a model for inputs by feature name."""
    given = inputs if len(inputs) > 1 else next(iter(inputs.values()))
    return tf.cast(model(given, training=False), tf.float32)


def answers_of(logits: tf.Tensor) -> Answers:
    """Return what every form answers."""
    return {"logits": logits.numpy(), "probabilities": tf.nn.softmax(logits).numpy()}


def _serving(model: keras.Model, spec: DatasetSpec) -> tuple[Any, list[tf.TensorSpec]]:
    """Return the function that is served, and what it takes: one tensor an input feature."""

    def serve(*values: tf.Tensor) -> dict[str, tf.Tensor]:
        logits = called(model, dict(zip(spec.inputs, values, strict=True)))
        return {"logits": logits, "probabilities": tf.nn.softmax(logits)}

    takes = [
        tf.TensorSpec((None, *feature.shape), feature.dtype, name=serving_name(name))
        for name, feature in ((name, spec.features[name]) for name in spec.inputs)
    ]
    return serve, takes


def _write_saved_model(
    model: keras.Model, spec: DatasetSpec, path: Path, _calibration: Inputs | None
) -> None:
    serve, takes = _serving(model, spec)
    wanted = {name: spec.features[name] for name in spec.inputs}

    def serve_examples(examples: tf.Tensor) -> dict[str, tf.Tensor]:
        values = parse(wanted, examples)
        answers: dict[str, tf.Tensor] = serve(*(values[name] for name in spec.inputs))
        return answers

    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint(SERVING, serve, takes)
    records = [tf.TensorSpec((None,), tf.string, name="examples")]
    archive.add_endpoint(SERIALIZED, serve_examples, records)
    archive.write_out(path, verbose=False)


def _read_saved_model(spec: DatasetSpec, path: Path) -> tuple[Predictor, ...]:
    loaded = tf.saved_model.load(path)
    wanted = {name: spec.features[name] for name in spec.inputs}

    def ask(inputs: Inputs) -> Answers:
        given = {serving_name(name): values for name, values in inputs.items()}
        answers = loaded.signatures[SERVING](**given)
        return {name: values.numpy() for name, values in answers.items()}

    def ask_serialized(inputs: Inputs) -> Answers:
        batch = {name: np.asarray(values) for name, values in inputs.items()}
        records = tf.constant(list(encode(wanted, batch)))
        answers = loaded.signatures[SERIALIZED](examples=records)
        return {name: values.numpy() for name, values in answers.items()}

    return ask, ask_serialized


def _write_keras(
    model: keras.Model, _spec: DatasetSpec, path: Path, _calibration: Inputs | None
) -> None:
    model.save(path)


def _read_keras(_spec: DatasetSpec, path: Path) -> tuple[Predictor, ...]:
    loaded = keras.models.load_model(path, compile=False)
    return (lambda inputs: answers_of(called(loaded, inputs)),)


def _write_lite(
    model: keras.Model, spec: DatasetSpec, path: Path, calibration: Inputs | None
) -> None:
    serve, takes = _serving(model, spec)
    named = None
    if calibration is not None:
        named = {serving_name(name): np.asarray(each) for name, each in calibration.items()}
    path.write_bytes(lite.converted(serve, takes, named))


def _write_float(
    model: keras.Model, spec: DatasetSpec, path: Path, _calibration: Inputs | None
) -> None:
    _write_lite(model, spec, path, None)


def _read_lite(_spec: DatasetSpec, path: Path) -> tuple[Predictor, ...]:
    ask = lite.reader(path)

    def predict(inputs: Inputs) -> Answers:
        return ask({serving_name(name): np.asarray(values) for name, values in inputs.items()})

    return (predict,)


FORMS = {
    "saved_model": Form(path="", write=_write_saved_model, read=_read_saved_model, tolerance=1e-5),
    "keras": Form(path="model.keras", write=_write_keras, read=_read_keras, tolerance=1e-5),
    "tflite": Form(path="model.tflite", write=_write_float, read=_read_lite, tolerance=1e-4),
    "tflite_int8": Form(
        path="model_int8.tflite",
        write=_write_lite,
        read=_read_lite,
        tolerance=0.01,
        calibrated=True,
    ),
}

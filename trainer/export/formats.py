"""The formats of an exported model: how to write each, load it from disk, and call it.

The TensorFlow Lite files are converted from the serving function, with floats or 8-bit integers.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from ai_edge_litert.interpreter import Interpreter
from tensorflow.lite.python.convert_phase import ConverterError
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

from flotilla.trainer.data.blocks import encode_blocks, parse_rows
from flotilla.trainer.data.columns import make_columns, make_table
from flotilla.trainer.evaluation.signature import SERIALIZED, SERVING
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.features.names import argument_names
from flotilla.trainer.models import keras_file
from flotilla.trainer.tasks.base import Task
from flotilla.trainer.tasks.objective import cast_outputs

Arrays = Mapping[str, np.ndarray[Any, Any]]


def convert_to_tflite(
    serve: Callable[..., Any], takes: Sequence[tf.TensorSpec], calibration: Arrays | None
) -> bytes:
    """Convert a serving function to a TFLite file with the signature `serving_default`.

    Args:
        serve: maps tensors to a dictionary of tensors.
        takes: a named spec for each tensor.
        calibration: real examples, by argument. Weights and activations are quantized to 8 bits, in
            the ranges that occur for these examples. If None, the model keeps its floats.
    """
    # The calibrator cannot read variables, so they are first converted to constants.
    original = tf.function(serve, takes).get_concrete_function()
    frozen = convert_variables_to_constants_v2(original)
    names = sorted(original.structured_outputs)

    def constant(*values: tf.Tensor) -> dict[str, tf.Tensor]:
        # Freezing sorts the outputs by name, but drops the names. Restore them.
        return dict(zip(names, frozen(*values), strict=True))

    holder = tf.Module()
    function = tf.function(constant, takes).get_concrete_function()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        # Ignore warnings, because the converter uses a deprecated interpreter.
        warnings.simplefilter("ignore")
        # Skip custom gradients of lookups: if saving them fails, TensorFlow drops the signature.
        options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
        tf.saved_model.save(holder, folder, {SERVING: function}, options)
        converter = tf.lite.TFLiteConverter.from_saved_model(folder)
        if calibration is not None:
            converter.optimizations = [tf.lite.Optimize.DEFAULT]
            converter.representative_dataset = lambda: _one_by_one(calibration)
            converter.target_spec.supported_ops = [
                tf.lite.OpsSet.TFLITE_BUILTINS_INT8,
                tf.lite.OpsSet.TFLITE_BUILTINS,
            ]
        content: bytes = converter.convert()
    return content


def reader(path: Path) -> Callable[[Arrays], dict[str, Any]]:
    """Return a function that calls the TFLite file at `path` with arrays keyed by argument.

    If the file accepts only one example at a time, it is called once per example.
    """
    runner = Interpreter(model_path=str(path)).get_signature_runner(SERVING)
    takes = runner.get_input_details().values()

    def ask(arrays: Arrays) -> dict[str, Any]:
        if not all(each["shape_signature"][0] == 1 for each in takes):
            return dict(runner(**arrays))
        found = [runner(**one) for one in _one_by_one(arrays)]
        return {name: np.concatenate([each[name] for each in found]) for name in found[0]}

    return ask


def _one_by_one(arrays: Arrays) -> Iterator[dict[str, Any]]:
    count = len(next(iter(arrays.values())))
    for index in range(count):
        yield {name: values[index : index + 1] for name, values in arrays.items()}


Inputs = Mapping[str, Any]
Answers = Mapping[str, np.ndarray[Any, np.dtype[np.floating[Any]]]]
Predictor = Callable[[Inputs], Answers]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model, the task that defines its outputs, and the dataset that defines its inputs."""

    model: keras.Model
    task: Task
    spec: DatasetSpec

    def answers(self, inputs: Inputs) -> Answers:
        """Return the predictions that all formats must return for inputs keyed by feature."""
        return compute_answers(self.model, self.task, inputs)

    def arguments(self, inputs: Inputs) -> dict[str, Any]:
        """Convert inputs keyed by feature to the arguments of the serving signature."""
        names = argument_names(self.spec.inputs)
        return {names[feature]: np.asarray(values) for feature, values in inputs.items()}


@dataclass(frozen=True, kw_only=True)
class Format:
    """An export format.

    Attributes:
        path: the path of the file, relative to the model's folder, or empty for the SavedModel,
            whose path `format_path` returns.
        write: writes a model to a path. The last argument has calibration data, keyed by feature.
        read: returns a predictor for each way to call the model. All must predict the same.
        tolerance: the largest allowed relative difference of a prediction from the original's.
        calibrated: whether the format is quantized by calibration. If so, `tolerance` is how much
            worse the main metric may be.
    """

    path: str
    write: Callable[[Subject, Path, Inputs | None], None]
    read: Callable[[Subject, Path], tuple[Predictor, ...]]
    tolerance: float
    calibrated: bool = False


def format_path(form: str, name: str, version: int) -> str:
    """Return the path of a format, relative to the model's folder.

    The SavedModel has the layout that TensorFlow Serving and KServe expect: a version number below
    the name of the model.
    """
    return FORMATS[form].path or f"serving/{name}/{version}"


def call_model(model: keras.Model, task: Task, inputs: Inputs) -> Any:
    """Call a model with inputs that are keyed by feature, and return its outputs."""
    given = inputs if len(inputs) > 1 else next(iter(inputs.values()))
    return task.outputs(cast_outputs(model(given, training=False)))


def compute_answers(model: keras.Model, task: Task, inputs: Inputs) -> Answers:
    """Return the predictions of a model, as arrays, for inputs that are keyed by feature."""
    return {
        name: each.numpy() for name, each in task.answers(call_model(model, task, inputs)).items()
    }


def _serving(subject: Subject) -> tuple[Any, list[tf.TensorSpec]]:
    model, task, spec = subject.model, subject.task, subject.spec

    def serve(*values: tf.Tensor) -> dict[str, tf.Tensor]:
        return task.answers(call_model(model, task, dict(zip(spec.inputs, values, strict=True))))

    takes = [
        tf.TensorSpec((None, *spec.features[name].shape), spec.features[name].dtype, name=argument)
        for name, argument in argument_names(spec.inputs).items()
    ]
    return serve, takes


def operations(subject: Subject) -> set[str]:
    """Return the types of the operations in the serving function's graph."""
    serve, takes = _serving(subject)
    graph = tf.function(serve, takes).get_concrete_function().graph.as_graph_def()
    bodies = [graph.node, *(each.node_def for each in graph.library.function)]
    return {node.op for nodes in bodies for node in nodes}


def _write_saved_model(subject: Subject, path: Path, _calibration: Inputs | None) -> None:
    serve, takes = _serving(subject)
    spec = subject.spec
    wanted = {name: spec.features[name] for name in spec.inputs}

    def serve_examples(examples: tf.Tensor) -> dict[str, tf.Tensor]:
        values = parse_rows(wanted, examples)
        answers: dict[str, tf.Tensor] = serve(*(values[name] for name in spec.inputs))
        return answers

    archive = keras.export.ExportArchive()
    archive.track(subject.model)
    archive.add_endpoint(SERVING, serve, takes)
    records = [tf.TensorSpec((None,), tf.string, name="examples")]
    archive.add_endpoint(SERIALIZED, serve_examples, records)
    archive.write_out(path, verbose=False)


def _read_saved_model(subject: Subject, path: Path) -> tuple[Predictor, ...]:
    spec = subject.spec
    loaded = tf.saved_model.load(path)
    wanted = {name: spec.features[name] for name in spec.inputs}

    def call(signature: str, given: Mapping[str, Any]) -> Answers:
        answers = loaded.signatures[signature](**given)
        return {name: values.numpy() for name, values in answers.items()}

    def ask_serialized(inputs: Inputs) -> Answers:
        given = {name: np.asarray(inputs[name]) for name in wanted}
        table = make_table(wanted, make_columns(wanted, given))
        records = tf.constant(list(encode_blocks(wanted, table, 1)))
        return call(SERIALIZED, {"examples": records})

    return (lambda inputs: call(SERVING, subject.arguments(inputs))), ask_serialized


def _write_keras(subject: Subject, path: Path, _calibration: Inputs | None) -> None:
    keras_file.plain_model(subject.model).save(path)


def _read_keras(subject: Subject, path: Path) -> tuple[Predictor, ...]:
    loaded = keras_file.read(path)
    return (lambda inputs: compute_answers(loaded, subject.task, inputs),)


def _write_lite(subject: Subject, path: Path, calibration: Inputs | None) -> None:
    serve, takes = _serving(subject)
    named = None if calibration is None else subject.arguments(calibration)
    try:
        content = convert_to_tflite(serve, takes, named)
    except ConverterError:
        # A recurrent layer uses tensor lists, for which TFLite needs a fixed batch size.
        one = [tf.TensorSpec((1, *each.shape[1:]), each.dtype, name=each.name) for each in takes]
        content = convert_to_tflite(serve, one, named)
    path.write_bytes(content)


def _read_lite(subject: Subject, path: Path) -> tuple[Predictor, ...]:
    ask = reader(path)
    return (lambda inputs: ask(subject.arguments(inputs)),)


FORMATS = {
    "saved_model": Format(
        path="", write=_write_saved_model, read=_read_saved_model, tolerance=1e-5
    ),
    "keras": Format(path="model.keras", write=_write_keras, read=_read_keras, tolerance=1e-5),
    "tflite": Format(path="model.tflite", write=_write_lite, read=_read_lite, tolerance=1e-4),
    "tflite_int8": Format(
        path="model_int8.tflite",
        write=_write_lite,
        read=_read_lite,
        tolerance=0.01,
        calibrated=True,
    ),
}

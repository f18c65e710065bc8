"""The formats of an exported model: writes and loads each, and checks that all are equivalent.

The TensorFlow Lite files are converted from the serving function, with floats or 8-bit integers.

Each format is loaded from disk and predicts real examples. A new process, which has only the
written folder, also answers a request to the exported model. Because importing TensorFlow takes
seconds, the process starts early, and imports it while the model is being written.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from ai_edge_litert.interpreter import Interpreter
from tensorflow.lite.python.convert_phase import ConverterError
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

from flotilla.trainer.cluster import child_process
from flotilla.trainer.config.main_metric import LOSS
from flotilla.trainer.data.blocks import encode_blocks, parse_rows
from flotilla.trainer.data.columns import make_columns, make_table
from flotilla.trainer.embeddings.embedding_table import shrink
from flotilla.trainer.evaluation.signature import SERIALIZED, SERVING
from flotilla.trainer.events.progress import Work
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.features.names import argument_names
from flotilla.trainer.models import keras_file
from flotilla.trainer.runtime.errors import ConfigError, UserError
from flotilla.trainer.runtime.user_code import format_error
from flotilla.trainer.tasks.base import Part, Task
from flotilla.trainer.tasks.objective import Objective, cast_outputs

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

    def call(self, inputs: Inputs) -> Any:
        """Return the outputs of the model for inputs keyed by feature."""
        given = inputs if len(inputs) > 1 else next(iter(inputs.values()))
        return self.task.outputs(cast_outputs(self.model(given, training=False)))

    def answers(self, inputs: Inputs) -> Answers:
        """Return the predictions that all formats must return for inputs keyed by feature."""
        found = self.task.answers(self.call(inputs))
        return {name: each.numpy() for name, each in found.items()}

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


def _serving(subject: Subject) -> tuple[Any, list[tf.TensorSpec]]:
    task, spec = subject.task, subject.spec

    def serve(*values: tf.Tensor) -> dict[str, tf.Tensor]:
        return task.answers(subject.call(dict(zip(spec.inputs, values, strict=True))))

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
    return (replace(subject, model=keras_file.read(path)).answers,)


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


# Number of batches for measuring the metric of a quantized format.
MOST_BATCHES = 20
# Operations that call a Python function in the process that created the graph.
_IN_PYTHON = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}
_GROSS = 0.1
_LITE = {"tflite", "tflite_int8"}
# The converter's message for an operation that TensorFlow Lite does not support.
_NOT_LITE = re.compile(r"'tf\.(\w+)' op is neither")

REQUEST = "request.json"
SMOKE_EXAMPLES = 3
SMOKE_SECONDS = 300
_PROGRAM = Path(__file__).with_name("smoke_request.py")

Fresh = subprocess.Popen[str]
# Inputs keyed by feature, and (inputs, labels, weights) as the model and the task accept them.
Batch = tuple[Inputs, tuple[Any, Any, Any]]


@dataclass(frozen=True, kw_only=True)
class Original(Subject):
    """The model in memory, with real examples.

    `batches` returns a new iterator over batches of test examples. `calibration` has training
    examples by feature, or None if no format needs them.
    """

    objective: Objective
    batches: Callable[[], Iterator[Batch]]
    calibration: Inputs | None

    def first(self) -> Batch:
        """Return the first batch of test examples. Raises `UserError` if there is none."""
        for batch in self.batches():
            return batch
        raise UserError("cannot verify the exported model, because there are no test examples")

    def columns(self) -> list[dict[str, Any]]:
        """Return the columns of the predictions: `name`, `shape` for one example, and `dtype`."""
        inputs, _ = self.first()
        one = {name: np.asarray(values)[:1] for name, values in inputs.items()}
        return [
            {"name": name, "shape": list(each.shape[1:]), "dtype": each.dtype.name}
            for name, each in self.answers(one).items()
        ]


def prove(subject: Original, paths: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """Write every format to `folder`, load it, and compare its predictions with the original's.

    Returns:
        `examples`, the number of examples, and `formats` by name. A format has `max_difference`
        (see `largest_difference`) and the allowed `tolerance`. A quantized format also has the main
        `metric`, its `value`, the `original` value, the number of `examples` for both, and how much
        the value has `lost`.

    Raises:
        UserError: a format cannot be written or loaded, or its predictions differ by more than the
            tolerance.
    """
    inputs, _ = subject.first()
    count = len(next(iter(inputs.values())))
    expected = subject.answers(inputs)
    # Remove the unused rows of embedding tables, now that the expected predictions are computed.
    shrink(subject.model)
    formats: dict[str, Any] = {}
    for name, path in paths.items():
        form = FORMATS[name]
        with Work(f"writing {name} and reading it back"):
            readers = _write_form(name, form, subject, folder / path, subject.calibration)
            found = [_call_form(name, ask, inputs) for ask in readers]
        difference = float(np.max([largest_difference(expected, answers) for answers in found]))
        formats[name] = {"max_difference": difference, "tolerance": form.tolerance}
        if form.calibrated:
            formats[name] |= _measure_rounded(name, form, subject, readers[0])
        # This condition is also true for NaN.
        elif not difference <= form.tolerance:
            raise UserError(
                f"nothing is exported: in the format {name}, the model's predictions for {count} "
                f"test examples differ by up to {difference:g} from the original "
                f"({form.tolerance:g} is allowed)"
            )
    return {"examples": count, "formats": formats}


def _measure_rounded(name: str, form: Format, subject: Original, ask: Predictor) -> dict[str, Any]:
    """Compare a format's main metric, or its loss if that is undefined, with the original's."""
    objective, metric = subject.objective, subject.objective.main_metric
    own, original, count = [], [], 0
    for inputs, (_, labels, weights) in islice(subject.batches(), MOST_BATCHES):
        count += len(next(iter(inputs.values())))
        outputs = subject.task.outputs_of(_call_form(name, ask, inputs))
        own.append(objective.sums(Part(labels, outputs, weights, {})))
        original.append(objective.sums(Part(labels, subject.call(inputs), weights, {})))
    rounded, whole = (objective.means(np.sum(each, axis=0)) for each in (own, original))
    if metric not in rounded or metric not in whole:
        metric = LOSS
    value, expected = rounded[metric], whole[metric]
    lower = objective.directions[metric] == "lower"
    lost = (value - expected) / max(abs(expected), 1e-9) if lower else expected - value
    # Always allow one wrong prediction. With few examples, one may exceed the tolerance.
    if not lost <= max(form.tolerance, 1 / count):
        raise UserError(
            f"nothing is exported: in the format {name}, the model has {metric} {value:g} on "
            f"{count} test examples, but the original has {expected:g} (a loss of "
            f"{form.tolerance:g} is allowed); leave {name} out of export.formats"
        )
    found = {"metric": metric, "value": value, "original": expected}
    return {**found, "lost": lost, "examples": count}


def check_form(name: str, subject: Subject, path: Path, examples: Inputs) -> None:
    """Raise `ConfigError` if a model cannot be written in a format and then called.

    An untrained model may predict anything. Therefore only large differences are errors, and
    differences of TFLite are ignored.
    """
    expected = subject.answers(examples)
    for ask in _write_form(name, FORMATS[name], subject, path, examples):
        difference = largest_difference(expected, _call_form(name, ask, examples))
        if difference > _GROSS and name not in _LITE:
            raise ConfigError(
                f"export.formats: after saving as {name} and loading again, predictions differ by "
                f"{difference:g}: the model draws random numbers, or the get_config of a custom "
                "layer is incomplete"
            )


def require_served(subject: Subject) -> None:
    """Raise `ConfigError` if the model's graph cannot be traced, or calls Python."""
    try:
        found = operations(subject)
    # The user's classes run here and may raise any exception.
    except (Exception, SystemExit) as error:
        raise _not_alike("saved_model", error) from error
    if not _IN_PYTHON.isdisjoint(found):
        raise ConfigError(
            "export.formats: the model calls Python through tf.py_function or tf.numpy_function, "
            "which a server of a saved_model cannot run; use TensorFlow operations or keras.ops"
        )


def _write_form(
    name: str, form: Format, subject: Subject, path: Path, calibration: Inputs | None
) -> tuple[Predictor, ...]:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        form.write(subject, path, calibration if form.calibrated else None)
        return form.read(subject, path)
    except (OSError, tf.errors.OpError) as error:
        raise UserError(f"the model cannot be written as {name}: {format_error(error)}") from error
    # The user's classes run here and may raise any exception.
    except (Exception, SystemExit) as error:
        raise _not_alike(name, error) from error


def _call_form(name: str, ask: Predictor, inputs: Inputs) -> Answers:
    try:
        return ask(inputs)
    except (Exception, SystemExit) as error:
        raise _not_alike(name, error) from error


def _not_alike(name: str, error: BaseException) -> ConfigError:
    lacking = sorted({*_NOT_LITE.findall(str(error))}) if name in _LITE else []
    why = f"TensorFlow Lite has no {', '.join(lacking)}" if lacking else format_error(error)
    if "'untracked' resource" in str(error):
        why = (
            "it uses a table or a variable that is not an attribute of the model or of one of its "
            "layers"
        )
    remedy = "; define get_config in your own classes" if name == "keras" else ""
    if name != "saved_model":
        remedy += f"{', or' if remedy else ';'} leave {name} out"
    return ConfigError(
        f"export.formats: the model cannot be saved as {name} and loaded again: {why}{remedy}"
    )


def largest_difference(expected: Answers, found: Answers) -> float:
    """Return the largest relative difference between predictions, or NaN if one of them is NaN.

    A difference is divided by the largest of 1, the magnitude of the expected value, and the root
    mean square of the output's expected values, because the rounding error of a sum is relative to
    its largest terms.
    """
    # NumPy's maximum propagates NaN, but the result of Python's `max` depends on the order.
    return float(np.max([_relative(values, found[name]) for name, values in expected.items()]))


def _relative(expected: Any, found: Any) -> Any:
    usual = np.sqrt(np.mean(np.square(expected, dtype=np.float64)))
    return np.max(np.abs(found - expected) / np.maximum(np.abs(expected), max(1.0, usual)))


@contextmanager
def fresh_process(folder: Path) -> Iterator[Fresh]:
    """Start a process that will load and call the model in `folder`, and kill it at the end."""
    # With -I, Python ignores PYTHONPATH and the script's folder, so that the process cannot import
    # Flotilla.
    command = [sys.executable, "-I", str(_PROGRAM), str(folder)]
    with subprocess.Popen(
        command,
        cwd=folder,
        env=_environment(),
        encoding="utf-8",
        errors="replace",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _environment() -> dict[str, str]:
    # Without TF_USE_LEGACY_KERAS, TensorFlow imports Keras 3, which the process does not need.
    return {**os.environ, "TF_FORCE_GPU_ALLOW_GROWTH": "true", "TF_USE_LEGACY_KERAS": "1"}


def answer_in_process(
    subject: Original, folder: Path, saved_model: str, process: Fresh
) -> dict[str, Any]:
    """Write `request.json` to `folder`, let a new process answer it, and compare the predictions.

    Returns:
        `max_difference` of the predictions, and `milliseconds` for one example (the median).

    Raises:
        UserError: the process cannot load the model, or its predictions differ by more than the
            tolerance.
    """
    inputs, _ = subject.first()
    few = {name: np.asarray(values)[:SMOKE_EXAMPLES] for name, values in inputs.items()}
    given = subject.arguments(few)
    rows = zip(*(each.tolist() for each in given.values()), strict=True)
    instances = [dict(zip(given, map(_plain, row), strict=True)) for row in rows]
    request = {"signature_name": SERVING, "instances": instances}
    (folder / REQUEST).write_text(json.dumps(request) + "\n", encoding="utf-8")
    answer = _ask_process(process, saved_model)
    found = {name: np.array(values) for name, values in answer["answers"].items()}
    difference = largest_difference(subject.answers(few), found)
    tolerance = FORMATS["saved_model"].tolerance
    if not difference <= tolerance:
        raise UserError(
            f"nothing is exported: the predictions of a new process for {SMOKE_EXAMPLES} "
            f"examples differ by up to {difference:g} from the original ({tolerance:g} is allowed)"
        )
    return {"max_difference": difference, "milliseconds": answer["milliseconds"]}


def _plain(value: Any) -> Any:
    """Convert a value to the format of TensorFlow Serving's REST API."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"b64": base64.b64encode(value).decode()}


def _ask_process(process: Fresh, saved_model: str) -> dict[str, Any]:
    try:
        out, errors = process.communicate(saved_model, timeout=SMOKE_SECONDS)
    except subprocess.TimeoutExpired:
        raise UserError(
            f"nothing is exported: a new process did not respond within {SMOKE_SECONDS} s"
        ) from None
    try:
        return child_process.answer(process.returncode, out, errors)
    except child_process.ChildError as error:
        raise UserError(
            f"nothing is exported: a new process cannot serve the model: {error}"
        ) from None

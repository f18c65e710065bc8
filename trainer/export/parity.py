"""Checks that all formats of a model are equivalent: each is loaded and predicts real examples.

A new process, which has only the written folder, also answers a request to the exported model.
Because importing TensorFlow takes seconds, the process starts early, and imports it while the model
is being written.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from flotilla.trainer.cluster import child_process
from flotilla.trainer.config.main_metric import LOSS
from flotilla.trainer.embeddings.embedding_table import shrink
from flotilla.trainer.evaluation.signature import SERVING
from flotilla.trainer.events.progress import Work
from flotilla.trainer.export.formats import (
    FORMATS,
    Answers,
    Format,
    Inputs,
    Predictor,
    Subject,
    call_model,
    operations,
)
from flotilla.trainer.runtime.errors import ConfigError, UserError
from flotilla.trainer.runtime.user_code import format_error
from flotilla.trainer.tasks.base import Part
from flotilla.trainer.tasks.objective import Objective

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
        exact = call_model(subject.model, subject.task, inputs)
        original.append(objective.sums(Part(labels, exact, weights, {})))
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

"""TensorFlow Lite: convert a serving function, in floats or in 8 bits, and ask what was written."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from ai_edge_litert.interpreter import Interpreter
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

from trainer.signature import SERVING

Arrays = Mapping[str, np.ndarray[Any, Any]]


def converted(
    serve: Callable[..., Any], takes: Sequence[tf.TensorSpec], calibration: Arrays | None
) -> bytes:
    """Return a serving function as a TFLite file with the signature `serving_default`.

    Args:
        serve: from tensors to a mapping of tensors.
        takes: one spec with a name for each tensor.
        calibration: real examples by name: weights and activations are rounded to 8 bits within the
            ranges that these examples reach. Without, all stays in floats.
    """
    # The calibrator cannot read variables: they become constants first.
    original = tf.function(serve, takes).get_concrete_function()
    frozen = convert_variables_to_constants_v2(original)
    names = sorted(original.structured_outputs)

    def constant(*values: tf.Tensor) -> dict[str, tf.Tensor]:
        # Freezing keeps the order of the outputs, which is that of their names, and not the names.
        return dict(zip(names, frozen(*values), strict=True))

    holder = tf.Module()
    function = tf.function(constant, takes).get_concrete_function()
    with warnings.catch_warnings():
        # The converter warns of its own use of an interpreter that is deprecated.
        warnings.simplefilter("ignore")
        converter = tf.lite.TFLiteConverter.from_concrete_functions([function], holder)
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
    """Return a function from arrays by name to the answers of the TFLite file at `path`."""
    runner = Interpreter(model_path=str(path)).get_signature_runner(SERVING)

    def ask(arrays: Arrays) -> dict[str, Any]:
        return dict(runner(**arrays))

    return ask


def _one_by_one(calibration: Arrays) -> Iterator[dict[str, Any]]:
    count = len(next(iter(calibration.values())))
    for index in range(count):
        yield {name: values[index : index + 1] for name, values in calibration.items()}

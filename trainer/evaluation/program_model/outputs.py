"""Converts the outputs of a program's model to the outputs of its task: logits or numbers.

An output is recognized by its name: `logits`, `logit`, `probabilities`, `probability`, `prediction`
or `predictions`. If there are several targets, the name of an output is the name of its target, or
begins with it. A single output may have any name. Whether values are probabilities is set by
`program.outputs`, or inferred from the outputs for real examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from flotilla.trainer.evaluation.program_model.inputs import describe_tensor
from flotilla.trainer.features.names import argument_names, layer_name
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.tasks.base import Array, Task

AUTO, PROBABILITIES, LOGITS, NUMBERS = "auto", "probabilities", "logits", "numbers"
# How to interpret the values of an output with this name, or empty to infer this from the values.
_NAMED = {
    "logits": LOGITS,
    "logit": LOGITS,
    "probabilities": PROBABILITIES,
    "probability": PROBABILITIES,
    "prediction": NUMBERS,
    "predictions": "",
}
_TWO = 2
# Tolerance for the rounding errors of a sum of probabilities in half precision.
_NEARLY = 5e-3
_SMALLEST = float(np.finfo(np.float32).tiny)
_BELOW_ONE = float(np.nextafter(np.float32(1), np.float32(0)))


@dataclass(frozen=True, kw_only=True)
class Output:
    """The output of a model that one task uses.

    Attributes:
        name: the name of the output.
        taken: how its values are interpreted: probabilities, logits, or numbers.
        part: the task of this output.
        swap: whether the model treats the other of the two classes as positive.
    """

    name: str
    taken: str
    part: Task
    swap: bool = False

    def convert(self, value: Any) -> Any:
        """Convert a batch of the output, real or symbolic, to the form that the task expects."""
        value = keras.ops.cast(value, "float32")
        wanted, link = self.part.output_shape, self.part.link
        is_pair = wanted == (1,) and bool(link) and tuple(value.shape)[1:] == (_TWO,)
        if self.taken == PROBABILITIES and link == "sigmoid" and not is_pair:
            value = keras.ops.clip(value, _SMALLEST, _BELOW_ONE)
            value = keras.ops.log(value) - keras.ops.log1p(-value)
        elif self.taken == PROBABILITIES:
            value = keras.ops.log(keras.ops.clip(value, _SMALLEST, 1.0))
        if is_pair:
            value = value[:, 1:] - value[:, :1]
        elif len(value.shape) <= len(wanted):
            value = keras.ops.expand_dims(value, -1)
        elif len(value.shape) == len(wanted) + _TWO:
            value = keras.ops.squeeze(value, -1)
        mean, std = getattr(self.part, "scale", (0.0, 1.0))
        if (mean, std) != (0.0, 1.0):
            value = (value - mean) / std
        return -value if self.swap else value


def match_outputs(
    task: Task, answers: Mapping[str, Array], said: str, swapped: frozenset[str]
) -> dict[str, Output]:
    """For each output of a task, return the matching output of the model. Raises `UserError`.

    `answers` are the outputs for real examples, by name, and `said` is the value of
    `program.outputs`. `swapped` are the targets whose two classes have the opposite order in the
    dataset that the program read.
    """
    found = {}
    for name, part in task.parts.items():
        output, taken = _choose(name, part, answers, said)
        values = answers[output]
        _require_shape(output, values, part)
        if not taken or taken == NUMBERS:
            taken = _decide(values, part, said)
        swap = bool(part.positive_by) and part.target.name in swapped
        found[name] = Output(name=output, taken=taken, part=part, swap=swap)
    return found


def describe_taken(said: str, described: Mapping[str, Any]) -> list[str]:
    """Return a list with a sentence on how `auto` interpreted the outputs, or an empty list."""
    taken = described.get("program", {}).get("outputs", {}).values()
    found = {PROBABILITIES, LOGITS}.intersection(taken)
    if said != AUTO or not found:
        return []
    return [
        f"The outputs of the program's model were interpreted as {' and '.join(sorted(found))}; "
        "set program.outputs if that is wrong."
    ]


def _choose(name: str, part: Task, answers: Mapping[str, Array], said: str) -> tuple[str, str]:
    """Return the name of the output for a task, and the interpretation that the name implies."""
    prefix = (f"{name}_", f"{layer_name(name)}_") if name else ("",)
    named = {
        output: kind
        for answer, kind in _NAMED.items()
        for output in (f"{each}{answer}" for each in prefix)
        if output in answers
    }
    wanted = said if part.link and said != AUTO else ""
    for kind in (wanted, LOGITS, PROBABILITIES, NUMBERS, ""):
        for output, own in named.items():
            if own == kind:
                return output, own
    for output in (name, layer_name(name), *argument_names([name]).values()) if name else ():
        if output in answers:
            return output, ""
    if not name and len(answers) == 1:
        return next(iter(answers)), ""
    there = ", ".join(
        f"{each!r} ({describe_tensor(values.dtype.name, (None, *values.shape[1:]))})"
        for each, values in sorted(answers.items())
    )
    if name:
        raise UserError(
            f"the model returns {there}, but no output for {name!r}; name each output of the "
            "signature after its target"
        )
    raise UserError(
        f"the model returns {there}, but {part.name} uses only one output; name that output "
        f"{_own_name(part)!r} in the signature"
    )


def _own_name(part: Task) -> str:
    single = part.output_shape == (1,)
    if not part.link:
        return "prediction"
    return "probability" if single else "probabilities"


def _require_shape(name: str, values: Array, part: Task) -> None:
    given, wanted = values.shape[1:], part.output_shape
    said = describe_tensor(values.dtype.name, (None, *given))
    if values.dtype.kind not in "f" and values.dtype.name != "bfloat16":
        raise UserError(
            f"the output {name!r} is {said}, but {part.name} of {part.target} needs floats; return "
            f"{'a probability for each class' if part.link else 'the numbers'}"
        )
    is_pair = wanted == (1,) and bool(part.link) and given == (_TWO,)
    shapes = (given, (*given, 1), given[:-1] if given[-1:] == (1,) else given)
    if is_pair or any(_fits(shape, wanted) for shape in shapes):
        return
    sizes = ", ".join("any" if size < 0 else str(size) for size in wanted)
    each = ""
    if part.link and part.labels and len(given) == len(wanted):
        each = f": the label has {len(part.labels)} classes, but the model returns {given[-1]}"
    raise UserError(
        f"the output {name!r} is {said}, but {part.name} of {part.target} needs [any, "
        f"{sizes}]{each}"
    )


def _fits(given: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    return len(given) == len(wanted) and all(
        size in (-1, own) for own, size in zip(given, wanted, strict=True)
    )


def _decide(values: Array, part: Task, said: str) -> str:
    if not part.link:
        return NUMBERS
    if said != AUTO:
        return said
    numbers = values.astype(np.float64)
    if not (np.isfinite(numbers).all() and (numbers >= 0).all() and (numbers <= 1 + _NEARLY).all()):
        return LOGITS
    is_pair = part.output_shape == (1,) and values.shape[1:] == (_TWO,)
    is_sum = part.link == "softmax" or is_pair
    if is_sum and not np.allclose(numbers.sum(axis=-1), 1, rtol=0, atol=_NEARLY):
        return LOGITS
    return PROBABILITIES


def name_outputs(answers: Any, names: Any = ()) -> dict[str, Any]:
    """Return a model's outputs, keyed by name. Listed outputs get the given names, or numbers."""
    if isinstance(answers, Mapping):
        return dict(answers)
    if isinstance(answers, list | tuple):
        known = list(names) if len(names) == len(answers) else list(map(str, range(len(answers))))
        return dict(zip(known, answers, strict=True))
    return {"output": answers}


def to_array(value: Any) -> Array:
    """Convert a tensor to an array, and bfloat16 to float32."""
    if getattr(value, "dtype", None) == tf.bfloat16:
        value = tf.cast(value, tf.float32)
    return np.asarray(value)

"""Loads the model that a user's program has written, and returns it as a Keras model.

The Keras model accepts the features of the dataset and returns the outputs that its task expects,
so that it can be evaluated, compared, exported and served like a model trained by Flotilla.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from flotilla.trainer.checkpoints.checkpoints import RestoredCheckpoint
from flotilla.trainer.evaluation.program_model import inputs, outputs
from flotilla.trainer.evaluation.program_model.files import (
    SAVED_MODEL,
    Callee,
    find_model,
    read_model,
)
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.models.spec import InputSpec
from flotilla.trainer.runtime import user_code
from flotilla.trainer.runtime.errors import ConfigError, UserError
from flotilla.trainer.tasks.objective import Objective

PROGRAM = "program"


@dataclass(frozen=True, kw_only=True)
class ProgramModel:
    """A program's model, its layout, and how each of its outputs was interpreted."""

    model: keras.Model
    layout: str
    taken: Mapping[str, str]

    def describe(self) -> dict[str, Any]:
        """Return the entry for `metrics.json` and for a model's manifest."""
        return {"layout": self.layout, "outputs": dict(self.taken)}


def is_saved_model(fields: Mapping[str, Any]) -> bool:
    """Return whether `metrics.json` or a manifest describes a program's SavedModel."""
    described = fields.get(PROGRAM)
    return isinstance(described, Mapping) and described.get("layout") == SAVED_MODEL


def load_program_model(
    found: RestoredCheckpoint,
    spec: DatasetSpec,
    objective: Objective,
    examples: Mapping[str, Any],
    said: str,
) -> ProgramModel:
    """Load the model from a fetched checkpoint of a program.

    `examples` are real examples, keyed by feature. `said` is the value of `program.outputs`.
    Raises `UserError` if there is no model, or if it does not fit the dataset and the task.
    """
    place = str((found.fields.get(PROGRAM) or {}).get("model") or "")
    folder = found.folder / place
    if not place or not folder.is_dir():
        raise UserError(
            f"{found.uri} has no model; let the program write a SavedModel or a .keras file to "
            "FLOTILLA_MODEL, or set program.after_training: stop"
        )
    paths = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    try:
        layout, path = find_model(paths)
        callee = read_model(folder / path, layout)
        return _wrap(callee, spec, objective, examples, said)
    except ConfigError as error:
        raise UserError(f"the program's model in {found.uri}: {error}") from error
    except UserError as error:
        raise UserError(f"the program's model in {found.uri}: {error}") from error


def _wrap(
    callee: Callee,
    spec: DatasetSpec,
    objective: Objective,
    examples: Mapping[str, Any],
    said: str,
) -> ProgramModel:
    takes = callee.takes
    features = {name: name for name in spec.inputs}
    if takes is not None:
        features = inputs.match_arguments(spec, takes)

    def ask(given: Mapping[str, Any]) -> dict[str, Any]:
        arguments = {
            name: given[feature]
            if takes is None
            else inputs.convert(given[feature], spec.features[feature], takes[name])
            for name, feature in features.items()
        }
        return callee.call(arguments)

    answers = _answer(ask, examples)
    swapped = frozenset(spec.swapped)
    matched = outputs.match_outputs(objective.task, answers, said, swapped)
    wanted = InputSpec.of(spec.features, spec.inputs, objective.task.output_shape)
    symbols = wanted.symbols()
    named = symbols if isinstance(symbols, Mapping) else {spec.inputs[0]: symbols}
    given = ask(named)
    found = {
        name: keras.layers.Identity(name=f"flotilla_output_{place}")(each.convert(given[each.name]))
        for place, (name, each) in enumerate(matched.items())
    }
    result = found.get("", found)
    model = keras.Model(symbols, result, name="program_model")
    objective.accept(model, result)
    taken = {name: each.taken for name, each in matched.items()}
    return ProgramModel(model=model, layout=callee.layout, taken=taken)


def _answer(ask: Any, examples: Mapping[str, Any]) -> dict[str, Any]:
    rows = len(next(iter(examples.values())))
    try:
        given = {name: tf.convert_to_tensor(values) for name, values in examples.items()}
        answers = {name: outputs.to_array(each) for name, each in ask(given).items()}
    # A user's model may raise any exception.
    except Exception as error:
        raise UserError(
            f"the model fails on {rows} examples of the dataset: {user_code.short_message(error)}"
        ) from error
    for name, values in answers.items():
        if not values.ndim or len(values) != rows:
            raise UserError(
                f"the output {name!r} has shape {list(values.shape)} for {rows} examples; return "
                "one row for each example"
            )
    return answers

"""The proof that every written form is the same model: real examples, answered from disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer.data.spec import DatasetSpec
from trainer.errors import UserError
from trainer.figures import Labels
from trainer.forms import FORMS, Answers, Form, Inputs, Predictor, answers_of, called
from trainer.models.registry import first_line

# Batches of which a form that is rounded shows its accuracy.
MOST_BATCHES = 20

Batch = tuple[Inputs, Labels]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The original: the model in memory, its dataset, and real examples.

    Attributes:
        model: with its weights.
        spec: of the dataset.
        batches: returns the test examples anew: inputs by feature name, and labels.
        calibration: training examples by feature name, where a form needs them.
    """

    model: keras.Model
    spec: DatasetSpec
    batches: Callable[[], Iterator[Batch]]
    calibration: Inputs | None

    def first(self) -> Batch:
        """Return the first batch of test examples; raises `UserError` where there is none."""
        for batch in self.batches():
            return batch
        raise UserError("there are no test examples: the exported model cannot be proved")


def prove(subject: Subject, paths: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """Write every form to its path below `folder`, read it back, and hold its answers.

    Returns:
        `examples`, and `formats` by name: `max_difference` (of values within -1..1 absolute, of
        larger ones relative) and the `tolerance` it kept to; of a form that is rounded `accuracy`,
        and `original_accuracy` on the same examples, which may differ by `tolerance`.

    Raises:
        UserError: a form cannot be written or read back, or answers otherwise.
    """
    inputs, labels = subject.first()
    expected = answers_of(called(subject.model, inputs))
    formats: dict[str, Any] = {}
    for name, path in paths.items():
        form = FORMS[name]
        readers = _written(name, form, subject, folder / path)
        found = [_asked(name, ask, inputs) for ask in readers]
        difference = max(_difference(expected, answers) for answers in found)
        formats[name] = {"max_difference": difference, "tolerance": form.tolerance}
        if form.calibrated:
            formats[name] |= _accuracies(name, form, subject, readers[0])
        # Written so that a NaN fails too.
        elif not difference <= form.tolerance:
            raise UserError(
                f"nothing is exported: as {name} the model's answers to {len(labels)} test "
                f"examples differ by up to {difference:g} from the original ({form.tolerance:g} "
                "is allowed)"
            )
    return {"examples": len(labels), "formats": formats}


def _accuracies(name: str, form: Form, subject: Subject, ask: Predictor) -> dict[str, Any]:
    count = own = original = 0
    for inputs, labels in islice(subject.batches(), MOST_BATCHES):
        count += len(labels)
        logits = called(subject.model, inputs).numpy()
        original += int((logits.argmax(axis=1) == labels).sum())
        own += int((_asked(name, ask, inputs)["logits"].argmax(axis=1) == labels).sum())
    # Of few examples one alone is more than the tolerance.
    if original - own > max(form.tolerance * count, 1):
        raise UserError(
            f"nothing is exported: as {name} the model has {own} of {count} test examples right "
            f"and the original {original} ({form.tolerance:g} of accuracy may be lost); leave "
            f"{name} out of export.formats"
        )
    return {
        "accuracy": own / count,
        "original_accuracy": original / count,
        "accuracy_examples": count,
    }


def _written(name: str, form: Form, subject: Subject, path: Path) -> tuple[Predictor, ...]:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        form.write(subject.model, subject.spec, path, subject.calibration)
        return form.read(subject.spec, path)
    except (OSError, tf.errors.OpError) as error:
        raise UserError(f"the model cannot be written as {name}: {first_line(error)}") from error
    # The user's own classes run here, and may fail in any way.
    except Exception as error:
        raise _not_alike(name, error) from error


def _asked(name: str, ask: Predictor, inputs: Inputs) -> Answers:
    try:
        return ask(inputs)
    except Exception as error:
        raise _not_alike(name, error) from error


def _not_alike(name: str, error: Exception) -> UserError:
    remedy = "give its own classes a get_config, or " if name == "keras" else ""
    return UserError(
        f"the model cannot be written as {name} and read back: {first_line(error)}; {remedy}leave "
        f"{name} out of export.formats"
    )


def _difference(expected: Answers, found: Answers) -> float:
    return max(
        float(np.max(np.abs(found[name] - values) / np.maximum(np.abs(values), 1.0)))
        for name, values in expected.items()
    )

"""Evaluates the exported model of the champion, for comparison with a new model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from flotilla.trainer import storage
from flotilla.trainer.config.thresholds import ChampionRule
from flotilla.trainer.evaluation.classes import compare_classes
from flotilla.trainer.evaluation.comparison import Opponents, compare
from flotilla.trainer.evaluation.contamination import Judges
from flotilla.trainer.evaluation.predictions import Answer, Predictions, measure_predictions
from flotilla.trainer.evaluation.signature import SERVING, describe_inputs
from flotilla.trainer.evaluation.threshold import read_thresholds
from flotilla.trainer.events.progress import Work
from flotilla.trainer.features.class_names import are_same
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.promotion.registry import read_labels
from flotilla.trainer.runtime import user_code
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.tasks.base import Task
from flotilla.trainer.tasks.classification import Threshold
from flotilla.trainer.tasks.objective import Objective

KIND = "model"


@dataclass(frozen=True, kw_only=True)
class Champion:
    """A champion: its prediction function, or the reason why it cannot be compared.

    `thresholds` are its decision thresholds, keyed by output name.
    """

    uri: str
    answer: Answer | None
    incomparable: str
    thresholds: Mapping[str, Threshold] = field(default_factory=dict)


def load_champion(uri: str, task: Task, spec: DatasetSpec, scratch: Path) -> Champion:
    """Fetch the model published at `uri` and load it for prediction. Raises `UserError`.

    If the champion has other inputs or another task, the result states the reason, and the gate
    refuses the new model.
    """
    manifest = storage.read_manifest(uri)
    if manifest.kind != KIND:
        raise UserError(f"{uri} is a {manifest.kind}, but the champion must be a {KIND}")
    with storage.check_form(f"the manifest of {uri}"):
        known = {"": read_labels(uri), **(manifest.fields.get("labels") or {})}
        classes = {name: (known.get(name, []), part.labels) for name, part in task.parts.items()}
        if difference := _difference(manifest.fields, classes, task, spec):
            return Champion(uri=uri, answer=None, incomparable=difference)
        turned = [name for name, (their, own) in classes.items() if not are_same(their, own)]
        names = {each["feature"]: each["name"] for each in manifest.fields["inputs"]}
        place = str(manifest.fields["saved_model"])
    folder = scratch / "champion"
    storage.fetch(uri, folder, only=lambda path: path.startswith(f"{place}/"))
    with _add_remedy(uri):
        loaded = tf.saved_model.load(folder / place)
        signature = loaded.signatures[SERVING]

    def answer(inputs: Mapping[str, Any]) -> Any:
        given = {names[feature]: tf.constant(values) for feature, values in inputs.items()}
        with _add_remedy(uri):
            answers = {name: each.numpy() for name, each in signature(**given).items()}
            return _negate(task.outputs_of(answers), turned)

    decided = [name for name, part in task.parts.items() if part.positive_by]
    thresholds = read_thresholds(manifest.fields, decided)
    for name in turned:
        thresholds[name] = Threshold(1 - thresholds[name].value)
    return Champion(uri=uri, answer=answer, incomparable="", thresholds=thresholds)


def _negate(outputs: Any, names: Collection[str]) -> Any:
    """Negate the logits of the outputs in `names`, because the champion swaps their classes."""
    if isinstance(outputs, Mapping):
        return {n: _negate(each, {""} if n in names else ()) for n, each in outputs.items()}
    return np.concatenate([-outputs[:, :1], outputs[:, 1:]], axis=1) if names else outputs


@contextmanager
def _add_remedy(uri: str) -> Iterator[None]:
    try:
        yield
    # Loading or calling a SavedModel may raise any exception.
    except Exception as error:
        raise UserError(
            f"the champion {uri} cannot be evaluated: {user_code.format_error(error)}; make "
            "another version the champion with `flotilla models promote`"
        ) from error


def compare_champion(
    champion: Champion,
    objective: Objective,
    found: Predictions,
    rule: ChampionRule,
    judges: Judges | None = None,
) -> dict[str, Any]:
    """Return the champion's metrics, and its paired comparison with the new model.

    `judges`, if given, check whether the champion was trained on the test examples.
    """
    if found.champion is None:
        return {"uri": champion.uri, "incomparable": champion.incomparable}
    if bad := found.unsound[1]:
        why = f"it returns non-finite numbers for {bad} of {found.own.count} examples"
        return {"uri": champion.uri, "incomparable": why}
    others = objective.set_thresholds(champion.thresholds)
    opponents = Opponents(objective=objective, own=found.own, other=found.champion, theirs=others)
    with Work("comparing with the champion"):
        metrics, paired = (
            measure_predictions(others, found.champion)["metrics"],
            compare(opponents, rule),
        )
    return {
        "uri": champion.uri,
        "incomparable": "",
        "metrics": metrics,
        "paired": paired,
        **compare_classes(opponents, rule),
        **(judges.judge_champion(champion.uri, paired["metric"], metrics) if judges else {}),
    }


def _difference(
    fields: Mapping[str, Any],
    classes: Mapping[str, tuple[Sequence[str], Sequence[str]]],
    task: Task,
    spec: DatasetSpec,
) -> str:
    takes = describe_inputs(spec)
    if _sort_by_feature(fields["inputs"]) != _sort_by_feature(takes):
        return (
            f"it uses {_format_inputs(fields['inputs'])}, but this model uses "
            f"{_format_inputs(takes)}"
        )
    for each in fields.get("reads", ()):
        if tuple(each["labels"]) != spec.features[each["feature"]].labels:
            name = each["feature"]
            return (
                f"its input {name!r} has other classes than the input of this model; set "
                f"data.types: {{{name}: text}}, which accepts new classes"
            )
    # Earlier versions stored no task, and all their models are classifiers.
    there = fields.get("task", "classification")
    # Earlier versions had two logits for two classes. Their difference is the logit of a binary
    # task.
    if there != task.name and (there, task.name) != ("classification", "binary_classification"):
        return f"it was trained for {there}, but this model was trained for {task.name}"
    theirs, mine = ([name for name in each if name] for each in (fields.get("labels", {}), classes))
    if set(theirs) != set(mine):
        return f"it has the outputs {', '.join(theirs)}, but this model has {', '.join(mine)}"
    found = (
        _difference_of_classes(f" of {name}" if name else "", *pair, task.parts[name])
        for name, pair in classes.items()
    )
    return next(filter(None, found), "")


def _difference_of_classes(of: str, theirs: Sequence[str], mine: Sequence[str], part: Task) -> str:
    if are_same(theirs, mine) or (part.positive_by and are_same(theirs, mine[::-1])):
        return ""
    if len(theirs) != len(mine):
        return f"it has {len(theirs)} classes{of}, but this model has {len(mine)}"
    for number, (their, own) in enumerate(zip(theirs, mine, strict=True)):
        if their != own:
            return f"its class {number}{of} is {their!r}, but in this model it is {own!r}"
    return ""


def _sort_by_feature(inputs: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(each["feature"], each["shape"], each["dtype"]) for each in inputs]


def _format_inputs(inputs: list[dict[str, Any]]) -> str:
    return ", ".join(f"{each['feature']} {each['dtype']} {each['shape']}" for each in inputs)

"""Evaluates the exported model of the champion, and compares a new model with it.

A new model must also recognize every class that the champion recognizes. The champion recognizes a
class if its recall is significantly above chance. The new model keeps the class if its own recall
is lower by at most the margin, according to Tango's interval. Each class is tested at the full
confidence. Because a model must keep all classes, testing many of them does not make it easier for
a model that loses one to pass.

A class is judged only if it has enough examples: of 100 models as good as the champion, the tests
of all judged classes together may refuse at most 20 (Bonferroni). Any other class counts as lost
only if the loss is significant in McNemar's exact test, at a level divided among all classes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from scipy import special

from flotilla.trainer import storage
from flotilla.trainer.config.thresholds import ChampionRule
from flotilla.trainer.evaluation.comparison import Opponents, compare, lower_bounds
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
from flotilla.trainer.tasks.base import Floats, Task
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


#: Maximum number of classes to list, worst first.
MOST_ROWS = 50
# The power: the probability that a model as good as the champion loses no judged class.
_POWER = 0.8
# Replaces a count of zero, because the arguments of `betainc` must be positive.
_FEW = 1e-9


class Recalls(NamedTuple):
    """Recalls and counts, with one element per class in each array.

    `worth` is the effective number of examples, `alone` how many of them only the challenger
    recognizes, and `lost` how many only the champion recognizes. `chance` is the recall of a random
    guess.
    """

    examples: Floats
    worth: Floats
    own: Floats
    champion: Floats
    alone: Floats
    lost: Floats
    chance: Floats


def compare_classes(opponents: Opponents, rule: ChampionRule) -> dict[str, Any]:
    """Compare the recall of each class. Return the results as entries of an evaluation.

    `classes` has at most `MOST_ROWS` rows, lost classes first, each with `label`, `examples`, the
    recalls `own` and `champion`, the `margin` and `bound` of their difference, `judged` (whether
    there are enough examples) and `lost`. `class_counts` counts all classes that the champion
    recognizes.
    """
    names: list[str] = []
    found = []
    for output, task in opponents.objective.task.parts.items():
        recalls = _recalls(opponents, output, task)
        if recalls is not None:
            names += [f"{output}={label}" if output else label for label in task.labels]
            found.append(np.stack(recalls))
    if not found:
        return {}
    return _judge(names, Recalls(*np.concatenate(found, axis=1)), rule)


def _recalls(opponents: Opponents, output: str, task: Task) -> Recalls | None:
    theirs, count, total = opponents.others.task.parts[output], len(task.labels), 0.0
    sums: Floats = np.zeros((8, count))
    for part, other in zip(opponents.own.parts(), opponents.other.parts(), strict=True):
        labels, outputs, others = (
            each[output] if output else each for each in (part.labels, part.outputs, other.outputs)
        )
        mine, champions = task.predicted(outputs), theirs.predicted(others)
        if mine is None or champions is None:
            return None
        rows = len(labels)
        weights = np.ones(rows) if part.weights is None else np.ravel(part.weights)
        # `guessed` is, for each class, the weight of the examples or positions for which the
        # champion predicts it.
        if mine.dtype == bool:
            examples, classes = np.nonzero(labels)
            own, champion = mine[examples, classes], champions[examples, classes]
            guessed, whole = weights @ champions, weights.sum()
        else:
            labels, mine, champions = (each.reshape(rows, -1) for each in (labels, mine, champions))
            known = labels >= 0
            classes, examples = labels[known].astype(np.int64), np.nonzero(known)[0]
            own, champion = mine[known] == classes, champions[known] == classes
            guessed = np.bincount(champions[known], weights[examples], count).astype(np.float64)
            whole = guessed.sum()
        weights = weights[examples]
        which = (np.ones(len(own)), own, champion, own & ~champion, champion & ~own)
        sums[:5] += [np.bincount(classes, weights * each, count) for each in which]
        # The positions of an example are dependent, so together they count as one example.
        pairs, place = np.unique(examples * count + classes, return_inverse=True)
        sums[5] += np.bincount(pairs % count, np.bincount(place, weights) ** 2, count)
        sums[6] += np.bincount(classes, minlength=count)
        sums[7] += guessed
        total += float(whole)
    if not total:
        return None
    shares, worth = _divide(sums[1:5], sums[0]), _divide(sums[0] ** 2, sums[5])
    found, champions_found, alone, lost = shares
    return Recalls(
        sums[6], worth, found, champions_found, worth * alone, worth * lost, sums[7] / total
    )


def _divide(part: Floats, whole: Floats) -> Floats:
    return np.divide(part, whole, out=np.zeros(part.shape), where=whole > 0)


class Verdicts(NamedTuple):
    """Margins, bounds of the differences, and verdicts, with one element per class."""

    margin: Floats
    bound: Floats
    judged: npt.NDArray[np.bool_]
    lost: npt.NDArray[np.bool_]


def verdicts(each: Recalls, rule: ChampionRule, classes: int) -> Verdicts:
    """Return the verdict on each class. The significance level is divided by `classes`."""
    margin = rule.compute_class_margins(each.champion)
    bound = lower_bounds(each.alone, each.lost, each.worth, rule.confidence)
    level = (1 - rule.confidence) / classes
    # Probability that a random guess recognizes at least as many examples as the champion did.
    hits = each.worth * each.champion
    finds = special.betainc(hits, each.worth - hits + 1, each.chance) <= level
    judged = finds & (_equal_model_bounds(each, rule.confidence, classes) >= -margin)
    # Probability that an equally good model loses at least as many of the examples on which both
    # models differ.
    by_chance = special.betainc(np.maximum(each.lost, _FEW), each.alone + 1, 0.5)
    proved = finds & (by_chance <= level) & (each.own - each.champion < -margin)
    return Verdicts(margin, bound, judged, np.where(judged, bound < -margin, proved))


def _judge(names: list[str], all_of: Recalls, rule: ChampionRule) -> dict[str, Any]:
    seen = np.flatnonzero((all_of.worth > 0) & (all_of.champion > all_of.chance))
    each = Recalls(*(values[seen] for values in all_of))
    found = verdicts(each, rule, max(len(seen), 1))
    order = np.lexsort((found.bound + found.margin, ~found.judged, ~found.lost))
    columns = {
        "examples": each.examples.astype(int),
        **{"own": each.own, "champion": each.champion, **found._asdict()},
    }
    rows = [
        {"label": names[seen[at]], **{name: values[at].item() for name, values in columns.items()}}
        for at in order[:MOST_ROWS]
    ]
    judged, lost = int(found.judged.sum()), int(found.lost.sum())
    counts = {"judged": judged, "not_judged": len(seen) - judged, "lost": lost}
    return {"classes": rows, "class_counts": counts}


def _equal_model_bounds(each: Recalls, confidence: float, classes: int) -> Floats:
    """Return a bound for each class that a model as good as the champion rarely falls below.

    Both models are assumed to make half of their errors independently.
    """
    # Add two pseudo-examples, one of them recognized, because no recall is certainly 1 (Agresti).
    share = (each.worth * each.champion + 1) / (each.worth + 2)
    differ = each.worth * share * (1 - share)
    unlucky = special.ndtri(1 - (1 - _POWER) / classes) * np.sqrt(differ)
    lost = np.minimum(np.maximum((differ + unlucky) / 2, unlucky), each.worth)
    return lower_bounds(np.maximum(lost - unlucky, 0), lost, each.worth, confidence)

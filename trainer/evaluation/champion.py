"""The champion, in its exported form: the model that a new one is compared with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

from trainer import storage, user_code
from trainer.class_names import are_same
from trainer.config.thresholds import ChampionRule
from trainer.data.spec import DatasetSpec
from trainer.errors import UserError
from trainer.evaluation.comparison import Opponents, compare
from trainer.evaluation.contamination import Judges
from trainer.evaluation.predictions import Answer, Predictions, measured
from trainer.evaluation.signature import LABELS, SERVING, described, labels_of
from trainer.tasks.base import Task
from trainer.tasks.objective import Objective

KIND = "model"


@dataclass(frozen=True, kw_only=True)
class Champion:
    """A champion: a function that answers, or the reason why it cannot."""

    uri: str
    answer: Answer | None
    incomparable: str


def champion_of(uri: str, task: Task, spec: DatasetSpec, scratch: Path) -> Champion:
    """Fetch and load the model published at `uri`, to answer examples; raises `UserError`.

    One that takes other inputs, or is of another task, is no error: the gate has to refuse.
    """
    manifest = storage.read_manifest(uri)
    if manifest.kind != KIND:
        raise UserError(f"{uri} is a {manifest.kind} and not a {KIND}: it can be no champion")
    if difference := _difference(manifest, uri, task, spec):
        return Champion(uri=uri, answer=None, incomparable=difference)
    place = manifest.fields["saved_model"]
    folder = scratch / "champion"
    storage.fetch(uri, folder, only=lambda path: path.startswith(f"{place}/"))
    names = {each["feature"]: each["name"] for each in manifest.fields["inputs"]}
    with _with_remedy(uri):
        loaded = tf.saved_model.load(folder / place)
        signature = loaded.signatures[SERVING]

    def answer(inputs: Mapping[str, Any]) -> Any:
        given = {names[feature]: tf.constant(values) for feature, values in inputs.items()}
        with _with_remedy(uri):
            answers = {name: each.numpy() for name, each in signature(**given).items()}
            return task.outputs_of(answers)

    return Champion(uri=uri, answer=answer, incomparable="")


@contextmanager
def _with_remedy(uri: str) -> Iterator[None]:
    try:
        yield
    # A foreign SavedModel may raise anything.
    except Exception as error:
        raise UserError(
            f"the champion {uri} cannot be evaluated: {user_code.line_of(error)}; make another "
            "version champion with `flotilla models promote`"
        ) from error


def compared(
    champion: Champion,
    objective: Objective,
    found: Predictions,
    rule: ChampionRule,
    judges: Judges | None = None,
) -> dict[str, Any]:
    """Return what the evaluation says of the champion: metrics, and the paired comparison.

    `judges` say whether the examples judge it fairly.
    """
    if found.champion is None:
        return {"uri": champion.uri, "incomparable": champion.incomparable}
    if bad := found.unsound[1]:
        why = f"it gives no finite numbers for {bad} of {found.own.count} examples"
        return {"uri": champion.uri, "incomparable": why}
    opponents = Opponents(objective=objective, own=found.own, other=found.champion)
    metrics, paired = measured(objective, found.champion)["metrics"], compare(opponents, rule)
    return {
        "uri": champion.uri,
        "incomparable": "",
        "metrics": metrics,
        "paired": paired,
        **(judges.of_champion(champion.uri, paired["metric"], metrics) if judges else {}),
    }


def _difference(manifest: storage.Manifest, uri: str, task: Task, spec: DatasetSpec) -> str:
    fields = manifest.fields
    takes = described(spec)
    if _by_feature(fields["inputs"]) != _by_feature(takes):
        return f"it takes {_named(fields['inputs'])}, and this model {_named(takes)}"
    for each in fields.get("reads", ()):
        if tuple(each["labels"]) != spec.features[each["feature"]].labels:
            name = each["feature"]
            return (
                f"its input {name!r} has other classes than that of this model; set data.types: "
                f"{{{name}: text}}, which takes new ones"
            )
    # A model of an earlier version is a classifier.
    if (there := fields.get("task", "classification")) != task.name:
        return f"it was trained for {there}, and this model for {task.name}"
    mine = labels_of(task)
    theirs = fields.get("labels", mine)
    if theirs.keys() != mine.keys():
        return f"it has the outputs {', '.join(theirs)}, and this model {', '.join(mine)}"
    pairs = [("", _labels(uri, manifest), list(task.labels))]
    pairs += [(f" of {name}", theirs[name], labels) for name, labels in mine.items()]
    return next(filter(None, (_difference_of_classes(*pair) for pair in pairs)), "")


def _difference_of_classes(of: str, theirs: Sequence[str], mine: Sequence[str]) -> str:
    if are_same(theirs, mine):
        return ""
    if len(theirs) != len(mine):
        return f"it knows {len(theirs)} classes{of}, and this model {len(mine)}"
    for number, (their, own) in enumerate(zip(theirs, mine, strict=True)):
        if their != own:
            return f"its class {number}{of} is {their!r}, and that of this model {own!r}"
    return ""


def _labels(uri: str, manifest: storage.Manifest) -> list[str]:
    if LABELS not in {each.path for each in manifest.files}:
        return []
    return storage.read_file(uri, LABELS).decode().splitlines()


def _by_feature(inputs: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(each["feature"], each["shape"], each["dtype"]) for each in inputs]


def _named(inputs: list[dict[str, Any]]) -> str:
    return ", ".join(f"{each['feature']} {each['dtype']} {each['shape']}" for each in inputs)

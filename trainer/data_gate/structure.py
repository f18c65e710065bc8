"""Rules of what a dataset consists of: its features, their types, its splits and their sizes."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.data.spec import FeatureSpec
from trainer.data_gate.findings import Finding, Question, percent, share
from trainer.errors import nearest


def features(question: Question) -> Iterator[Finding]:
    """Compare names, types and shapes with those of the champion's dataset."""
    if question.champion is None:
        return
    known, found = question.champion.specs, question.dataset.specs
    for name in known:
        if name not in found:
            yield Finding(
                rule="missing_feature",
                feature=name,
                champion=_type(known[name]),
                says=f"the feature {name} of the champion's dataset is gone"
                f"{nearest(name, found)}: restore it, or name a model that needs none of it",
            )
        elif _type(known[name]) != _type(found[name]):
            yield Finding(
                rule="type",
                feature=name,
                value=_type(found[name]),
                champion=_type(known[name]),
                says=f"{name} is {_type(found[name])}, and {_type(known[name])} in the champion's "
                "dataset: look at its values, or say its type in data.types",
            )
    for name in found:
        if name not in known:
            yield Finding(
                rule="new_feature",
                feature=name,
                value=_type(found[name]),
                says=f"the champion's dataset has no feature {name}: drop it in data.drop if it is "
                "not meant to be learned from",
            )


def _type(spec: FeatureSpec) -> str:
    if spec.num_classes:
        return f"class of shape {list(spec.shape)}" if spec.shape else "class"
    return f"{spec.dtype} of shape {list(spec.shape)}" if spec.shape else spec.dtype


def sizes(question: Question) -> Iterator[Finding]:
    """Find empty splits, and a dataset that is far smaller than the champion's."""
    for split, each in question.dataset.splits.items():
        if not each.examples and split in ("train", "test"):
            yield Finding(
                rule="empty",
                split=split,
                value=0,
                says=f"the split {split} has no example: look at data.splits and at the source",
            )
    if question.champion is None:
        return
    limit = question.limits.limit("size")
    found, known = (
        sum(each.examples for each in dataset.splits.values())
        for dataset in (question.dataset, question.champion)
    )
    if share(found, known) < limit and known:
        yield Finding(
            rule="size",
            value=found,
            limit=round(limit * known),
            champion=known,
            says=f"{found} examples are {percent(share(found, known))} of the champion's {known}: "
            "look whether files are missing",
        )

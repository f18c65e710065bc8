"""Rules on the structure of a dataset: its features, their types, its splits and their sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from flotilla.trainer.data_gate.expected import ExpectedFeature
from flotilla.trainer.data_gate.findings import (
    Finding,
    Question,
    advise_dropping,
    percent,
    share,
    some,
)
from flotilla.trainer.data_gate.profile import FeatureProfile
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.runtime.errors import nearest


def features(question: Question) -> Iterator[Finding]:
    """Compare the features' names, types and shapes with those in the champion's dataset."""
    if question.champion is None:
        return
    known, found = question.champion.specs, question.dataset.specs
    for name in known:
        if name not in found:
            says = (
                f"the feature {name!r} of the champion's dataset is missing{nearest(name, found)}; "
                "restore it, or choose a model that does not need it"
            )
            yield Finding("missing_feature", says, name, champion=_type(known[name]))
        elif _type(known[name]) != _type(found[name]):
            gaps = "int" in known[name].dtype and "float" in found[name].dtype
            why = " (whole numbers with missing values are read as floats)" if gaps else ""
            says = (
                f"{name!r} is {_type(found[name])}, but {_type(known[name])} in the champion's "
                f"dataset; check its values{why}, or set its type in data.types"
            )
            yield Finding("type", says, name, value=_type(found[name]), champion=_type(known[name]))
    for name in found:
        if name not in known:
            says = (
                f"the champion's dataset has no feature {name!r}; {advise_dropping(name)} if the "
                "model should not learn from it"
            )
            yield Finding("new_feature", says, name, value=_type(found[name]))


def _type(spec: FeatureSpec) -> str:
    if spec.num_classes:
        return f"class of shape {list(spec.shape)}" if spec.shape else "class"
    return f"{spec.dtype} of shape {list(spec.shape)}" if spec.shape else spec.dtype


def sizes(question: Question) -> Iterator[Finding]:
    """Find empty splits, and datasets that are far smaller than the champion's."""
    for split, each in question.dataset.splits.items():
        if not each.examples and split in ("train", "test"):
            says = f"the split {split} has no examples; check data.splits and the source"
            yield Finding("empty", says, split=split, value=0)
    if question.champion is None:
        return
    limit = question.limit("size")
    found, known = (
        sum(each.examples for each in dataset.splits.values())
        for dataset in (question.dataset, question.champion)
    )
    if share(found, known) < limit and known:
        says = (
            f"the dataset has {found} examples, {percent(share(found, known))} of the {known} in "
            "the champion's dataset; check whether files are missing"
        )
        yield Finding("size", says, value=found, limit=round(limit * known), champion=known)


def schema(question: Question) -> Iterator[Finding]:
    """Compare the dataset with the schema file."""
    if question.schema is None:
        return
    specs = question.dataset.specs
    for name, wanted in question.schema.features.items():
        if name not in specs:
            if wanted.required:
                says = (
                    f"the schema file requires {name!r}, which the dataset does not "
                    f"have{nearest(name, specs)}; restore it, or write required: false"
                )
                yield Finding("missing_feature", says, name)
            continue
        for split in question.dataset.splits:
            features: Mapping[str, FeatureProfile] = question.dataset.features(split)
            if name in features:
                yield from _check_feature(name, split, features[name], wanted)


def _check_feature(
    name: str, split: str, found: FeatureProfile, wanted: ExpectedFeature
) -> Iterator[Finding]:
    def finding(value: Any, limit: Any, says: str, rule: str = "schema") -> Finding:
        return Finding(
            rule=rule, feature=name, split=split, value=value, limit=limit,
            says=f"{says}; correct the rows, or the schema file (data.schema_file)",
        )  # fmt: skip

    if wanted.type and found.kind != wanted.type:
        said = f"{name!r} is a {found.kind}, but the schema file says {wanted.type}"
        yield finding(found.kind, wanted.type, said, "type")
        return
    if wanted.min is not None and found.least < wanted.min:
        said = f"{name!r} is as low as {found.least:g} in {split}, below min {wanted.min:g}"
        yield finding(found.least, wanted.min, said)
    if wanted.max is not None and found.most > wanted.max:
        said = f"{name!r} is as high as {found.most:g} in {split}, above max {wanted.max:g}"
        yield finding(found.most, wanted.max, said)
    missing = share(found.missing, found.examples)
    if wanted.missing is not None and missing > wanted.missing:
        said = (
            f"{percent(missing)} of {name!r} is missing in {split}, above the allowed "
            f"{percent(wanted.missing)}"
        )
        yield finding(missing, wanted.missing, said)
    if wanted.values and (other := sorted(set(found.counts) - set(wanted.values))):
        said = f"{name!r} has {some(other)} in {split}, which the schema file does not list"
        yield finding(other[0], ", ".join(wanted.values[:20]), said)

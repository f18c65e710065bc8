"""Rules on features: their structure, sizes, units, ranges, and missing or new values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from flotilla.trainer.data_gate.drift import absence_test, fisher_test, kolmogorov_smirnov
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
from flotilla.trainer.features.statistics.statistics import CLASS, NUMBER, TEXT
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
        for split, each in question.dataset.splits.items():
            if name in each.features:
                yield from _check_feature(name, split, each.features[name], wanted)


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


# Factors and offsets between units, with names. Both directions are tried.
_UNITS = (
    (1000.0, 0.0, "thousands"), (1e6, 0.0, "millions"), (1e9, 0.0, "billions"),
    (100.0, 0.0, "hundreds, percent or cents"), (10.0, 0.0, "tens"), (60.0, 0.0, "minutes"),
    (3600.0, 0.0, "hours"), (24.0, 0.0, "days"), (2.54, 0.0, "inches"), (0.3048, 0.0, "feet"),
    (1.609344, 0.0, "miles"), (0.45359237, 0.0, "pounds"), (180 / math.pi, 0.0, "degrees"),
    (1.8, 32.0, "degrees Fahrenheit"), (1.0, 273.15, "kelvin"),
)  # fmt: skip
_FEWEST_VALUES = 5
# Kolmogorov-Smirnov distances above which units may differ, and below which they agree.
_APART, _ALIKE = 0.15, 0.05
_CHANCE = 0.01


def unit(question: Question) -> Iterator[Finding]:
    """Find features whose distribution matches the champion's after a conversion of units."""
    for name, new, old in question.pairs():
        if new.kind != NUMBER or not len(new.numbers) or not len(old.numbers):
            continue
        if question.dataset.grows_by_design(name):
            continue
        size, chance = kolmogorov_smirnov(new.numbers, old.numbers)
        if size < _APART or chance > question.significance:
            continue
        found = _factor(new, old)
        if found:
            change, words = found
            says = (
                f"the values of {name!r} are those of the champion's dataset {change} ({words}); "
                "convert them at the source"
            )
            value, before = float(np.median(new.numbers)), float(np.median(old.numbers))
            yield Finding("unit", says, name, "train", value, champion=before)


def _factor(new: FeatureProfile, old: FeatureProfile) -> tuple[str, str] | None:
    if len(np.unique(old.numbers)) < _FEWEST_VALUES:
        return None
    best: tuple[float, tuple[str, str]] | None = None
    for factor, offset, words in _UNITS:
        for changed, says in (
            (old.numbers * factor + offset, (f"times {factor:g}", words)),
            ((old.numbers - offset) / factor, (f"divided by {factor:g}", words)),
        ):
            size, chance = kolmogorov_smirnov(new.numbers, changed)
            if (size < _ALIKE or chance > _CHANCE) and (best is None or size < best[0]):
                best = size, says
    return best[1] if best else None


def find_out_of_range(question: Question) -> Iterator[Finding]:
    """Find features with more values outside the champion's range than chance explains."""
    pairs = [
        (name, new, old)
        for name, new, old in question.pairs()
        if new.kind == NUMBER
        and not question.defines_splits(name)
        and not question.dataset.grows_by_design(name)
    ]
    alpha = question.significance / max(2 * len(pairs), 1)
    for name, new, old in pairs:
        if not len(new.numbers) or not math.isfinite(old.most):
            continue
        for bound, extreme, outside, word in (
            (old.least, new.least, new.numbers < old.least, "below"),
            (old.most, new.most, new.numbers > old.most, "above"),
        ):
            part, count = float(np.mean(outside)), int(outside.sum())
            is_rare = count and absence_test(count, len(new.numbers), old.present) < alpha
            if part > question.limit("range") and is_rare:
                says = (
                    f"{percent(part)} of {name!r} is {word} {bound:g}, outside the range of the "
                    f"champion's dataset (the most extreme value is {extreme:g}); check these rows"
                )
                yield Finding("range", says, name, "train", extreme, bound, bound)


def missing(question: Question) -> Iterator[Finding]:
    """Find features without values, or with more missing values than in the champion's dataset."""
    for split in ("train", "test"):
        for name, each in question.dataset.features(split).items():
            if each.examples and not each.present and _is_missed(question, name, split):
                advice = f"{advise_dropping(name)}, or check its source"
                yield Finding(
                    "empty", f"{name!r} has no value in {split}; {advice}", name, split, 0
                )
    pairs = list(question.pairs())
    limit = question.limit("missing_values")
    for name, new, old in pairs:
        now, before = share(new.missing, new.examples), share(old.missing, old.examples)
        chance = fisher_test(new.missing, new.examples, old.missing, old.examples)
        if now - before > limit and chance < question.significance / len(pairs) and new.present:
            says = (
                f"{percent(now)} of {name!r} is missing, compared with {percent(before)} in the "
                "champion's dataset; check whether a source no longer fills it"
            )
            yield Finding("missing_values", says, name, "train", now, before + limit, before)


def _is_missed(question: Question, name: str, split: str) -> bool:
    """Return whether a used feature lacks values in a split for reasons other than chance."""
    dataset = question.dataset
    if split == "train" or name not in dataset.features("train"):
        return name in dataset.used
    train, sizes = dataset.features("train")[name], []
    for at in ("train", split):
        sizes.append(round(question.independent(dataset, at, by_inputs=True)))
    present = round(share(train.present, train.examples) * sizes[0])
    chance = absence_test(present, sizes[0], sizes[1])
    return name in dataset.used and chance < question.significance / len(dataset.used)


def constant(question: Question) -> Iterator[Finding]:
    """Find features with a single value in all training examples."""
    dataset, champion = question.dataset, question.champion
    known = champion.features("train") if champion else {}
    for name, each in dataset.features("train").items():
        if name not in dataset.used or question.defines_splits(name):
            continue
        if _is_constant(each) and not (name in known and _is_constant(known[name])):
            says = (
                f"{name!r} has the same value in all training examples, so a model cannot learn "
                f"from it; {advise_dropping(name)}, or check its source"
            )
            yield Finding("constant", says, name, "train", next(iter(each.counts), each.least))


def _is_constant(each: FeatureProfile) -> bool:
    # A constant that is sometimes missing is informative.
    if each.present < 2 or each.missing:  # noqa: PLR2004
        return False
    if each.kind in (TEXT, CLASS):
        return len(each.counts) == 1 and each.is_counted
    return each.least == each.most


def new_values(question: Question) -> Iterator[Finding]:
    """Find inputs with values that the champion's dataset lacks, unless chance explains them."""
    pairs = [
        (name, new, old)
        for name, new, old in question.pairs()
        if new.kind in (TEXT, CLASS) and name in question.dataset.inputs and old.is_counted
    ]
    for name, new, old in pairs:
        unseen = {value: count for value, count in new.counts.items() if value not in old.counts}
        examples = sum(unseen.values())
        # Good-Turing estimate: the share of examples whose value occurs only once is the expected
        # share of unseen values.
        once = sum(1 for count in old.counts.values() if count == 1) / max(old.present, 1)
        part = share(examples, new.present)
        if part - once <= question.limit("new_values"):
            continue
        alpha = question.significance / len(pairs)
        largest = max(unseen.values())
        chance = absence_test(largest, new.present, old.present) * len({**old.counts, **unseen})
        # Test the most frequent unseen value by itself, and all unseen values against `once`.
        if chance < alpha or part > 3 * once + 10 / max(min(new.present, old.present), 1):
            names = sorted(unseen, key=lambda value: -unseen[value])
            says = (
                f"{percent(part)} of {name!r} has values that the champion's dataset does not "
                f"have: {some(names)}; map them to known values, or expect a new vocabulary"
            )
            yield Finding("new_values", says, name, "train", part, question.limit("new_values"))

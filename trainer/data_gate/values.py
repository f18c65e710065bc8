"""Rules on the values of one feature: unit, range, missing, constant, new categories."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from flotilla.trainer.data_gate.findings import (
    Finding,
    Question,
    advise_dropping,
    percent,
    share,
    some,
)
from flotilla.trainer.data_gate.profile import FeatureProfile
from flotilla.trainer.data_gate.two_samples import absence_test, fisher_test, kolmogorov_smirnov
from flotilla.trainer.features.statistics.statistics import CLASS, NUMBER, TEXT

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
            yield Finding(
                "unit",
                says,
                name,
                "train",
                float(np.median(new.numbers)),
                champion=float(np.median(old.numbers)),
            )


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
        pair
        for pair in question.pairs()
        if pair[1].kind == NUMBER
        and not question.defines_splits(pair[0])
        and not question.dataset.grows_by_design(pair[0])
    ]
    alpha = question.significance / max(2 * len(pairs), 1)
    for name, new, old in pairs:
        if not len(new.numbers) or not math.isfinite(old.most):
            continue
        for bound, outside, word in (
            (old.least, new.numbers < old.least, "below"),
            (old.most, new.numbers > old.most, "above"),
        ):
            part = float(np.mean(outside))
            count = int(outside.sum())
            if part > question.limit("range") and count:
                chance = absence_test(count, len(new.numbers), old.present)
                if chance < alpha:
                    extreme = new.least if word == "below" else new.most
                    says = (
                        f"{percent(part)} of {name!r} is {word} {bound:g}, outside the range of "
                        f"the champion's dataset (the most extreme value is {extreme:g}); check "
                        "these rows"
                    )
                    yield Finding("range", says, name, "train", extreme, bound, bound)


def missing(question: Question) -> Iterator[Finding]:
    """Find features without values, or with more missing values than in the champion's dataset."""
    for split in ("train", "test"):
        for name, each in question.dataset.features(split).items():
            if each.examples and not each.present and _is_missed(question, name, split):
                advice = f"{advise_dropping(name)}, or check its source"
                says = f"{name!r} has no value in {split}; {advice}"
                yield Finding("empty", says, name, split, 0)
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
        pair
        for pair in question.pairs()
        if pair[1].kind in (TEXT, CLASS)
        and pair[0] in question.dataset.inputs
        and pair[2].is_counted
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

"""Rules on labels: new, missing and rare classes, class shares, and associations with inputs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from scipy import stats

from flotilla.trainer.data_gate.drift import absence_test
from flotilla.trainer.data_gate.findings import Finding, Question, percent, share, some
from flotilla.trainer.data_gate.profile import DatasetProfile, FeatureProfile
from flotilla.trainer.features.class_names import ClassIndex

# Suffixes of metrics over all classes. These metrics are sensitive to a rare class.
_OF_RARE = ("recall", "precision", "f1", "auc", "average_precision", "balanced_accuracy")
# Minimum strength of an association to check.
_LEAST = 0.15
# An association is lost if less than this share of it remains.
_LEFT = 0.5
_FEWEST = 50
_NEARLY_ONE = 0.999999


def classes(question: Question) -> Iterator[Finding]:
    """Find classes that are new, or missing from a split."""
    dataset, champion = question.dataset, question.champion
    for target in dataset.class_counts:
        known = champion.class_counts.get(target, {}) if champion else {}
        if champion and known:
            seen = {name for split in known for name in _count_old(question, target, split)}
            new = _list_present(dataset, target) - seen
            if new:
                says = (
                    f"{target} has {some(sorted(new))}, which the champion's dataset does not "
                    "have; correct the labels, or expect the new model to have other outputs"
                )
                yield Finding("new_class", says, target, value=", ".join(sorted(new)[:20]))
        for split in dataset.class_counts[target]:
            before, where = dataset.count_classes(target, "train"), "train"
            if known:
                before, where = _count_old(question, target, split), "the champion's dataset"
            yield from _find_gone(question, target, split, before, where)
            yield from _find_single(dataset, target, split)


def _count_old(question: Question, target: str, split: str) -> dict[str, int]:
    """Return the class counts of the champion's dataset, keyed by this dataset's class names."""
    assert question.champion
    names, found = question.dataset.class_names(target), dict[str, int]()
    index = ClassIndex(names)
    for name, count in question.champion.count_classes(target, split).items():
        number = index.number(name)
        own = names[number] if number >= 0 else name
        found[own] = found.get(own, 0) + count
    return {name: count for name, count in found.items() if count}


def _list_present(dataset: DatasetProfile, target: str) -> set[str]:
    return {
        name
        for split in dataset.class_counts[target]
        for name, count in dataset.count_classes(target, split).items()
        if count
    }


def _find_gone(
    question: Question, target: str, split: str, before: dict[str, int], where: str
) -> Iterator[Finding]:
    found = question.dataset.count_classes(target, split)
    examples, known = sum(found.values()), sum(before.values())
    alpha = question.significance / max(len(before), 1)
    for name, count in before.items():
        if found.get(name, 0) or not count or not examples:
            continue
        if absence_test(count, known, examples) < alpha:
            says = (
                f"{target} is {name!r} in {count} of {known} examples of {where}, but in none of "
                f"{examples} in {split}; check whether a source or a folder is missing"
            )
            yield Finding("class_gone", says, target, split, 0, champion=count)


def _find_single(dataset: DatasetProfile, target: str, split: str) -> Iterator[Finding]:
    there = {name: count for name, count in dataset.count_classes(target, split).items() if count}
    if len(there) == 1 < len(_list_present(dataset, target)):
        ((name, count),) = there.items()
        says = (
            f"{target} is {name!r} in all {count} examples of {split}, so nothing can be "
            "learned or measured there; add examples of other classes to the split, or change its "
            "share"
        )
        yield Finding("class_gone", says, target, split, 0)


def shares(question: Question) -> Iterator[Finding]:
    """Find rare classes and changed class shares. Accuracy hides errors in rare classes."""
    for target in question.dataset.class_counts:
        counts = question.dataset.count_classes(target, "train")
        yield from _imbalance(question, target, counts)
        if question.champion and target in question.champion.class_counts:
            before = _count_old(question, target, "train")
            yield from _balance(question, target, counts, before)


def _imbalance(question: Question, target: str, counts: dict[str, int]) -> Iterator[Finding]:
    examples, limit = sum(counts.values()), question.limit("imbalance")
    there = {name: count for name, count in counts.items() if count}
    if len(there) < 2 or _has_metric(question):  # noqa: PLR2004
        return
    name = min(there, key=lambda each: there[each])
    value = share(there[name] * len(there), examples)
    if value < limit:
        says = (
            f"{target} is {name!r} in only {percent(share(there[name], examples))} of the "
            "examples, too few to affect accuracy noticeably; require a recall for each class, "
            f"such as gate.min: {{accuracy@{target}: 0.8}}, and consider training.class_weights: "
            "balanced"
        )
        part = share(there[name], examples)
        yield Finding("imbalance", says, target, "train", part, limit / len(there))


def _has_metric(question: Question) -> bool:
    names = [each.partition("@") for each in (*question.gate.min, *question.gate.max)]
    # A mean weighted by class size is not sensitive to a rare class.
    return any(
        part or (metric.endswith(_OF_RARE) and not metric.startswith("weighted"))
        for metric, _, part in names
    )


def _balance(
    question: Question, target: str, counts: dict[str, int], before: dict[str, int]
) -> Iterator[Finding]:
    names = sorted({name for name in (*counts, *before) if counts.get(name) or before.get(name)})
    rows = [[of.get(name, 0) for name in names] for of in (counts, before)]
    if len(names) < 2 or not all(map(sum, rows)):  # noqa: PLR2004
        return
    new, old = ([value / sum(row) for value in row] for row in rows)
    moved = sum(abs(a - b) for a, b in zip(new, old, strict=True)) / 2
    chance = stats.chi2_contingency(rows).pvalue
    limit = question.limit("balance")
    if moved > limit and chance < question.significance:
        worst = max(range(len(names)), key=lambda n: abs(new[n] - old[n]))
        says = (
            f"the class shares of {target} have shifted by {percent(moved)}: {names[worst]!r} had "
            f"{percent(old[worst])} of the examples and now has {percent(new[worst])}; check "
            "whether a source is missing or duplicated"
        )
        yield Finding("balance", says, target, "train", moved, limit)


def association(question: Question) -> Iterator[Finding]:
    """Find labels that depend far less on the inputs than in the champion's data or in training."""
    dataset, champion = question.dataset, question.champion
    train = dataset.features("train")
    if champion:
        words = ("the champion's dataset", "train")
        sizes = [question.independent(each, "train", by_inputs=False)
                 for each in (champion, dataset)]  # fmt: skip
        yield from _find_lost(question, champion.features("train"), train, words, sizes)
    # With splits by time, later examples may legitimately differ from earlier ones.
    if "test" in dataset.splits and not question.splits.time:
        words = ("train", "test")
        sizes = [question.independent(dataset, split, by_inputs=True) for split in words]
        yield from _find_lost(question, train, dataset.features("test"), words, sizes)


def _find_lost(
    question: Question,
    before: Mapping[str, FeatureProfile],
    now: Mapping[str, FeatureProfile],
    words: tuple[str, str],
    most: Sequence[float],
) -> Iterator[Finding]:
    """Compare the strongest associations by Fisher's transform. `most` limits the sample sizes."""
    for target in question.dataset.targets:
        known = {
            name: each.association[target]
            for name, each in before.items()
            if name in now and target in each.association and target in now[name].association
            and name in question.dataset.inputs and each.association[target] >= _LEAST
        }  # fmt: skip
        if not known:
            continue
        name = max(known, key=lambda each: known[each])
        strong = [each for each in known if known[each] >= _LEFT * known[name]]
        kept = max(strong, key=lambda each: now[each].association[target])
        value = now[kept].association[target]
        sizes = min(before[name].present, most[0]), min(now[kept].present, most[1])
        if min(sizes) < _FEWEST or value >= _LEFT * known[name]:
            continue
        error = math.sqrt(sum(1 / (size - 3) for size in sizes))
        lost = math.atanh(min(known[name], _NEARLY_ONE)) - math.atanh(min(value, _NEARLY_ONE))
        # Correct for the number of features: the strongest of many associations is biased upward.
        if stats.norm.sf(lost / error) < question.significance / max(len(before), 1):
            says = (
                f"{target!r} depends far less on the inputs in {words[1]} than in {words[0]} "
                f"(strongest association {value:.3f} instead of {known[name]:.3f} with {name!r}); "
                "check whether labels and rows have the same order"
            )
            limit = _LEFT * known[name]
            yield Finding("association", says, target, words[1], value, limit, known[name])

"""Rules of the labels: classes that are new, gone or rare, and their shares."""

from __future__ import annotations

from collections.abc import Iterator

from scipy import stats

from trainer.data_gate.findings import Finding, Question, percent, share, some
from trainer.data_gate.profile import DatasetProfile

# Metrics that a rare class moves; one that is bounded for a class is fine as well.
_OF_RARE = ("recall", "precision", "f1", "auc", "average_precision", "balanced_accuracy", "pr_auc")


def classes(question: Question) -> Iterator[Finding]:
    """Find classes that are new, or gone from a split."""
    dataset, champion = question.dataset, question.champion
    for target in dataset.class_counts:
        known = champion.class_counts.get(target, {}) if champion else {}
        if champion and known:
            new = _with_examples(dataset, target) - _with_examples(champion, target)
            if new:
                yield Finding(
                    rule="new_class",
                    feature=target,
                    value=", ".join(sorted(new)[:20]),
                    says=f"{target} has {some(sorted(new))}, which the champion has never seen: "
                    "correct the labels, or expect a model with another output",
                )
        for split in dataset.class_counts[target]:
            before, at = (champion, split) if champion and known else (dataset, "train")
            yield from _gone(question, target, split, before.by_class(target, at))
            yield from _alone(dataset, target, split)


def _with_examples(dataset: DatasetProfile, target: str) -> set[str]:
    return {
        name
        for split in dataset.class_counts[target]
        for name, count in dataset.by_class(target, split).items()
        if count
    }


def _gone(question: Question, target: str, split: str, before: dict[str, int]) -> Iterator[Finding]:
    found = question.dataset.by_class(target, split)
    examples, known = sum(found.values()), sum(before.values())
    alpha = question.limits.limit("significance") / max(len(before), 1)
    for name, count in before.items():
        if found.get(name, 0) or not count or not examples:
            continue
        # How probable it is that all examples of the class are in the other sample by chance.
        chance = stats.hypergeom.sf(count - 1, known + examples, count, known)
        if chance < alpha:
            yield Finding(
                rule="class_gone",
                feature=target,
                split=split,
                value=0,
                champion=count,
                says=f"{target} has no example of {name!r} in {split}, where {count} of {known} "
                "were to be expected: look whether a source or a folder is missing",
            )


def _alone(dataset: DatasetProfile, target: str, split: str) -> Iterator[Finding]:
    there = {name: count for name, count in dataset.by_class(target, split).items() if count}
    if len(there) == 1 < len(_with_examples(dataset, target)):
        ((name, count),) = there.items()
        yield Finding(
            rule="class_gone",
            feature=target,
            split=split,
            value=0,
            says=f"all {count} examples of {split} are {name!r} of {target}: nothing can be "
            "learnt or measured there; give it more examples, or another share",
        )


def shares(question: Question) -> Iterator[Finding]:
    """Find classes so rare that accuracy hides them, and shares that have moved."""
    for target in question.dataset.class_counts:
        counts = question.dataset.by_class(target, "train")
        yield from _imbalance(question, target, counts)
        if question.champion and target in question.champion.class_counts:
            before = question.champion.by_class(target, "train")
            yield from _balance(question, target, counts, before)


def _imbalance(question: Question, target: str, counts: dict[str, int]) -> Iterator[Finding]:
    examples, limit = sum(counts.values()), question.limits.limit("imbalance")
    there = {name: count for name, count in counts.items() if count}
    if len(there) < 2 or _has_metric(question):  # noqa: PLR2004
        return
    name = min(there, key=lambda each: there[each])
    value = share(there[name] * len(there), examples)
    if value < limit:
        yield Finding(
            rule="imbalance",
            feature=target,
            split="train",
            value=share(there[name], examples),
            limit=limit / len(there),
            says=f"{percent(share(there[name], examples))} of the examples are {name!r} of "
            f"{target}: a model that never says so has a high accuracy; bound a metric that sees "
            f"it, as gate.min: {{accuracy@{target}: 0.8}}, and think of training.class_weights: "
            "balanced",
        )


def _has_metric(question: Question) -> bool:
    names = [each.partition("@") for each in (*question.gate.min, *question.gate.max)]
    # A mean that is weighted by the size of a class does not see a rare one either.
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
    limit = question.limits.limit("balance")
    if moved > limit and chance < question.limits.limit("significance"):
        worst = max(range(len(names)), key=lambda n: abs(new[n] - old[n]))
        yield Finding(
            rule="balance",
            feature=target,
            split="train",
            value=moved,
            limit=limit,
            says=f"the classes of {target} have moved by {percent(moved)} of the examples: "
            f"{names[worst]!r} was {percent(old[worst])} and is {percent(new[worst])}; look "
            "whether a source is missing or is there twice",
        )

"""Rules of features and labels: one that says everything, and all that say nothing any more."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from scipy import stats

from trainer.data_gate.findings import Finding, Question
from trainer.data_gate.profile import FeatureProfile
from trainer.statistics.statistics import NUMBER

# An association below this is none that could get lost.
_LEAST = 0.15
# What is left of one that is gone.
_LEFT = 0.5
_FEWEST = 50
# A category of fewer examples than this determines the label by itself.
_EXAMPLES_BY_VALUE = 5
_NEARLY_ONE = 0.999999


def label_leakage(question: Question) -> Iterator[Finding]:
    """Find inputs that determine a label."""
    dataset, limit = question.dataset, question.limits.limit("label_leakage")
    known = question.champion.features("train") if question.champion else {}
    for name, each in dataset.features("train").items():
        if name not in dataset.inputs or each.present < _FEWEST:
            continue
        if each.kind != NUMBER and each.distinct * _EXAMPLES_BY_VALUE > each.present:
            continue
        for target, value in each.association.items():
            before = known[name].association.get(target) if name in known else None
            if value >= limit and name != target and not (before or 0) >= limit:
                yield Finding(
                    rule="label_leakage",
                    feature=name,
                    split="train",
                    value=value,
                    limit=limit,
                    champion=before,
                    says=f"{name} determines {target} (association {value:.4f}): if it is not "
                    "known before the label is, drop it in data.drop",
                )


def association(question: Question) -> Iterator[Finding]:
    """Find labels of which features say far less than in the champion's dataset, or in training."""
    dataset, champion = question.dataset, question.champion
    train = dataset.features("train")
    if champion:
        words = ("the champion's dataset", "train")
        yield from _gone(question, champion.features("train"), train, words)
    yield from _gone(question, train, dataset.features("test"), ("train", "test"))


def _gone(
    question: Question,
    before: Mapping[str, FeatureProfile],
    now: Mapping[str, FeatureProfile],
    words: tuple[str, str],
) -> Iterator[Finding]:
    """Compare the strongest features of before, by the transform of Fisher."""
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
        sizes = (before[name].present, now[kept].present)
        if min(sizes) < _FEWEST or value >= _LEFT * known[name]:
            continue
        error = math.sqrt(sum(1 / (size - 3) for size in sizes))
        lost = math.atanh(min(known[name], _NEARLY_ONE)) - math.atanh(min(value, _NEARLY_ONE))
        if stats.norm.sf(lost / error) < question.significance:
            yield Finding(
                rule="association",
                feature=target,
                split=words[1],
                value=value,
                limit=_LEFT * known[name],
                champion=known[name],
                says=f"no feature says of {target} in {words[1]} what {name} said in {words[0]} "
                f"(association {known[name]:.3f} before, {value:.3f} now): look whether labels "
                "are in the order of other rows",
            )

"""Simulates the gate over many nights: how often it errs, and how the champion develops.

    python -m benchmarks.nights

Each night, a new model and the champion predict new test examples of two classes, and the gate's
own code compares them. The scores are normally distributed, with a shift for the positive class, so
the true metrics are known. Within each class, the scores of both models are correlated. The script
prints the tables of `benchmarks/results/gate.md` with fixed seeds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import optimize, stats

from flotilla.trainer.config.thresholds import GateConfig
from flotilla.trainer.evaluation import baselines
from flotilla.trainer.evaluation.champion import compare_classes
from flotilla.trainer.evaluation.comparison import Estimate, Metric, Opponents, compare_paired
from flotilla.trainer.promotion import gate
from flotilla.trainer.tasks.base import Part, Target, Whole
from flotilla.trainer.tasks.classification import BinaryClassification

NIGHTS = 1000
# Number of nights in a chain of champions.
CHAIN = 300
# Correlation of two models' scores within a class. Training one network twice gives 0.8 to 0.97.
CORRELATION = 0.9
GATE = GateConfig()
Floats = npt.NDArray[np.floating[Any]]
_GRID = np.linspace(-9, 15, 24_001)


@dataclass(frozen=True, kw_only=True)
class Data:
    """A population of two classes: the share of positives, and the first champion's true metric."""

    share: float
    metric: str
    value: float

    @property
    def constant(self) -> float:
        """The metric of a constant prediction."""
        return 0.5 if self.metric == "auc" else self.share

    @property
    def margin(self) -> float:
        """The non-inferiority margin against the first champion."""
        return GATE.champion.compute_margin(self.value - self.constant)


DATA = {
    "50 %": Data(share=0.5, metric="auc", value=0.85),
    "5 %": Data(share=0.05, metric="average_precision", value=0.5),
    "1 %": Data(share=0.01, metric="average_precision", value=0.4),
}


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model: the shift of its scores for positives, and its decision threshold."""

    shift: float
    threshold: float

    @classmethod
    def of(cls, data: Data, value: float) -> Model:
        """Return the model whose true metric is `value`, with the threshold that maximizes F1."""
        shift = _shift(data, round(value, 6))
        hits, alarms = stats.norm.sf(_GRID - shift), stats.norm.sf(_GRID)
        taken = data.share * hits + (1 - data.share) * alarms
        best = np.argmax(data.share * hits / (taken + data.share))
        return cls(shift=shift, threshold=float(_GRID[best]))

    def finding(self, part: float) -> Model:
        """Return a model with the same scores and a higher threshold.

        Its recall is the share `part` of this model's recall.
        """
        found = part * stats.norm.sf(self.threshold - self.shift)
        return Model(shift=self.shift, threshold=self.shift + float(stats.norm.isf(found)))


@cache
def _shift(data: Data, value: float) -> float:
    if data.metric == "auc":
        return float(np.sqrt(2) * stats.norm.ppf(value))
    if value <= data.share:
        return 0.0
    return float(optimize.brentq(lambda shift: _precision(data.share, shift) - value, 0, 8))


def _precision(share: float, shift: float) -> float:
    hits, alarms = share * stats.norm.sf(_GRID - shift), (1 - share) * stats.norm.sf(_GRID)
    density = stats.norm.pdf(_GRID - shift)
    return float(density @ (hits / (hits + alarms)) / density.sum())


class Night:
    """The test examples of one night, and the scores of models on them."""

    def __init__(self, data: Data, examples: int, generator: np.random.Generator) -> None:
        """Draw examples, at least one of each class."""
        self._data, self._generator = data, generator
        self._labels = (generator.random(examples) < data.share).astype(np.int64)
        self._labels[:2] = 0, 1
        self._same = generator.normal(size=examples).astype(np.float32)

    def answered(self, model: Model) -> Whole:
        """Return the examples with a model's logits."""
        noise = self._generator.normal(size=len(self._labels)).astype(np.float32)
        mixed = np.sqrt(CORRELATION) * self._same + np.sqrt(1 - CORRELATION) * noise
        logits = mixed + np.float32(model.shift) * self._labels - np.float32(model.threshold)
        return Whole(Part(self._labels, logits[:, np.newaxis], None, {}))

    def over_constant(self, own: Whole) -> bool:
        """Return whether the gate blesses a model if there is no champion."""
        metric, mine = self._data.metric, _estimate(own, self._data.metric)
        best = 0.5 if metric == "auc" else float(self._labels.mean())
        paired = baselines.compare_shuffled(_OBJECTIVE, own, metric, mine.value, best)
        found = {"answer": "", "paired": {"needed": None, **paired}}
        return _passes(GATE, {"metrics": {metric: mine.value}, "constant": found})

    def over_champion(
        self, own: Whole, champion: Whole, config: GateConfig = GATE
    ) -> tuple[bool, bool]:
        """Return whether the gate blesses the model, and whether it is proven to be better."""
        metric, rule = self._data.metric, config.champion
        mine, theirs = _estimate(own, metric), _estimate(champion, metric)
        compared = compare_paired(mine, theirs, rule.confidence, "higher", rule.share)
        opponents = Opponents(objective=_OBJECTIVE, own=own, other=champion)
        paired = {
            "metric": metric, "better": "higher", "examples": own.count,
            "confidence": rule.confidence, "difference": compared.difference,
            "bound": compared.bound,
        }  # fmt: skip
        best = 0.5 if metric == "auc" else float(self._labels.mean())
        found = {
            "metrics": {metric: mine.value},
            "constant": {"metrics": {metric: best}},
            "champion": {
                "incomparable": "", "metrics": {metric: theirs.value}, "paired": paired,
                **compare_classes(opponents, rule),
            },
        }  # fmt: skip
        rules = gate.make_rules(config, found)
        return all(rule.passed for rule in rules), any(rule.gained for rule in rules)


def _passes(config: GateConfig, measured: Mapping[str, Any]) -> bool:
    return all(rule.passed for rule in gate.make_rules(config, measured))


_OBJECTIVE: Any = SimpleNamespace(
    task=BinaryClassification(Target(name="label", shape=(), dtype="int64", num_classes=2))
)


def _estimate(examples: Whole, metric: str) -> Estimate:
    return Metric(_OBJECTIVE, examples, metric, None).estimate()


def kinds(data: Data) -> dict[str, Model]:
    """Return the models that are compared with the first champion."""
    champion = Model.of(data, data.value)
    return {
        "as good": champion,
        "worse by the margin": Model.of(data, data.value - data.margin),
        "half of the positives lost": champion.finding(0.5),
        "finds nothing": Model(shift=0.0, threshold=champion.threshold),
    }


def promoted(
    data: Data, model: Model, examples: int, nights: int = NIGHTS, config: GateConfig = GATE
) -> float:
    """Return the share of nights in which a model is promoted over the first champion."""
    generator, champion = np.random.default_rng(examples), Model.of(data, data.value)
    count = 0
    for _ in range(nights):
        night = Night(data, examples, generator)
        own = night.answered(model)
        if night.over_champion(own, night.answered(champion), config)[0]:
            # A model with shifted scores of positives is always far better than the constant.
            count += bool(model.shift) or night.over_constant(own)
    return count / nights


def first(data: Data, examples: int, nights: int = NIGHTS) -> float:
    """Return the share of nights in which a model that finds no positives becomes champion."""
    generator, model = np.random.default_rng(examples), Model(shift=0.0, threshold=1.0)
    drawn = (Night(data, examples, generator) for _ in range(nights))
    return sum(night.over_constant(night.answered(model)) for night in drawn) / nights


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The true metric of each night's champion, and the number of promoted models."""

    values: tuple[float, ...]
    promoted: int


# Maps the metric of the champion to the metric of a new model.
Made = Callable[[float, np.random.Generator], float]
MODELS: dict[str, Made] = {
    "of one recipe": lambda _, generator: 0.85 + float(generator.normal(0, 0.004)),
    "each begun with the champion": lambda champion, generator: (
        champion + float(generator.normal(0, 0.003))
    ),
    "each worse by 0.005": lambda champion, _: champion - 0.005,
}
GATES = ("the gate", "champion alone", "not proved worse")


def chain(models: str, rule: str, nights: int = CHAIN, examples: int = 2000) -> Chain:
    """Simulate a chain of champions with new models of one kind, under one of `GATES`.

    `the gate` also compares with the last version that had a proven gain. `not proved worse` is the
    rule of earlier versions of Flotilla.
    """
    data, made = DATA["50 %"], MODELS[models]
    generator = np.random.default_rng(0)
    champion = reference = data.value
    count, values = 0, []
    for _ in range(nights):
        value = float(np.clip(made(champion, generator), 0.51, 0.999))
        night = Night(data, examples, generator)
        own, other, old = (night.answered(Model.of(data, v)) for v in (value, champion, reference))
        if rule == "not proved worse":
            theirs, mine = _estimate(other, data.metric), _estimate(own, data.metric)
            passed = compare_paired(theirs, mine, 0.95, "higher").bound <= 0
            gained = False
        else:
            passed, gained = night.over_champion(own, other)
            if rule == "the gate" and reference != champion:
                kept, gained = night.over_champion(own, old)
                passed = passed and kept
        if passed:
            count, champion = count + 1, value
            reference = value if gained else reference
        values.append(champion)
    return Chain(values=tuple(values), promoted=count)


# Numbers of test examples that contain 28 positives.
SIZES = {"50 %": 56, "5 %": 560, "1 %": 2800}
POWER_SIZES = (1000, 5000, 20_000)
MARGINS = ("5%", "10%", "20%")


def _errors(name: str, examples: int) -> str:
    """Return a row: the share of nights in which each kind of model is promoted."""
    data = DATA[name]
    shares = [promoted(data, model, examples) for model in kinds(data).values()]
    cells = [f"{each:.1%}" for each in (*shares, first(data, examples))]
    return f"| {name} | {examples:,} | {' | '.join(cells)} |"


def _power(name: str, margin: str) -> str:
    """Return a row: the share of nights in which equal models are promoted, by test examples."""
    data, config = DATA[name], GateConfig.model_validate({"champion": {"margin": margin}})
    model = Model.of(data, data.value)
    shares = [promoted(data, model, each, NIGHTS // 5, config) for each in POWER_SIZES]
    said = {"auc": "AUC", "average_precision": "average precision"}[data.metric]
    what = f"{said} {data.value:g}, constant {data.constant:g}"
    return f"| {name} | {what} | {margin} | {' | '.join(f'{each:.0%}' for each in shares)} |"


def _head(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n|{' --- |' * len(cells)}"


def main() -> None:
    """Print the tables."""
    cases = [(models, rule) for models in MODELS for rule in GATES]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        errors = pool.map(_errors, SIZES, SIZES.values())
        power = pool.map(_power, *zip(*((n, m) for n in DATA for m in MARGINS), strict=True))
        chains = dict(zip(cases, pool.map(chain, *zip(*cases, strict=True)), strict=True))
        head = _head("positives", "test examples", *kinds(DATA["5 %"]), "first")
        sys.stdout.write("\n".join([head, *errors, ""]) + "\n")
        head = _head("positives", "champion", "margin", *(f"{each:,}" for each in POWER_SIZES))
        sys.stdout.write("\n".join([head, *power, ""]) + "\n")
    sys.stdout.write(_head("models: rule", "promoted", "last champion", "worst champion") + "\n")
    for (models, rule), each in chains.items():
        row = f"{each.promoted / CHAIN:.1%} | {each.values[-1]:.3f} | {min(each.values):.3f}"
        sys.stdout.write(f"| {models}: {rule} | {row} |\n")


if __name__ == "__main__":
    main()

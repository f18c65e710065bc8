"""Champion against challenger by one metric, on the same examples.

Whatever the task, the metric decides which test it is (`noninferiority`): shares of examples that
are right, means of values of examples, or states that add up. A metric of a task's details, which
has no state, is made anew without each of some groups of the examples (the jackknife).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from scipy import stats

from trainer.config.main_metric import LOSS
from trainer.config.thresholds import ChampionRule, called_now
from trainer.errors import ConfigError
from trainer.evaluation import noninferiority
from trainer.evaluation.noninferiority import Compared, Direction, Floats, Pairs, Sums
from trainer.tasks.base import Examples, Part, Whole, drawn
from trainer.tasks.compiled import State
from trainer.tasks.objective import Objective, at

# Blocks of examples that are drawn anew, and the numbers that all of their states may be.
_BLOCKS = 2000
_FEWEST_BLOCKS = 50
_MOST_NUMBERS = 20_000_000
_GROUPS = 40
# As many examples as metrics without a state are made of, again and again.
_MOST_EXAMPLES = 20_000
_KEY = "gate.champion"


@dataclass(frozen=True, kw_only=True)
class Opponents:
    """What both models gave for the same examples, in the same order and the same parts.

    `theirs` measures the other model, where it decides by a threshold of its own.
    """

    objective: Objective
    own: Examples
    other: Examples
    theirs: Objective | None = None

    @property
    def others(self) -> Objective:
        """What measures the other model."""
        return self.theirs or self.objective


def compare(opponents: Opponents, rule: ChampionRule) -> dict[str, Any]:
    """Return the comparison by a rule's metric, as the gate shows it; raises `UserError`.

    It has `metric`, `better`, `difference`, `bound`, `confidence`, `method` and `examples`, and
    `pairs` where examples are right or wrong.
    """
    metric = rule.metric or opponents.objective.main_metric
    better = _direction(opponents.objective, metric, rule)
    found, pairs = _compared(opponents, metric, better, rule.confidence)
    return {
        "metric": metric,
        "better": better,
        "confidence": rule.confidence,
        "examples": opponents.own.count,
        **{name: _defined(value) for name, value in asdict(found).items()},
        **({"pairs": pairs._asdict()} if pairs else {}),
    }


def _defined(value: Any) -> Any:
    return None if isinstance(value, float) and not np.isfinite(value) else value


def _direction(objective: Objective, metric: str, rule: ChampionRule) -> Direction:
    known = objective.directions
    if metric not in known:
        hint = called_now(metric, known)
        raise ConfigError(
            f"{_KEY}.metric: {metric!r} is not measured{hint} (measured: {', '.join(known)})"
        )
    better = rule.better or known[metric]
    if not better:
        raise ConfigError(
            f"{_KEY}.better: it is not known which value of {metric!r} is better; set it to higher "
            "or lower"
        )
    return better


def _compared(
    opponents: Opponents, metric: str, better: Direction, confidence: float
) -> tuple[Compared, Pairs | None]:
    objective, own = opponents.objective, opponents.own
    total = np.asarray(sum(objective.sums(part) for part in own.parts()))
    # In a vector of sums; a metric of the task's details has no state.
    defined = (each for each in objective.states if each.values(total).get(metric) is not None)
    state = next(defined, None)
    if state is None:
        groups = [objective.task.of_groups(metric, each) for each in (own, opponents.other)]
        if groups[0] is not None and groups[1] is not None and len(groups[0]):
            found = noninferiority.means(groups[0] - groups[1], None, confidence, better)
            return found, None
        return _jackknife(opponents, metric, better, confidence), None
    if state.is_mean:
        return _of_means(opponents, state, better, confidence)
    mine = _blocks(objective, state, own)
    theirs = _blocks(opponents.others, state, opponents.other)
    if metric == LOSS:
        # Of examples the sums are 1 and the loss; of blocks of them, their numbers and the sum.
        count = mine[:, 0]
        differences = (mine[:, 1] - theirs[:, 1]) / count
        found = noninferiority.means(differences, count, confidence, better)
        return found, None
    return noninferiority.states(mine, theirs, state.function(metric), confidence, better), None


def _of_means(
    opponents: Opponents, state: State, better: Direction, confidence: float
) -> tuple[Compared, Pairs | None]:
    pairs, sums, few = Pairs(0, 0, 0, 0), Sums(), []
    shares, place = better == "higher", opponents.objective.states.index(state)
    for own, other in zip(opponents.own.parts(), opponents.other.parts(), strict=True):
        mine, weights = _values(opponents.objective, place, own)
        theirs, _ = _values(opponents.others, place, other)
        both = np.concatenate([mine, theirs])
        shares = shares and bool(np.isin(both, (0, 1)).all() and (weights == 1).all())
        if shares:
            counted = Pairs(*(_count(mine, theirs, *who) for who in _WHO))
            pairs = Pairs(*(a + b for a, b in zip(pairs, counted, strict=True)))
        sums = sums.plus(Sums.of(mine - theirs, weights))
        if sums.examples <= noninferiority.FEW:
            few.append((mine - theirs, weights))
    if shares:
        return noninferiority.shares(pairs, confidence), pairs
    if sums.examples <= noninferiority.FEW:
        differences, weights = (np.concatenate(each) for each in zip(*few, strict=True))
        return noninferiority.means(differences, weights, confidence, better), None
    return noninferiority.means_of_sums(sums, confidence, better), None


# Right by the challenger and by the champion, in the order of `Pairs`.
_WHO = ((1, 1), (1, 0), (0, 1), (0, 0))


def _count(own: Floats, other: Floats, mine: int, theirs: int) -> int:
    return int(((own == mine) & (other == theirs)).sum())


def _values(objective: Objective, place: int, part: Part) -> tuple[Floats, Floats]:
    """Return the value of each example, by the state at a place, and the weights."""
    totals, weights = objective.of_each(place, part).T
    # An example without any weight has no value.
    return np.divide(totals, weights, out=np.zeros_like(totals), where=weights != 0), weights


def _blocks(objective: Objective, state: State, examples: Examples) -> Floats:
    """Return states [blocks, size] of examples in random blocks, the same for both models."""
    generator, size = np.random.default_rng(0), state.end - state.begin
    most = min(_BLOCKS, max(_MOST_NUMBERS // size, _FEWEST_BLOCKS))
    found = []
    for part in examples.parts():
        count = _count_of(part)
        blocks = min(count, max(1, round(most * count / examples.count)))
        for rows in np.array_split(generator.permutation(count), blocks):
            found.append(objective.sums(at(part, rows))[state.begin : state.end])
    return np.stack(found)


def _jackknife(opponents: Opponents, metric: str, better: Direction, confidence: float) -> Compared:
    """Compare by the delete-a-group jackknife: the metric is made anew without each group."""
    parts = [drawn(each, _MOST_EXAMPLES) for each in (opponents.own, opponents.other)]

    def difference(own: Examples, other: Examples) -> float:
        mine = _measured(opponents.objective, own, metric)
        return mine - _measured(opponents.others, other, metric)

    count = _count_of(parts[0])
    order = np.random.default_rng(0).permutation(count)
    groups = np.array_split(order, min(_GROUPS, count))
    kept = (np.setdiff1d(order, group) for group in groups)
    without = [difference(*(Whole(at(each, rows)) for each in parts)) for rows in kept]
    spread = np.var(without) * (len(groups) - 1) * count / opponents.own.count
    whole = difference(opponents.own, opponents.other)
    sign = 1 if better == "higher" else -1
    wide = stats.t.ppf(confidence, max(len(groups) - 1, 1)) * np.sqrt(spread)
    return Compared(
        difference=whole, bound=float(whole - sign * wide), method="paired jackknife of groups"
    )


def _measured(objective: Objective, examples: Examples, metric: str) -> float:
    for found in _cheapest_first(objective, examples):
        if metric in found.get("metrics", {}):
            value = found["metrics"][metric]
            return np.nan if value is None else float(value)
    return np.nan


def _cheapest_first(objective: Objective, examples: Examples) -> Iterator[dict[str, Any]]:
    tally = objective.task.tally()
    for part in examples.parts():
        tally.add(part)
    yield tally.result()
    yield objective.task.details(examples)


def _count_of(part: Part) -> int:
    return len(tf.nest.flatten(part.labels)[0])

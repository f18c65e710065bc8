"""The trials of a sweep: what is known of each, which one goes on, and which one is the best.

The best is chosen by a metric of validation. The test split is for the one that was chosen: a best
of many by the test split would be measured by what it was chosen by.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.config.schema import Config
from trainer.config.thresholds import SHARES
from trainer.errors import ConfigError
from trainer.json_records import is_number
from trainer.sweeps.space import Settings, config_of

#: One of so many trials goes on from each rung.
REDUCTION = 3
#: Fewer steps than these say nothing about a trial.
LEAST_STEPS = 10
LOSS = "validation_loss"
_VALIDATION = "validation_"
# Whatever changes what the loss is.
_OF_LOSS = ("task", "training.class_weights")
# A measure that ends like this is better when it is higher.
_HIGHER = (*SHARES, "ndcg", "mrr", "r2", "iou")
_LOWER = ("loss", "error", "mae", "mse", "rmse")
WAITING, RUNNING, DONE, FAILED, INTERRUPTED = "waiting", "running", "done", "failed", "interrupted"


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The metric of validation by which trials are compared; `higher` or `lower` is better."""

    metric: str
    better: str

    def rank(self, value: float) -> float:
        """Return a number that is lower for a better value."""
        return value if self.better == "lower" else -value


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a trial has reached on one rung: the metric of the sweep after so many global steps."""

    rung: int
    steps: int
    value: float


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One trial.

    Attributes:
        number: from 1 on.
        settings: what it has of its own, as texts by key.
        run_id: of its run.
        status: `waiting`, `running`, `done`, `failed` or `interrupted`, on its last rung.
        rung: the last one that it began.
        results: what it reached on each rung.
        metrics: of validation and training, the last ones.
        checkpoint: URI of the one that training handed on, or empty.
        error: why it failed, in one line.
        seconds: of all its rungs.
    """

    number: int
    settings: Mapping[str, str]
    run_id: str = ""
    status: str = WAITING
    rung: int = 0
    results: tuple[Result, ...] = ()
    metrics: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: str = ""
    error: str = ""
    seconds: float = 0.0

    def on(self, rung: int) -> Result | None:
        """Return what it reached on a rung; None where it did not end there."""
        return next((each for each in self.results if each.rung == rung), None)

    @property
    def last(self) -> Result | None:
        """What it reached on its last rung; None where it reached nothing."""
        return max(self.results, key=lambda each: each.rung, default=None)


def objective_of(config: Config, keys: Iterable[str], metric: str, better: str) -> Objective:
    """Return the objective of a sweep.

    Args:
        config: what all trials share.
        keys: those that are searched.
        metric: of validation, with or without `validation_` before it; empty for the loss.
        better: `higher` or `lower`; empty where the name of the metric says it.

    Raises:
        ConfigError: nothing is validated, or the metric cannot be compared.
    """
    training = config.training
    if not config.data.validation and not config.data.source:
        raise ConfigError(
            "a sweep chooses by validation: set data.validation (the test split is for the best)"
        )
    if not training.validate_every and not config.cluster.evaluator:
        raise ConfigError("a sweep chooses by validation: set training.validate_every")
    name = f"{_VALIDATION}{metric.strip().removeprefix(_VALIDATION)}" if metric else LOSS
    searched = [key for key in keys if key.startswith(_OF_LOSS)]
    if name == LOSS and searched:
        raise ConfigError(
            f"{searched[0]} changes what the loss is, by which trials would be compared: choose "
            "another metric by --metric, such as --metric accuracy"
        )
    if better == "lower" or (not better and name.endswith(_LOWER)):
        return Objective(metric=name, better="lower")
    if better == "higher" or name.endswith(_HIGHER):
        return Objective(metric=name, better="higher")
    raise ConfigError(f"--metric {metric}: say by --better which value is better: higher or lower")


def value_of(metrics: Mapping[str, Any], objective: Objective) -> float:
    """Return the value of a trial; raises `ConfigError` where it was not measured."""
    # An evaluator measures apart from training, and of it the best loss is known.
    known = {LOSS: metrics.get("best_validation_loss"), **metrics}
    value = known.get(objective.metric)
    if is_number(value):
        return float(value)  # type: ignore[arg-type]
    measured = sorted(name.removeprefix(_VALIDATION) for name in known if _is_measure(known, name))
    raise ConfigError(
        f"training measured no {objective.metric}: it has "
        f"{', '.join(measured) or 'nothing'} of validation; choose one by --metric"
    )


def _is_measure(known: Mapping[str, Any], name: str) -> bool:
    return name.startswith(_VALIDATION) and is_number(known[name])


def rungs_of(base: Config, every: Sequence[Settings], *, halving: bool) -> tuple[int, ...]:
    """Return the global steps of each rung; one rung of zero where each trial has its own steps.

    Raises:
        ConfigError: halving was asked for, and there are too few steps or trials for two rungs.
    """
    if not halving:
        return (0,)
    if any(key == "training.steps" for settings in every for key in settings):
        raise ConfigError("training.steps: --asha sets the steps of each rung; give it one value")
    if any(config_of(base, each).training.schedule.name == "cosine" for each in every):
        raise ConfigError(
            "training.schedule.name: cosine ends at training.steps, which is another number on "
            "each rung of --asha; choose constant, exponential or piecewise"
        )
    steps = base.training.steps
    if len(every) < REDUCTION:
        raise ConfigError(
            f"--asha: one of {REDUCTION} trials goes on from each rung, and there are "
            f"{len(every)}; leave it out"
        )
    if steps // REDUCTION < LEAST_STEPS:
        raise ConfigError(
            f"training.steps: {steps} are too few for --asha, whose first rung has a third of "
            f"them: at least {LEAST_STEPS * REDUCTION}"
        )
    rungs, left = [steps], len(every)
    while left >= REDUCTION and rungs[0] // REDUCTION >= LEAST_STEPS:
        rungs.insert(0, rungs[0] // REDUCTION)
        left //= REDUCTION
    return tuple(rungs)


def most_on(rung: int, trials: int) -> int:
    """Return how many of the trials of a sweep get to a rung, where none fails; at least one."""
    return max(1, trials // int(REDUCTION**rung))


def next_job(
    trials: Sequence[Trial], rungs: Sequence[int], objective: Objective
) -> tuple[Trial, int] | None:
    """Return the trial to train next, and its rung; None where there is none until one has ended.

    Asynchronous successive halving (Li et al. 2020): of those that ended on a rung the best third
    goes on, and no worker waits for the rung to be complete. The trials are known beforehand, so
    that low rungs come first: fewer of them go on that a later one would have beaten.
    """
    if taken := next((each for each in trials if each.status == INTERRUPTED), None):
        return taken, taken.rung
    if waiting := next((each for each in trials if each.status == WAITING), None):
        return waiting, 0
    for rung in range(1, len(rungs)):
        below = ranked(trials, rung - 1, objective)
        for each in below[: len(below) // REDUCTION]:
            if each.status == DONE and each.rung == rung - 1:
                return each, rung
    if any(each.status == RUNNING for each in trials):
        return None
    # Of few that did not fail a third is none: the best of them goes on all the same.
    top = max((each.rung for each in trials if each.status == DONE), default=len(rungs) - 1)
    if top == len(rungs) - 1:
        return None
    best = [each for each in ranked(trials, top, objective) if each.status == DONE]
    return (best[0], top + 1) if best else None


def ranked(trials: Iterable[Trial], rung: int, objective: Objective) -> list[Trial]:
    """Return the trials that ended on a rung, the best first, and of equal ones the earlier."""
    found = [(result.value, each) for each in trials if (result := each.on(rung))]
    return [each for _, each in sorted(found, key=lambda x: (objective.rank(x[0]), x[1].number))]


def best_of(trials: Sequence[Trial], objective: Objective) -> Trial | None:
    """Return the best trial of the highest rung that one has ended; None where all failed."""
    ended = [each for each in trials if each.status == DONE and each.last]
    top = max((each.last.rung for each in ended if each.last), default=0)
    return next(iter(ranked(ended, top, objective)), None)

"""The state of a sweep and its trials, and the choice of the best trial by validation."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flotilla.trainer.config.base import AUTOMATIC
from flotilla.trainer.config.load import override, parse_config
from flotilla.trainer.config.main_metric import BY_LOSS, VALIDATION, VALIDATION_LOSS, MainMetric
from flotilla.trainer.config.schema import Config
from flotilla.trainer.config.thresholds import SHARES
from flotilla.trainer.events.progress import duration
from flotilla.trainer.report import report
from flotilla.trainer.report.wording import round_value, spell_metric
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.runtime.json_records import is_number

Settings = Mapping[str, str]

#: The reduction factor of halving: one in this many trials continues on the next rung.
REDUCTION = 3
#: Minimum number of steps after which trials can be compared.
LEAST_STEPS = 10
# Keys that change the loss, or the metric that compares trials.
_OF_LOSS = ("task", "training.class_weights")
_OF_METRIC = ("task.main_metric", "task.name", "task.outputs", "task.positive")
# Suffixes of metrics for which a higher value is better, and of those for which a lower one is.
_HIGHER = (*SHARES, "ndcg", "mrr", "r2", "iou")
_LOWER = ("loss", "error", "mae", "mse", "rmse")
WAITING, RUNNING, DONE, FAILED, INTERRUPTED = "waiting", "running", "done", "failed", "interrupted"


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The validation metric that compares trials, and whether `higher` or `lower` is better.

    An empty name stands for the main metric, whose name is stored with each trial's results.
    """

    metric: str = ""
    better: str = ""

    def rank(self, value: float) -> float:
        """Return a number that is lower for a better value."""
        return value if self.better == "lower" else -value


_NOT_SAID, _LOSS = Objective(), Objective(metric=BY_LOSS.column, better=BY_LOSS.better)


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a trial on a rung: a validation metric at a global step."""

    rung: int
    steps: int
    value: float
    by: Objective = _NOT_SAID


@dataclass(frozen=True, kw_only=True, repr=False)
class Trial:
    """A trial of a sweep: the values of the searched keys, and the results with these values.

    Attributes:
        number: its number, starting at 1.
        settings: the values of the searched keys, as strings by key.
        status: its status on the last rung (waiting, running, done, failed or interrupted).
        rung: the last rung that it started.
        results: its results on all rungs.
        metrics: its latest metrics of validation and training.
        checkpoint: the URI of the selected checkpoint, or empty.
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

    def __repr__(self) -> str:
        """Return the number, the status and the settings."""
        return f"Trial({self.number} {self.status}, {dict(self.settings)})"

    def get_result(self, rung: int) -> Result | None:
        """Return the result on a rung, or None if the trial did not finish it."""
        return next((each for each in self.results if each.rung == rung), None)

    @property
    def last(self) -> Result | None:
        """The result on the last rung that the trial finished, or None if there is none."""
        return max(self.results, key=lambda each: each.rung, default=None)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The state of a sweep.

    Attributes:
        config: the configuration that all trials share, as JSON data.
        source: the file of that configuration, for `command`, or empty.
        fixed: `section.key=value` assignments for all trials, for `command`.
        rungs: the global step at which each rung ends, or a single 0 if there is no halving.
        best: the number of the trial that the gate judges, or 0 until it is chosen.
        verdict: the status of the best trial's run, such as `blessed` or `refused`, or empty until
            the run ends.
        test: metrics of the best trial on the test split.
        sampler: `grid` or `random`, whose trials are known in advance, or `tpe`.
        minutes: the time limit for starting trials, in minutes after the sweep was started or
            resumed, or 0 for none.
        space: the distribution of each searched key in Optuna's format, or empty on a cluster.
    """

    sweep_id: str
    config: Mapping[str, Any]
    source: str
    fixed: tuple[str, ...]
    keys: tuple[str, ...]
    objective: Objective
    rungs: tuple[int, ...]
    trials: tuple[Trial, ...]
    best: int = 0
    verdict: str = ""
    message: str = ""
    test: Mapping[str, Any] = field(default_factory=dict)
    sampler: str = "grid"
    seed: int = 0
    minutes: float = 0.0
    space: Mapping[str, str] = field(default_factory=dict)

    @property
    def base(self) -> Config:
        """The configuration that all trials share. Raises `ConfigError` if it is damaged."""
        return parse_config(self.config)

    @property
    def compared_by(self) -> Objective:
        """The objective if it has a metric, else that of the results. Raises `ConfigError`."""
        return find_objective(self.trials, self.objective)

    def share(self, running: Mapping[int, float]) -> float:
        """Return the finished share of the sweep. `running` maps numbers of trials to their shares.

        On each rung, one in `REDUCTION` trials continues on the next rung.
        """
        steps = [each - before for each, before in zip(self.rungs, (0, *self.rungs), strict=False)]
        sizes = steps if any(steps) else [1]
        count = len(self.trials)
        whole = sum(size * max(count // REDUCTION**at, 1) for at, size in enumerate(sizes))
        done = 0.0
        for trial in self.trials:
            done += sum(sizes[each.rung] for each in trial.results)
            if trial.status == FAILED and not trial.results:
                done += sizes[0]
            elif trial.status == RUNNING:
                done += sizes[trial.rung] * running.get(trial.number, 0.0)
        return min(done / whole, 1.0) if whole else 0.0

    @property
    def chosen(self) -> Trial | None:
        """The best trial, or None until it is chosen."""
        return next((each for each in self.trials if each.number == self.best), None)

    def configure(self, trial: Trial, rung: int, base: Config) -> Config:
        """Return the configuration of a trial on a rung, based on `base`. Raises `ConfigError`."""
        config = make_config(base, trial.settings)
        if not self.rungs[rung]:
            return config
        training = config.training.model_copy(update={"steps": self.rungs[rung]})
        return config.model_copy(update={"training": training})

    def add_result(self, trial: Trial, rung: int, main: MainMetric | None) -> Trial:
        """Read a trial's result on a rung from its metrics, and return the updated trial.

        `main` is the metric that selected the trial's checkpoint, or None if it is unknown. Raises
        `ConfigError` if the metric was not measured.
        """
        by = self.objective
        if not by.metric:
            by = Objective(metric=main.column, better=main.better) if main else _LOSS
            _require_same_loss(by.metric, self.keys)
        value = read_value(trial.metrics, by)
        before = tuple(each for each in trial.results if each.rung != rung)
        steps = self.rungs[rung] or int(trial.metrics.get("global_step") or 0)
        result = Result(rung=rung, steps=steps, value=value, by=by)
        return replace(trial, status=DONE, error="", rung=rung, results=(*before, result))

    def command(self) -> str:
        """Return the command that runs the best trial again, or "" until it is chosen."""
        if self.chosen is None:
            return ""
        words = ["flotilla", "run", *filter(None, [self.source])]
        for text in (*self.fixed, *list_assignments(self.chosen.settings)):
            words += ["--set", text]
        return shlex.join(words)


def make_config(base: Config, settings: Settings) -> Config:
    """Return the configuration of a trial. Raises `ConfigError`."""
    return override(base, list_assignments(settings))


def list_assignments(settings: Settings) -> list[str]:
    """Return the settings of a trial as `section.key=value` assignments."""
    return [f"{key}={value}" for key, value in settings.items()]


def make_objective(config: Config, keys: Iterable[str], metric: str, better: str) -> Objective:
    """Return the objective of a sweep. Raises `ConfigError`.

    `metric` is a validation metric, or empty for the main metric. `better` may be empty if the name
    of the metric implies the direction.
    """
    training = config.training
    if not config.data.validation and not config.data.source:
        raise ConfigError("a sweep needs a validation split to compare trials; set data.validation")
    if not training.validate_every and not config.cluster.evaluator:
        raise ConfigError("a sweep needs validations during training; set training.validate_every")
    if not metric:
        if searched := [key for key in keys if key.startswith(_OF_METRIC)]:
            raise ConfigError(
                f"{searched[0]} changes the metric by which trials are compared: choose one with "
                "--metric, such as --metric accuracy"
            )
        if better:
            raise ConfigError(f"--better {better} needs --metric; add --metric NAME")
        return Objective()
    name = f"{VALIDATION}{metric.strip().removeprefix(VALIDATION)}"
    _require_same_loss(name, keys)
    if better == "lower" or (not better and name.endswith(_LOWER)):
        return Objective(metric=name, better="lower")
    if better == "higher" or name.endswith(_HIGHER):
        return Objective(metric=name, better="higher")
    raise ConfigError(f"--metric {metric} has no known direction; add --better higher or lower")


def _require_same_loss(metric: str, keys: Iterable[str]) -> None:
    searched = [key for key in keys if key.startswith(_OF_LOSS)]
    if metric == VALIDATION_LOSS and searched:
        raise ConfigError(
            f"{searched[0]} changes the loss by which trials are compared: choose another metric "
            "with --metric, such as --metric accuracy"
        )


def find_objective(trials: Iterable[Trial], objective: Objective) -> Objective:
    """Return `objective` if it has a metric, else that of the results. Raises `ConfigError`."""
    results = (result for each in trials for result in each.results if result.by.metric)
    found = dict.fromkeys(each.by for each in results)
    if len(found) > 1:
        first, other, *_ = (each.metric.removeprefix(VALIDATION) for each in found)
        raise ConfigError(
            f"trials are compared by different metrics, {first} and {other}: choose one with "
            "--metric"
        )
    return objective if objective.metric else next(iter(found), _LOSS)


def read_value(metrics: Mapping[str, Any], objective: Objective) -> float:
    """Return the value of the objective's metric. Raises `ConfigError` if it was not measured."""
    # If the evaluator skipped the selected checkpoint, use the best validation of the run.
    value = metrics.get(objective.metric, metrics.get(f"best_{objective.metric}"))
    if is_number(value):
        return float(value)
    named = [name for name in metrics if name.startswith(VALIDATION) and is_number(metrics[name])]
    measured = sorted(name.removeprefix(VALIDATION) for name in named)
    raise ConfigError(
        f"training did not measure {objective.metric}: validation has "
        f"{', '.join(measured) or 'no metric'}; choose one with --metric"
    )


def list_rungs(
    base: Config, every: Sequence[Settings], count: int, *, halving: bool
) -> tuple[int, ...]:
    """Return the global step at which each rung ends, or a single 0 without halving."""
    if not halving:
        return (0,)
    if any(key == "training.steps" for settings in every for key in settings):
        raise ConfigError("training.steps: --asha sets the steps of each rung; set only one value")
    if any(make_config(base, each).training.schedule.name == "cosine" for each in every):
        raise ConfigError(
            "training.schedule.name: 'cosine' ends at training.steps, which differs between the "
            "rungs of --asha; choose constant, exponential or piecewise"
        )
    steps = base.training.steps
    if steps == AUTOMATIC:
        raise ConfigError(
            "training.steps: --asha needs a number, but the value is derived from the examples "
            "after they are prepared; add --set training.steps=N (`flotilla prepare` of the same "
            "source shows the maximum)"
        )
    if count < REDUCTION:
        raise ConfigError(
            f"--asha needs at least {REDUCTION} trials, but there are only {count}; add trials, or "
            "omit --asha"
        )
    if steps // REDUCTION < LEAST_STEPS:
        raise ConfigError(
            f"training.steps: {steps} is too few for --asha: set at least "
            f"{LEAST_STEPS * REDUCTION}, because the first rung trains for a third of the steps"
        )
    rungs, left = [steps], count
    while left >= REDUCTION and rungs[0] // REDUCTION >= LEAST_STEPS:
        rungs.insert(0, rungs[0] // REDUCTION)
        left //= REDUCTION
    return tuple(rungs)


def count_on_rung(rung: int, trials: int) -> int:
    """Return the number of trials that reach a rung if none fails, at least 1."""
    return max(1, trials // int(REDUCTION**rung))


def rank_trials(trials: Iterable[Trial], rung: int, objective: Objective) -> list[Trial]:
    """Return the trials that finished a rung, best first. Ties are ordered by number."""
    found = [(result.value, each) for each in trials if (result := each.get_result(rung))]
    return [each for _, each in sorted(found, key=lambda x: (objective.rank(x[0]), x[1].number))]


def find_best(trials: Sequence[Trial], objective: Objective) -> Trial | None:
    """Return the best trial of the highest rung with a result, or None if all failed.

    Raises `ConfigError` if the trials were compared by different metrics.
    """
    objective = find_objective(trials, objective)
    ended = [each for each in trials if each.status == DONE and each.last]
    top = max((each.last.rung for each in ended if each.last), default=0)
    return next(iter(rank_trials(ended, top, objective)), None)


def make_table(sweep: Sweep) -> tuple[list[str], list[list[str]]]:
    """Return the header and rows of the trial table, by rung (highest first), then best first."""
    objective = sweep.compared_by

    def order(trial: Trial) -> tuple[int, float, int]:
        value = objective.rank(trial.last.value) if trial.last else math.inf
        return (-trial.last.rung if trial.last else 1, value, trial.number)

    rows = [
        [
            str(each.number),
            *(each.settings.get(key, "") for key in sweep.keys),
            round_value(each.last.value) if each.last else "",
            str(each.last.steps) if each.last else "",
            duration(each.seconds),
            "best" if each.number == sweep.best else each.status,
        ]
        for each in sorted(sweep.trials, key=order)
        # With a time limit, most trials are never sampled. Leave out trials without settings.
        if each.settings or not sweep.minutes
    ]
    metric = spell_metric(objective.metric)
    short = [key.rpartition(".")[2] for key in sweep.keys]
    taken = [*short, "trial", metric, "steps", "duration", "status"]
    heads = [
        key if taken.count(name) > 1 else name for key, name in zip(sweep.keys, short, strict=True)
    ]
    return ["trial", *heads, metric, "steps", "duration", "status"], rows


def to_markdown(sweep: Sweep) -> bytes:
    """Return the trial table as Markdown, after the best trial and its command."""
    count, best = len(sweep.trials), sweep.chosen
    lines = [f"Trial {best.number} is the best of {count}." if best else f"{count} trials."]
    if best:
        lines[0] += f" To run it again: {report.code(sweep.command())}"
    lines.append("\n".join(report.table(*make_table(sweep))))
    lines += [report.plain(f"trial {x.number}: {x.error}") for x in sweep.trials if x.error]
    title = f"# {report.plain(sweep.sweep_id)}"
    return ("\n\n".join([title, *lines]) + "\n").encode(errors="backslashreplace")

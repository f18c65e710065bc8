"""The outer loop of all strategies: steps, checkpoints, validation, history, early stop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from trainer.checkpoints import checkpoints as checkpointing
from trainer.checkpoints import warm_start
from trainer.checkpoints.checkpoints import Checkpoints, RestoredCheckpoint
from trainer.config.schema import Config, TrainingConfig
from trainer.errors import ClusterLostError, RunInterruptedError, UserError
from trainer.strategies.strategy import Problem, Strategy
from trainer.training.journal import Journal, UnpublishedJournal

# One stretch of steps between two looks at the world: long enough that it costs little that workers
# wait for each other at its end, short enough that a person sees progress and that an end that was
# asked for comes soon.
STRETCH_SECONDS = 1.0
# A stretch that no boundary cuts short is a multiple of it, and so of the turns of a strategy.
FEWEST = 20
# A mean loss this many times that of a blind guess is as lost as one that is not a number: weights
# that Adam has thrown far away still give finite losses, and never come back.
DIVERGED = 1e4


@dataclass(kw_only=True)
class Pace:
    """How many steps to run before the next look, from the speed that was seen."""

    training: TrainingConfig
    steps_per_second: float = 0.0

    def stretch(self, step: int) -> int:
        """Return the steps from `step` to the next look, at most to the next boundary."""
        most = max(1, int(self.steps_per_second * STRETCH_SECONDS / FEWEST)) * FEWEST
        boundaries = [self.training.steps, step + most]
        for every in (self.training.checkpoint_every, self.training.validate_every):
            if every:
                boundaries.append((step // every + 1) * every)
        return min(boundaries) - step


@dataclass(kw_only=True)
class Patience:
    """Whether validation has stopped to gain; `limit` 0 never stops."""

    limit: int
    best: float = math.inf
    without_gain: int = 0

    def exhausted(self, loss: float) -> bool:
        """Take one validation loss in, and say whether training should end."""
        self.without_gain = 0 if loss < self.best else self.without_gain + 1
        self.best = min(self.best, loss)
        return 0 < self.limit <= self.without_gain


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What the loop needs beside the strategy.

    Attributes:
        problem: made for the global step at which this life begins.
        validate: measures the current variables of the strategy; None where there is no split.
        stopping: whether an end was asked for.
        enough: whether the validations of another task say that training should end.
        stepping: holds while steps are under way; the place to watch that they come.
    """

    problem: Callable[[int], Problem]
    validate: Callable[[Strategy], dict[str, float]] | None
    stopping: Callable[[], bool]
    enough: Callable[[], bool] = lambda: False
    stepping: Callable[[], AbstractContextManager[None]] = nullcontext


def train(
    config: Config, strategy: Strategy, checkpoints: Checkpoints, around: Surroundings
) -> int:
    """Train to `training.steps` from the newest valid checkpoint; return the global step reached.

    Where there is none yet, `training.warm_start` may name another model's weights to begin with.

    The final checkpoint is published when this returns.

    Raises:
        UserError: the loss is not finite, or a checkpoint does not fit.
        RunInterruptedError: `around.stopping` said so; a last checkpoint is published.
        ClusterLostError: the strategy lost a task that it cannot do without, or the tasks that run
            the loop side by side found different checkpoints.
    """
    found = checkpoints.newest()
    # A run that goes on has its own weights.
    warm = None if found else warm_start.fetched(config.training.warm_start, checkpoints.scratch)
    problem = around.problem(found.global_step if found else 0)
    strategy.build(problem)
    _require_same_beginning(strategy, found.global_step if found else -1)
    if found:
        checkpointing.restore(found, strategy.variables(), io_device=strategy.io_device)
    elif warm:
        warm_start.take(warm, strategy.variables(), io_device=strategy.io_device)
    keeper = Journal if strategy.publishes else UnpublishedJournal
    journal = keeper(config, checkpoints, strategy.global_step())
    journal.begin(strategy.global_step(), _origin(found, warm))
    loop = _Loop(config.training, strategy, journal, around, DIVERGED * problem.chance_loss)
    if not found:
        loop.save()
    return loop.run()


class _Loop:
    def __init__(
        self,
        training: TrainingConfig,
        strategy: Strategy,
        journal: Journal,
        around: Surroundings,
        most_loss: float,
    ) -> None:
        self._training = training
        self._strategy = strategy
        self._journal = journal
        self._around = around
        self._most_loss = most_loss
        self._pace = Pace(training=training)
        self._patience = Patience(limit=training.patience)
        self._enough = False
        self._seconds = journal.rows[-1]["seconds"] if journal.rows else 0.0
        self._saved_at = time.monotonic()
        for row in journal.rows:
            if "validation_loss" in row:
                self._enough = self._patience.exhausted(row["validation_loss"])

    def run(self) -> int:
        step = self._strategy.global_step()
        while step < self._training.steps:
            stop, enough, late, stretch = self._strategy.agreed(
                int(self._around.stopping()),
                int(self._enough),
                int(self._checkpoint_late()),
                self._pace.stretch(step),
            )
            if stop:
                uri = self._end()
                raise RunInterruptedError(f"interrupted at global step {step}; checkpoint {uri}")
            if enough:
                break
            if late:
                self.save()
            before, step = step, self._trained(step, stretch)
            if _crossed(before, step, self._training.checkpoint_every, self._training.steps):
                self.save()
        self._end()
        return step

    def save(self) -> str:
        uri = self._journal.save(self._strategy.variables(), self._strategy.io_device)
        self._saved_at = time.monotonic()
        self._enough = self._enough or self._around.enough()
        # A task that goes on, or leaves, could not begin again with one that dies while it writes.
        self._strategy.agreed(0)
        return uri

    def _end(self) -> str:
        uri = self.save()
        self._strategy.leave()
        return uri

    def _trained(self, before: int, stretch: int) -> int:
        step, row = self._stretch(before, stretch)
        if _crossed(before, step, self._training.validate_every, self._training.steps):
            row |= self._validated(step)
        if "validation_loss" in row:
            self._enough = self._patience.exhausted(row["validation_loss"])
        self._journal.add(row)
        return step

    def _stretch(self, step: int, stretch: int) -> tuple[int, dict[str, Any]]:
        began = time.monotonic()
        with self._around.stepping():
            report = self._strategy.run(stretch)
        seconds = time.monotonic() - began
        reached = self._strategy.global_step()
        if not report.loss <= self._most_loss:
            what = f"the loss is {report.loss:g}"
            raise UserError(checkpointing.diverged(what, reached, self._journal.last_checkpoint))
        speed = (reached - step) / max(seconds, 1e-9)
        self._pace.steps_per_second = speed
        self._seconds += seconds
        row = {
            "global_step": reached,
            "loss": report.loss,
            "learning_rate": self._strategy.learning_rate(),
            "steps_per_second": round(speed, 3),
            "seconds": round(self._seconds, 3),
            **report.metrics,
        }
        self._journal.progress(row)
        return reached, row

    def _validated(self, step: int) -> dict[str, float]:
        if self._around.validate is None:
            return {}
        metrics = self._around.validate(self._strategy)
        for name, value in metrics.items():
            if not math.isfinite(value):
                what = f"the validation {name} is {value}"
                raise UserError(checkpointing.diverged(what, step, self._journal.last_checkpoint))
        return {f"validation_{name}": value for name, value in metrics.items()}

    def _checkpoint_late(self) -> bool:
        every = self._training.checkpoint_seconds
        return bool(every) and time.monotonic() - self._saved_at >= every


def _origin(found: RestoredCheckpoint | None, warm: RestoredCheckpoint | None) -> str:
    """Return the checkpoint with which the first life of a run began, or an empty text."""
    if found:
        return str(found.fields.get("warmed_from", ""))
    return warm.uri if warm else ""


def _require_same_beginning(strategy: Strategy, start: int) -> None:
    if strategy.agreed(start, -start) != (start, -start):
        raise ClusterLostError("the workers found different checkpoints: all have to begin again")


def _crossed(before: int, after: int, every: int, end: int) -> bool:
    """Whether a multiple of `every`, or the end, lies in (before, after]; never for 0."""
    return bool(every) and (after // every > before // every or after >= end > before)

"""The outer loop of all strategies: steps, checkpoints, validation, history, early stop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainer import checkpoints as checkpointing
from trainer import events
from trainer.board import Board
from trainer.checkpoints import Checkpoints, Found
from trainer.config import Config, TrainingConfig
from trainer.errors import RunInterruptedError, UserError
from trainer.history import History
from trainer.strategies.interface import Problem, Strategy

# One stretch of steps between two looks at the world: long enough to cost nothing, short enough
# that a person sees progress and that an end that was asked for comes soon.
STRETCH_SECONDS = 0.5
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
        most = max(20, int(self.steps_per_second * STRETCH_SECONDS))
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
    """

    problem: Callable[[int], Problem]
    validate: Callable[[Strategy], dict[str, float]] | None
    stopping: Callable[[], bool]


def train(
    config: Config, strategy: Strategy, checkpoints: Checkpoints, around: Surroundings
) -> int:
    """Train to `training.steps` from the newest valid checkpoint; return the global step reached.

    The final checkpoint is published when this returns.

    Raises:
        UserError: the loss is not finite, or a checkpoint does not fit.
        RunInterruptedError: `around.stopping` said so; a last checkpoint is published.
        ClusterLostError: the strategy lost a task that it cannot do without.
    """
    found = checkpoints.newest()
    start = found.global_step if found else 0
    problem = around.problem(start)
    strategy.build(problem)
    if found:
        checkpointing.restore(found, strategy.variables(), io_device=strategy.io_device)
    _say_begin(config, found)
    loop = _Loop(config, strategy, checkpoints, around, DIVERGED * problem.chance_loss)
    if not found:
        loop.save()
    return loop.run()


def _say_begin(config: Config, found: Found | None) -> None:
    start = found.global_step if found else 0
    events.emit("life", global_step=start, steps=config.training.steps, resumed=bool(found))


class _Loop:
    def __init__(
        self,
        config: Config,
        strategy: Strategy,
        checkpoints: Checkpoints,
        around: Surroundings,
        most_loss: float,
    ) -> None:
        self._training = config.training
        self._fields = {"strategy": config.training.strategy, "config_hash": config.digest()}
        self._strategy = strategy
        self._checkpoints = checkpoints
        self._history = History(checkpoints.uri, start=strategy.global_step())
        self._board = Board(checkpoints.uri)
        self._around = around
        self._most_loss = most_loss
        self._pace = Pace(training=config.training)
        self._patience = Patience(limit=config.training.patience)
        self._enough = False
        for row in self._history.rows:
            if "validation_loss" in row:
                self._enough = self._patience.exhausted(row["validation_loss"])

    def run(self) -> int:
        step = saved = self._strategy.global_step()
        saved_at = time.monotonic()
        enough = self._enough
        while step < self._training.steps and not enough:
            if self._around.stopping():
                uri = self.save()
                raise RunInterruptedError(f"interrupted at global step {step}; checkpoint {uri}")
            before = step
            step, row = self._stretch(step)
            if _crossed(before, step, self._training.validate_every, self._training.steps):
                row |= self._validated(step)
            if "validation_loss" in row:
                enough = self._patience.exhausted(row["validation_loss"])
            self._history.add(row)
            self._board.add(row)
            if self._checkpoint_due(saved, step, saved_at):
                self.save()
                saved, saved_at = step, time.monotonic()
        self.save()
        return step

    def _stretch(self, step: int) -> tuple[int, dict[str, Any]]:
        began = time.monotonic()
        loss = self._strategy.run(self._pace.stretch(step))
        seconds = time.monotonic() - began
        reached = self._strategy.global_step()
        if not loss <= self._most_loss:
            what = f"the loss is {loss:g}"
            raise UserError(checkpointing.diverged(what, reached, self._checkpoints.last))
        speed = (reached - step) / max(seconds, 1e-9)
        self._pace.steps_per_second = speed
        row = {
            "global_step": reached,
            "loss": loss,
            "learning_rate": self._strategy.learning_rate(),
            "steps_per_second": round(speed, 3),
            "seconds": round(self._history.seconds() + seconds, 3),
        }
        left = (self._training.steps - reached) / speed if speed else 0.0
        events.emit("progress", steps=self._training.steps, seconds_left=round(left, 1), **row)
        return reached, row

    def _validated(self, step: int) -> dict[str, float]:
        if self._around.validate is None:
            return {}
        figures = self._around.validate(self._strategy)
        for name, value in figures.items():
            if not math.isfinite(value):
                what = f"the validation {name} is {value}"
                raise UserError(checkpointing.diverged(what, step, self._checkpoints.last))
        return {f"validation_{name}": value for name, value in figures.items()}

    def _checkpoint_due(self, saved: int, step: int, saved_at: float) -> bool:
        if _crossed(saved, step, self._training.checkpoint_every, self._training.steps):
            return True
        every = self._training.checkpoint_seconds
        return bool(every) and time.monotonic() - saved_at >= every

    def save(self) -> str:
        last = self._history.rows[-1] if self._history.rows else {}
        metrics = {name: value for name, value in last.items() if name != "global_step"}
        position = {"examples": last.get("global_step", 0) * self._training.batch_size}
        return self._checkpoints.save(
            self._strategy.variables(),
            io_device=self._strategy.io_device,
            fields={**self._fields, "metrics": metrics, "input_position": position},
        )


def _crossed(before: int, after: int, every: int, end: int) -> bool:
    """Whether a multiple of `every`, or the end, lies in (before, after]; never for 0."""
    return bool(every) and (after // every > before // every or after >= end > before)

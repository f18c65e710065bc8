"""Learning rate schedules over the exact global step."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from keras.optimizers import schedules
from keras.optimizers.schedules import LearningRateSchedule as Schedule

from trainer.config import TrainingConfig
from trainer.schedule_config import CosineArgs, ExponentialArgs, PiecewiseArgs


def learning_rate(training: TrainingConfig) -> float | Schedule:
    """Return what the optimizer takes: a number, or a schedule over its counter of updates."""
    rate = training.optimizer.learning_rate
    warmup = training.schedule.warmup_steps
    after = _after(training, rate)
    if not warmup:
        return after
    return Warmup(after=after, rate=rate, steps=warmup)


def _after(training: TrainingConfig, rate: float) -> float | Schedule:
    """Return what follows the warm-up, counted from its end."""
    args = training.schedule.parsed()
    if isinstance(args, CosineArgs):
        steps = max(1, training.steps - training.schedule.warmup_steps)
        return schedules.CosineDecay(rate, steps, alpha=args.alpha)
    if isinstance(args, ExponentialArgs):
        return schedules.ExponentialDecay(
            rate, args.decay_steps, args.decay_rate, staircase=args.staircase
        )
    if isinstance(args, PiecewiseArgs):
        # Keras keeps a value up to and with its boundary; here the next one begins at it.
        boundaries = [boundary - 1 for boundary in args.boundaries]
        return schedules.PiecewiseConstantDecay(boundaries, [rate * f for f in args.factors])
    return rate


class Warmup(Schedule):
    """From `rate / steps` in equal steps up to `rate`, then `after`."""

    def __init__(self, *, after: float | Schedule, rate: float, steps: int) -> None:
        """Warm up over `steps` global steps."""
        self._after = after
        self._rate = rate
        self._steps = steps

    def __call__(self, step: Any) -> tf.Tensor:
        """Return the learning rate of the update after `step` others."""
        done = tf.cast(tf.convert_to_tensor(step), tf.float32)
        rising = self._rate * (done + 1.0) / self._steps
        later = tf.maximum(done - self._steps, 0.0)
        after = self._after(later) if isinstance(self._after, Schedule) else self._after
        return tf.where(done < self._steps, rising, after)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments, as Keras asks of every schedule."""
        return {"after": self._after, "rate": self._rate, "steps": self._steps}

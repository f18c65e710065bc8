"""The outer loop of all strategies: checkpoints, validation, history and early stopping.

The inner loop is `Strategy.advance`: it applies steps, and never saves, logs or evaluates. The
outer loop repeats these parts:

1. A barrier (`Strategy.barrier`). All tasks that run the outer loop agree on the next action:
   whether to stop, to stop early or to save a checkpoint, and the number of steps. No other code
   decides this.
2. The inner loop: about a second of steps, never across a boundary of `checkpoint_every` or
   `validate_every`. Between boundaries, the workers of an asynchronous strategy do not stop.
   Afterwards, the servers store the global step.
3. At a boundary: a validation and a row of the history, then a checkpoint.

All workers are idle during a save or a validation (`Strategy.rest`). A checkpoint ends with its own
barrier: no task continues or leaves before it is written. A request to stop takes effect at the
next barrier. A last checkpoint is saved before `RunInterruptedError` is raised.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn

from flotilla.trainer.checkpoints import warm_start
from flotilla.trainer.checkpoints.checkpoints import Checkpoints, RestoredCheckpoint
from flotilla.trainer.checkpoints.index import Interval, SaveInterval
from flotilla.trainer.config.main_metric import BY_LOSS, VALIDATION, VALIDATION_LOSS, MainMetric
from flotilla.trainer.config.schema import Config, TrainingConfig
from flotilla.trainer.events.progress import Work
from flotilla.trainer.optimizers.optimizers import begin_averages, swap_averages
from flotilla.trainer.runtime.errors import (
    ClusterLostError,
    RunInterruptedError,
    UserError,
    describe_divergence,
)
from flotilla.trainer.runtime.signals import end_at_once
from flotilla.trainer.strategies.strategy import Problem, Report, Strategy
from flotilla.trainer.telemetry.tensorboard import make_profiler
from flotilla.trainer.training.journal import Callbacks, Journal, open_stream, read_origin
from flotilla.trainer.training.recovery import Recovery

log = logging.getLogger(__name__)
# Duration of an inner loop, in seconds. It is long enough to hide the work between two inner loops,
# even if workers wait for each other, and short enough to show progress and to react to a request
# to stop.
INNER_LOOP_SECONDS = 1.0
# The number of steps of an inner loop is a multiple of this number, unless the loop ends at a
# boundary. It is a multiple of the number of steps that strategies unroll in a graph, at most 20.
STEP_MULTIPLE = 20
# Training has diverged if the mean loss is not finite, or exceeds this multiple of the chance loss.
# Without this limit, training could continue with weights that Adam has moved so far that they
# never recover, although their loss is finite.
DIVERGED = 1e4


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """The callbacks of the outer loop.

    Attributes:
        make_problem: called once, with the global step at which the attempt begins.
        validate: measures the current variables of the strategy, at each boundary of
            `training.validate_every`, or None if this task does not validate.
        should_stop: called before each inner loop. True ends training with a last checkpoint. It
            may raise an error, for example if the lease of the checkpoints is lost.
        should_stop_early: called after each checkpoint. True means that the validations of another
            task (the evaluator) no longer improve.
        judged_by: called after the model is built. It returns the checkpoint fields that name the
            main metric, as `MainMetric.of` reads them.
        watch_steps: a context manager that detects a stall. It wraps each inner loop, and each
            write of the global step to the servers.
        steps_of_epoch: the number of steps per epoch, or 0 if unknown.
    """

    make_problem: Callable[[int], Problem]
    validate: Callable[[Strategy], dict[str, float]] | None = None
    should_stop: Callable[[], bool] = lambda: False
    should_stop_early: Callable[[], bool] = lambda: False
    judged_by: Callable[[], Mapping[str, Any]] = dict
    watch_steps: Callable[[], AbstractContextManager[None]] = nullcontext
    steps_of_epoch: float = 0.0


@dataclass(kw_only=True)
class Pace:
    """The length of the next inner loop, computed from the speed of the last one."""

    training: TrainingConfig
    steps_per_second: float = 0.0

    def next_steps(self, step: int) -> int:
        """Return the number of steps to run from `step`, at most up to the next boundary."""
        turns = int(self.steps_per_second * INNER_LOOP_SECONDS / STEP_MULTIPLE)
        return min(self.boundary(step) - step, max(1, turns) * STEP_MULTIPLE)

    def boundary(self, step: int) -> int:
        """Return the next global step after `step` at which all workers must be idle."""
        training = self.training
        validations = Interval(steps=training.validate_every, last_step=training.steps)
        boundaries = [
            each.find_next(step) for each in (SaveInterval.from_config(training), validations)
        ]
        if profile := self.training.profile:
            # Stop right before the first traced step, and right after the last one.
            boundaries += [edge for edge in (profile[0] - 1, profile[1]) if edge > step]
        return min(boundaries)


@dataclass(kw_only=True)
class EarlyStopping:
    """A rule that ends training after `patience` validations without a new best. 0 disables it."""

    patience: int
    main: MainMetric = BY_LOSS
    best: tuple[bool, float, float] = (True, math.inf, math.inf)
    without_gain: int = 0

    def update(self, row: Mapping[str, Any]) -> bool:
        """Add the row of a validation, and return whether training should end."""
        order = self.main.order(row)
        self.without_gain = 0 if order < self.best else self.without_gain + 1
        self.best = min(self.best, order)
        return 0 < self.patience <= self.without_gain


def train(config: Config, strategy: Strategy, checkpoints: Checkpoints, hooks: Hooks) -> int:
    """Train to `training.steps` from the newest valid checkpoint. Return the global step reached.

    A run without a checkpoint starts from `training.warm_start`, if set. The final checkpoint is
    saved when the function returns, but a background thread may still be publishing it.

    Raises:
        UserError: the loss is not finite, or a checkpoint does not fit.
        RunInterruptedError: `hooks.should_stop` returned true. A last checkpoint is saved.
        ClusterLostError: the strategy lost a required task, or the tasks that run the outer loop
            found different checkpoints.
    """
    found = checkpoints.newest()
    recovery = Recovery(config, strategy, checkpoints)
    with recovery.free_at_end():
        return _begin_loop(found, config, strategy, checkpoints, hooks, recovery).run(found)


def _begin_loop(  # noqa: PLR0913, PLR0917
    found: RestoredCheckpoint | None,
    config: Config,
    strategy: Strategy,
    checkpoints: Checkpoints,
    hooks: Hooks,
    recovery: Recovery,
) -> _OuterLoop:
    """Build the strategy, set the initial values of its variables, and return the outer loop."""
    # Fetch no initial weights for a resumed run, which continues with its own weights.
    warm = (
        None if found else warm_start.fetch_weights(config.training.warm_start, checkpoints.scratch)
    )
    start = found.global_step if found else -1
    with end_at_once():
        problem = hooks.make_problem(recovery.find_begin(found))
        strategy.begin_visits(open_stream(problem, found))
        strategy.build(problem)
    if strategy.barrier(start, -start) != (start, -start):
        raise ClusterLostError("the workers found different checkpoints, so all of them restart")
    kept = recovery.restore(found)
    begun = read_origin(found)
    if warm:
        begun = warm_start.load(
            warm, strategy.variables(), io_device=strategy.io_device, servers=checkpoints.servers
        )
    begin_averages(strategy.variables(), kept)
    if found or warm:
        strategy.refresh()
    journal = Journal(
        config,
        checkpoints,
        strategy.global_step(),
        hooks.steps_of_epoch,
        publishes=strategy.publishes,
    )
    judged_by = hooks.judged_by()
    journal.begin(strategy.global_step(), {**begun, **judged_by}, start)
    stopping = EarlyStopping(patience=config.training.patience, main=MainMetric.of(judged_by))
    max_loss = DIVERGED * problem.chance_loss
    callbacks = Callbacks(config.training, publishes=strategy.publishes)
    loop = _OuterLoop(
        config.training, strategy, journal, hooks, recovery, stopping, callbacks, max_loss
    )
    if not found:
        loop.save()
    return loop


class _Decision(NamedTuple):
    """The next action of all tasks that run the outer loop: flags (0 or 1), and steps to run."""

    stop: int
    stop_early: int
    save: int
    steps: int


class _InnerResult(NamedTuple):
    global_step: int
    loss: float
    metrics: dict[str, Any]
    seconds: float
    steps_per_second: float


class _OuterLoop:
    def __init__(  # noqa: PLR0913, PLR0917
        self,
        training: TrainingConfig,
        strategy: Strategy,
        journal: Journal,
        hooks: Hooks,
        recovery: Recovery,
        early_stopping: EarlyStopping,
        callbacks: Callbacks,
        max_loss: float,
    ) -> None:
        self._training, self._strategy, self._journal = training, strategy, journal
        self._hooks, self._recovery, self._max_loss = hooks, recovery, max_loss
        self._profiler = make_profiler(training, strategy, journal.logs)
        self._pace = Pace(training=training)
        self._saves = SaveInterval.from_config(training)
        self._validations = Interval(steps=training.validate_every, last_step=training.steps)
        self._early_stopping, self._callbacks = early_stopping, callbacks
        self._stop_early = self._goes_by_loss = False
        self._owes_save = False
        self._seconds = journal.rows[-1]["seconds"] if journal.rows else 0.0
        self._saved_at = self._stepped_at = time.monotonic()
        # When the last inner loop ended, if workers have continued since then. None if all are
        # idle.
        self._goes_on_since: float | None = None
        for row in journal.rows:
            self._note_validation(row)

    def run(self, found: RestoredCheckpoint | None) -> int:
        self._strategy.settle(is_whole=True)
        try:
            if found:
                self._catch_up(found)
            return self._run()
        finally:
            self._profiler.end()

    def _catch_up(self, found: RestoredCheckpoint) -> None:
        """Do the work at a boundary that the previous attempt reached but did not finish."""
        step, saved = self._strategy.global_step(), found.global_step
        self._owes_save = self._saves.is_due(saved, step)
        self._saved_at -= self._recovery.seconds_since_save()
        if step > saved:
            self._make_up_validation(step)
        if self._owes_save:
            self.save()
        self._stepped_at = time.monotonic()

    def _run(self) -> int:
        step, variables = self._strategy.global_step(), self._strategy.variables()
        with self._summaries(step):
            self._callbacks.begin(step)
        while step < self._training.steps:
            decision = self._decide(step)
            if self._goes_on_since and (decision.stop or decision.stop_early or decision.save):
                # Wait until all workers are idle: their last updates may complete training.
                step = self._process(step, self._inner_loop(step, self._strategy.rest))
                continue
            if decision.stop:
                self._profiler.end()
                uri = self.save()
                self._strategy.leave()
                raise RunInterruptedError(f"interrupted at global step {step}; checkpoint {uri}")
            if decision.stop_early:
                break
            if decision.save:
                self.save()
            self._profiler.update(step, self._pace.steps_per_second)
            boundary = self._pace.boundary(step)
            advance = partial(self._strategy.advance, decision.steps, boundary)
            step = self._process(step, self._inner_loop(step, advance))
            if self._goes_on_since and step < self._training.steps:
                # Prepare while workers continue. Otherwise, the first save would wait for the
                # preparation.
                self._journal.prepare_save(variables, self._strategy.io_device)
        # End the trace first, because its files are uploaded with the last checkpoint.
        self._profiler.end()
        self.save()
        with self._summaries(step):
            self._callbacks.end(self._journal.rows[-1] if self._journal.rows else {})
        return step

    def _summaries(self, step: int) -> AbstractContextManager[None]:
        # Open the file only for callbacks, because that is a TensorFlow operation, which waits for
        # all tasks.
        return self._journal.summaries(step) if self._callbacks else nullcontext()

    def _process(self, step: int, result: _InnerResult) -> int:
        """Process the result of an inner loop that began at `step`, and return the step reached."""
        if not result.loss <= self._max_loss:
            self._raise_diverged(f"the loss is {result.loss:g}", result.global_step)
        if result.global_step == step:
            self._require_no_stall(step)
            return step
        before, step = step, result.global_step
        self._owes_save = self._saves.is_due(before, step)
        # Store the step on the servers before it is reported elsewhere.
        with self._hooks.watch_steps():
            self._recovery.note(step)
        self._record(before, result)
        if self._owes_save:
            self.save()
        self._stepped_at = time.monotonic()
        return step

    def save(self) -> str:
        self._owes_save = True
        visited = self._strategy.describe_position()
        uri = self._journal.save(
            self._strategy.variables(),
            self._strategy.io_device,
            visited,
            self._recovery.list_recovered(),
        )
        self._saved_at = time.monotonic()
        self._stop_early = self._stop_early or self._hooks.should_stop_early()
        # Without this barrier, a task could continue even if the publishing task died here.
        self._strategy.barrier()
        self._owes_save = False
        return uri

    def _decide(self, step: int) -> _Decision:
        # Before the first inner loop of an attempt has ended, no save is due by time.
        since = time.monotonic() - self._saved_at if self._pace.steps_per_second else 0.0
        own = _Decision(
            stop=int(self._hooks.should_stop()),
            stop_early=int(self._stop_early or self._callbacks.stop),
            save=int(self._saves.is_late(since)),
            steps=self._pace.next_steps(step),
        )
        return _Decision(*self._strategy.barrier(*own))

    def _inner_loop(self, step: int, advance: Callable[[], Report]) -> _InnerResult:
        """Apply steps and measure the time, without saving, logging or evaluating."""
        began = self._goes_on_since or time.monotonic()
        with self._hooks.watch_steps():
            report = advance()
        now = time.monotonic()
        if report.global_step is None:
            self._goes_on_since, reached = None, self._strategy.global_step()
        else:
            self._goes_on_since, reached = now, report.global_step
        return _InnerResult(
            global_step=reached,
            loss=report.loss,
            metrics=dict(report.metrics),
            seconds=now - began,
            steps_per_second=(reached - step) / max(now - began, 1e-9),
        )

    def _require_no_stall(self, step: int) -> None:
        seconds = self._training.stall_timeout
        if time.monotonic() - self._stepped_at > seconds:
            raise ClusterLostError(
                f"no progress for {seconds:g} s: training.strategy {self._training.strategy} runs, "
                f"but applies no step after global step {step}"
            )

    def _record(self, before: int, result: _InnerResult) -> None:
        step = result.global_step
        self._pace.steps_per_second = result.steps_per_second
        self._seconds += result.seconds
        row = {
            "global_step": step,
            "loss": result.loss,
            "learning_rate": self._strategy.learning_rate(),
            "steps_per_second": round(result.steps_per_second, 3),
            "seconds": round(self._seconds, 3),
            **result.metrics,
        }
        if stream := self._strategy.stream:
            row["epoch"] = stream.epoch(self._strategy.position)
        elif self._hooks.steps_of_epoch:
            row["epoch"] = round(step / self._hooks.steps_of_epoch, 4)
        self._journal.progress(row)
        if self._validations.is_due(before, step):
            row |= self._validate(step)
        self._note_validation(row)
        self._journal.add(row)
        is_last = step >= self._training.steps
        if is_last or self._validations.is_due(before, step):
            with self._summaries(step):
                self._callbacks.end_interval(row, is_last=is_last)

    def _make_up_validation(self, step: int) -> None:
        """Validate now if a task died before the validation at the last boundary."""
        rows = [row for row in self._journal.rows if VALIDATION_LOSS in row]
        before = rows[-1]["global_step"] if rows else 0
        if not self._validations.is_due(before, step):
            return
        if metrics := self._validate(step):
            row = {"global_step": step, "seconds": self._seconds, **metrics}
            self._note_validation(row)
            self._journal.add(row)

    def _validate(self, step: int) -> dict[str, float]:
        if self._hooks.validate is None:
            return {}
        if self._training.ema:
            self._strategy.settle(is_whole=False)
        with swap_averages(self._strategy.variables()), Work("validating"):
            metrics = self._hooks.validate(self._strategy)
        self._strategy.settle(is_whole=True)
        for name, value in metrics.items():
            if not math.isfinite(value):
                self._raise_diverged(f"the validation {name} is {value}", step)
        self._journal.emit_validation(step, metrics)
        main = self._early_stopping.main
        if main.name not in metrics and not self._goes_by_loss:
            self._goes_by_loss = True
            log.info("comparing validations by loss, because they do not measure %s", main.name)
        return {f"{VALIDATION}{name}": value for name, value in metrics.items()}

    def _note_validation(self, row: dict[str, Any]) -> None:
        if VALIDATION_LOSS in row:
            self._stop_early = self._early_stopping.update(row)

    def _raise_diverged(self, what: str, step: int) -> NoReturn:
        last, at_once = self._journal.last_checkpoint, not self._journal.rows
        raise UserError(describe_divergence(what, step, last, at_once=at_once))

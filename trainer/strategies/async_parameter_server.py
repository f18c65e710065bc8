"""Asynchronous training on parameter servers.

Every worker pulls the variables, computes a gradient and pushes it, without waiting for the others;
the parameter server applies each as it arrives (Dean et al. 2012, "Large Scale Distributed Deep
Networks", section 4.1). The chief only dispatches: TensorFlow's `ClusterCoordinator` sends closures
to whichever worker is free, and sends a closure again when its worker dies. A closure runs one
portion of the inner loop's steps; a portion has at most `MAX_PORTION` steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import tensorflow as tf

from trainer.strategies.gradients import local_steps_of
from trainer.strategies.parameter_server import Call, Served, worker_number
from trainer.strategies.strategy import Batch, Problem, Report

# A portion whose worker dies is run again as a whole: as many steps may count twice.
MAX_PORTION = 100
# Dispatching a portion takes the chief longer than a small step takes a worker.
MIN_PORTION = 5


def unit_of(steps: int, workers: int, turn: int) -> int:
    """Return the unit of portions, of which they are multiples: `turn`, or 1 for few steps."""
    # With fewer turns the wait for the last of them would take most of the time.
    return turn if steps >= 4 * turn * workers else 1


def portions(steps: int, workers: int, unit: int, *, fine: bool = False) -> list[int]:
    """Return the sizes of the portions, larger ones first.

    A free worker gets half of its share of what is left, so that there are few portions and yet all
    workers end at about the same time, also where one is slower ("guided self-scheduling",
    Polychronopoulos and Kuck 1987, IEEE Transactions on Computers C-36(12)). All are
    multiples of `unit`; the remainder is a portion of its own.

    `fine` is for workers of which one may be several times slower: it begins with half as much and
    ends with single steps, so that nobody waits long for it.
    """
    if fine:
        return _fine_portions(steps, workers, unit)
    smallest = max(unit, min(MIN_PORTION, steps // workers), steps // (4 * workers))
    cut: list[int] = []
    left = steps
    while left >= unit:
        share = max(smallest, left // (2 * workers))
        cut.append(min(left, max(unit, min(MAX_PORTION, share))) // unit * unit)
        left -= cut[-1]
    return [*cut, left] if left else cut


def _fine_portions(steps: int, workers: int, unit: int) -> list[int]:
    smallest = max(1, steps // (32 * workers))
    cut: list[int] = []
    left = steps
    while left:
        share = min(MAX_PORTION, max(smallest, left // (4 * workers)))
        cut.append(min(left, share // unit * unit or share))
        left -= cut[-1]
    return cut


# Updates that are unrolled in a graph. A TensorFlow loop that spans machines is controlled over the
# network: one iteration of it costs more than a small update.
TURN = 20
# The graph of a turn takes seconds to trace, which a shorter run does not win back.
LONG_RUN = 2000

Update = Callable[[tf.data.Iterator], tf.Tensor]


def turn_of(steps: int, *, whole: bool) -> int:
    """Return how many updates are unrolled in a run of so many steps; 1: none.

    Where variables are not pulled as a `whole`, as rows of them are looked up, the gradient would
    be traced again for each update in the graph.
    """
    return TURN if whole and steps >= LONG_RUN else 1


class AsyncParameterServer(Served):
    """One chief, parameter servers, and workers that never wait for each other."""

    spares_workers = True

    def build(self, problem: Problem) -> None:
        """Connect, and build model and optimizer on the servers, input on the workers."""
        self.connect()
        self.build_model(problem)
        self._tally = self.tally()
        self._iterator = self.worker_batches(problem)
        seldom = self.config.training.pull_every > 1
        update = self._local_steps(problem) if seldom else self._step(problem)
        self._has_turned = False
        self._one_by_one, self._in_turns = self._closure(update, 1), self._closure(update, TURN)
        self._turn = turn_of(self.config.training.steps, whole=self.pulls_whole())

    def run(self, steps: int) -> Report:
        """Apply `steps` updates, spread over the workers as they are free."""
        workers = self.cluster.count("worker")
        unit = unit_of(steps, workers, self._turn)
        sizes = portions(steps, workers, unit, fine=self.stream is not None)
        self.warming = unit > 1 and not self._has_turned
        ended = self.dispatch(
            [
                self._call(size, unit, self.lease(before * self._batches_of_update()))
                for size, before in zip(sizes, accumulate(sizes, initial=0), strict=False)
            ]
        )
        self.pass_over(steps * self._batches_of_update())
        self._has_turned |= self.warming
        self.warming = False
        local_steps = self.config.training.pull_every
        total = 0.0
        for n, (loss, worker, applied) in zip(sizes, ended, strict=True):
            total += loss
            # A worker pulls right after it has pushed: in between are only updates of others.
            staleness = (applied - n) / n
            self._tally.add(f"worker-{int(worker)}", n * local_steps, staleness=staleness)
        return Report(loss=total / steps, metrics=self.metrics())

    def _batches_of_update(self) -> int:
        return self.config.training.pull_every * self.batches_of_step()

    def _call(self, steps: int, unit: int, lease: Sequence[tf.Tensor]) -> Call:
        if unit == 1 or steps % TURN:
            return self._one_by_one, (self._iterator, tf.constant(steps), *lease)
        return self._in_turns, (self._iterator, tf.constant(steps // TURN), *lease)

    def _closure(self, update: Update, turn: int) -> Callable[..., tf.Tensor]:
        """Return the function that runs a number of turns, each of `turn` updates."""
        applied = self.applied

        @tf.function
        def closure(iterator: tf.data.Iterator, turns: tf.Tensor, *lease: tf.Tensor) -> tf.Tensor:
            if lease:
                batches = turns * turn * self._batches_of_update()
                iterator = self.lent(iterator, batches, *lease)
            total = tf.constant(0.0)
            before = applied.read_value()
            for _ in tf.range(turns):
                for _ in range(turn):
                    total += update(iterator)
            # In one tensor: the coordinator fetches results one by one.
            results = [total, worker_number(), applied.read_value() - before]
            return tf.stack([tf.cast(each, tf.float64) for each in results])

        return closure  # type: ignore[no-any-return]

    def _step(self, problem: Problem) -> Update:
        gradient = self.gradient(problem)

        def step(batch: Batch) -> tf.Tensor:
            value, found = gradient(batch)
            self.optimizer.apply(found, self.model.trainable_variables)
            return value

        # The coordinator traces in the scope of its strategy, where Keras updates a variable in a
        # replica's context only.
        return lambda iterator: self.connected.run(step, args=(self.towers.take(iterator),))

    def _local_steps(self, problem: Problem) -> Update:
        training = self.config.training
        steps = local_steps_of(
            self.model,
            self.optimizer,
            problem.loss,
            steps=training.pull_every,
            jit=training.jit_compile,
            scale=self.scale,
            towers=self.towers,
        )
        return lambda iterator: self.connected.run(steps, args=(iterator,))

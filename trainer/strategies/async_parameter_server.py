"""Asynchronous training on parameter servers.

Every worker pulls the variables, computes a gradient and pushes it, without waiting for the others;
the parameter server applies each as it comes (Dean et al. 2012, "Large Scale Distributed Deep
Networks", section 4.1). The chief only dispatches: TensorFlow's `ClusterCoordinator` sends closures
of several steps to whichever worker is free, and sends a closure again when its worker dies.

How a stretch of steps is cut into the portions that the chief hands to free workers.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from trainer.strategies.gradients import local_steps_of
from trainer.strategies.parameter_server import Call, Served, Tally, worker_number
from trainer.strategies.strategy import Batch, Problem, Report

# A portion whose worker dies is done again as a whole: as many steps may count twice.
MOST = 100
# Handing out a portion takes the chief longer than a small step takes a worker.
FEW = 5


def unit_of(steps: int, workers: int, turn: int) -> int:
    """Return of what portions of a stretch are multiples: `turn`, or 1 where steps are too few."""
    # With fewer turns than these the last of them would be most of the time.
    return turn if steps >= 4 * turn * workers else 1


def portions(steps: int, workers: int, unit: int) -> list[int]:
    """Return the sizes of the portions, larger ones first.

    A free worker gets half of its share of what is left, so that few portions are handed out and
    yet all workers end at about the same time, also where one is slower ("guided self-scheduling",
    Polychronopoulos and Kuck 1987, IEEE Transactions on Computers C-36(12)). All are
    multiples of `unit`; what is left over is a portion of its own.
    """
    smallest = max(unit, min(FEW, steps // workers), steps // (4 * workers))
    cut: list[int] = []
    left = steps
    while left >= unit:
        share = max(smallest, left // (2 * workers))
        cut.append(min(left, max(unit, min(MOST, share))) // unit * unit)
        left -= cut[-1]
    return [*cut, left] if left else cut


# Updates that stand one after the other in a graph. A loop of TensorFlow that spans machines is
# controlled over the network: a turn of it takes more of the processors than a small update.
TURN = 20
# The graph of a turn takes seconds to make, which fewer steps than these do not bring back.
LONG_RUN = 2000

Update = Callable[[tf.data.Iterator], tf.Tensor]


def turn_of(steps: int, *, whole: bool) -> int:
    """Return how many updates make a turn in a run of so many steps; 1: none is made.

    Where variables are not pulled as a `whole`, as rows of them are looked up, the gradient would
    be traced anew for each update in the graph.
    """
    return TURN if whole and steps >= LONG_RUN else 1


class AsyncParameterServer(Served):
    """One chief, parameter servers, and workers that never wait for each other."""

    spares_workers = True

    def build(self, problem: Problem) -> None:
        """Connect, place model and optimizer on the parameter servers, input on the workers."""
        self.connect()
        self.build_model(problem)
        self._tally = Tally(batch_size=self.config.training.batch_size)
        self._iterator = self.worker_batches(problem)
        update = self._local_steps(problem) if self._pulls_seldom() else self._step(problem)
        self._has_turned = False
        self._one_by_one, self._in_turns = self._closure(update, 1), self._closure(update, TURN)
        self._turn = turn_of(self.config.training.steps, whole=self.pulls_whole())

    def run(self, steps: int) -> Report:
        """Apply `steps` updates, spread over the workers as they are free."""
        workers = self.cluster.count("worker")
        unit = unit_of(steps, workers, self._turn)
        sizes = portions(steps, workers, unit)
        self.warming = unit > 1 and not self._has_turned
        ended = self.dispatch([self._call(size, unit) for size in sizes])
        self._has_turned |= self.warming
        self.warming = False
        local_steps = self.config.training.pull_every
        total = 0.0
        for n, (loss, worker, applied) in zip(sizes, ended, strict=True):
            total += loss
            # A worker pulls right after it has pushed: between the two stand the others' updates.
            staleness = (applied - n) / n
            self._tally.add(f"worker-{int(worker)}", n * local_steps, staleness=staleness)
        return Report(loss=total / steps, metrics=self._tally.metrics())

    def _call(self, steps: int, unit: int) -> Call:
        if unit == 1 or steps % TURN:
            return self._one_by_one, (self._iterator, tf.constant(steps))
        return self._in_turns, (self._iterator, tf.constant(steps // TURN))

    def _closure(self, update: Update, turn: int) -> Callable[..., tf.Tensor]:
        """Return the function that makes so many turns, each of `turn` updates."""
        applied = self.applied

        @tf.function
        def closure(iterator: tf.data.Iterator, turns: tf.Tensor) -> tf.Tensor:
            total = tf.constant(0.0)
            before = applied.read_value()
            for _ in tf.range(turns):
                for _ in range(turn):
                    total += update(iterator)
            # In one tensor: the coordinator fetches each by itself before it goes on.
            told = [total, worker_number(), applied.read_value() - before]
            return tf.stack([tf.cast(each, tf.float64) for each in told])

        return closure  # type: ignore[no-any-return]

    def _pulls_seldom(self) -> bool:
        return self.config.training.pull_every > 1

    def _step(self, problem: Problem) -> Update:
        gradient = self.gradient(problem)

        def step(batch: Batch) -> tf.Tensor:
            value, found = gradient(batch)
            self.optimizer.apply(found, self.model.trainable_variables)
            return value

        # The coordinator traces in the scope of its strategy, where Keras updates a variable in a
        # replica's context only.
        return lambda iterator: self.connected.run(step, args=(next(iterator),))

    def _local_steps(self, problem: Problem) -> Update:
        training = self.config.training
        steps = local_steps_of(
            self.model,
            self.optimizer,
            problem.loss,
            steps=training.pull_every,
            jit=training.jit_compile,
        )
        return lambda iterator: self.connected.run(steps, args=(iterator,))

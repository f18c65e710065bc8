"""Which examples are trained on next, and which were, for `data.partition: dynamic`.

All epochs are one stream of positions. A position is an example: that of number
`shuffled(position)`, in another order in each epoch. The chief lends ranges of positions to workers
that are free; what a range means is known to every worker without a message. Between two inner
loops nothing is lent, so that all visits are a `Position`: how far the stream was visited, and the
gaps before, whose gradients came too late. It is saved with the variables that saw these examples.

`Tally` counts the steps and examples of each worker, however they were handed out, and how stale
its updates were.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import tensorflow as tf

from flotilla.trainer.config.data import DYNAMIC

log = logging.getLogger(__name__)
# The first position of a range, and how many follow; in a plan, where it begins in what is next.
Range = tuple[int, int]
# Staleness is that of so many of the last closures: enough for a 95th percentile.
STALENESS_WINDOW = 400


@dataclass(frozen=True, kw_only=True)
class Position:
    """All positions below `visited` were trained on, but for those in `gaps`."""

    visited: int = 0
    gaps: tuple[Range, ...] = ()

    def plan(self) -> list[Range]:
        """Return what is visited next as pairs: the n-th position, from n on; gaps come first."""
        pairs, begin = [], 0
        for first, count in self.gaps:
            pairs.append((begin, first))
            begin += count
        return [*pairs, (begin, self.visited)]

    def after(self, taken: Iterable[Range]) -> Position:
        """Return the position after visits, as ranges of `plan`; what was skipped is a gap."""
        plan = self.plan()
        known = plan[-1][0]
        missed, end = [], 0
        for first, count in sorted(taken):
            if first > end:
                missed.append((end, first))
            end = max(end, first + count)
        if end < known:
            missed.append((end, known))
        ends = [begin for begin, _ in plan[1:]] + [max(end, known)]
        gaps: list[Range] = []
        for (begin, first), until in zip(plan, ends, strict=True):
            for low, high in missed:
                low_here, high_here = max(low, begin), min(high, until)
                if low_here < high_here:
                    _append(gaps, (first + low_here - begin, high_here - low_here))
        return Position(visited=self.visited + max(0, end - known), gaps=tuple(sorted(gaps)))

    @property
    def examples(self) -> int:
        """How many visits there were."""
        return self.visited - sum(count for _, count in self.gaps)


def _append(gaps: list[Range], new: Range) -> None:
    if gaps and sum(gaps[-1]) == new[0]:
        gaps[-1] = (gaps[-1][0], gaps[-1][1] + new[1])
    else:
        gaps.append(new)


@dataclass(frozen=True, kw_only=True)
class Stream:
    """The training split by the numbers of its examples, and where in it training is.

    Attributes:
        seed: of the orders of the epochs.
        held: what a worker keeps: a dataset of one element.
        read: that element and a vector of numbers to a batch of these examples.
        run: how many examples stay next to each other in all orders.
        position: where the attempt begins.
    """

    examples: int
    seed: int
    held: Callable[[], tf.data.Dataset]
    read: Callable[[Any, tf.Tensor], Any]
    run: int = 1
    position: Position = field(default_factory=Position)

    def resumed(self, saved: Any, uri: str) -> Stream:
        """Return it at what a checkpoint says, or, with a line of log, at its beginning."""
        fields = saved if isinstance(saved, Mapping) else {}
        own = {"partition": DYNAMIC, "of": self.examples, "seed": self.seed, "run": self.run}
        other = [name for name, value in own.items() if fields.get(name) != value]
        if other:
            log.warning(
                "%s has no position in this order of the examples (%s differs): an epoch begins",
                uri,
                other[0],
            )
            return self
        gaps = tuple((int(first), int(count)) for first, count in fields["gaps"])
        return replace(self, position=Position(visited=int(fields["visited"]), gaps=gaps))

    def to_json(self, position: Position) -> dict[str, Any]:
        """Return what a checkpoint says of a position."""
        own = {"partition": DYNAMIC, "of": self.examples, "seed": self.seed, "run": self.run}
        return {**own, **asdict(position)}

    def epoch(self, position: Position) -> float:
        """Return how many epochs were visited."""
        return round(position.examples / self.examples, 4)

    def numbers(self, positions: tf.Tensor) -> tf.Tensor:
        """Return the numbers of the examples at some positions, int64, as they are shuffled."""
        whole = self.examples // self.run
        epochs, places = positions // self.examples, positions % self.examples
        seeds = tf.stack([tf.fill(tf.shape(epochs), tf.cast(self.seed, tf.int64)), epochs], 1)
        seeds = tf.pad(tf.cast(seeds, tf.int32), [[0, 0], [0, 1]])
        shuffled = tf.raw_ops.RandomIndexShuffle(
            index=tf.minimum(places // self.run, max(whole - 1, 0)),
            seed=seeds,
            max_index=tf.constant(max(whole - 1, 0), tf.int64),
            rounds=4,
        )
        # What is left of a last run stays in its place.
        in_runs = shuffled * self.run + places % self.run
        return tf.where(places < whole * self.run, in_runs, places)

    def batch(self, held: Any, plan: tf.Tensor, first: tf.Tensor, size: int) -> Any:
        """Return the batch of what is next, from the `first` one on; see `Position.plan`."""
        wanted = first + tf.range(size, dtype=tf.int64)
        plan = tf.reshape(tf.io.decode_raw(plan, tf.int64), (-1, 2))
        pair = tf.searchsorted(plan[:, 0], wanted, side="right") - 1
        rows = tf.gather(plan, pair)
        numbers = self.numbers(rows[:, 1] + wanted - rows[:, 0])
        batch = self.read(held, numbers)
        # The size of a batch is known to a compiled graph.
        return tf.nest.map_structure(
            lambda each: tf.ensure_shape(each, [size, *each.shape[1:]]), batch
        )

    def lent(
        self, held: Any, plan: tf.Tensor, first: tf.Tensor, *, batches: tf.Tensor, size: int
    ) -> tf.data.Dataset:
        """Return a number of batches of what is next, from the `first` one on."""
        numbers = tf.data.Dataset.range(tf.cast(batches, tf.int64))
        return numbers.map(lambda n: self.batch(held, plan, first + n * size, size))

    def endless(self, size: int, index: int = 0, of: int = 1) -> tf.data.Dataset:
        """Return batch `index`, `index + of`, ... of all that is next."""
        plan = encode_plan(self.position)
        both = tf.data.Dataset.zip((self.held().cache().repeat(), tf.data.Dataset.counter()))
        return both.map(
            lambda held, n: self.batch(held, plan, (n * of + index) * size, size)
        ).prefetch(2)


class Batches:
    """Batches by their numbers from 0 on, as from an iterator; for `tf.function`."""

    def __init__(self, batch: Callable[[int], Any], parts: int) -> None:
        """Return stacks of `parts` batches, where that is above 1."""
        self._batches = map(batch, itertools.count())
        self._parts = parts

    def __next__(self) -> Any:
        """Return the next one."""
        found = list(itertools.islice(self._batches, self._parts))
        if self._parts == 1:
            return found[0]
        return tf.nest.map_structure(lambda *each: tf.stack(each), *found)


def encode_plan(position: Position) -> tf.Tensor:
    """Return the plan of a position as one text, for which no graph is traced again."""
    return tf.constant(np.array(position.plan(), "<i8").tobytes())


class Tally:
    """Sums over one attempt of a chief."""

    def __init__(self, *, batch_size: int) -> None:
        """Begin at zero; a local step is `batch_size` examples."""
        self._batch_size = batch_size
        self._steps = Counter[str]()
        self._staleness: deque[float] = deque(maxlen=STALENESS_WINDOW)

    def add(self, worker: str, steps: int, staleness: float | None = None) -> None:
        """Add local steps of a worker and, where it was measured, their mean staleness.

        The staleness of an update is how many others were applied between its pull and its push.
        """
        self._steps[worker] += steps
        if staleness is not None:
            self._staleness.append(staleness)

    def metrics(self) -> dict[str, Any]:
        """Return the metrics for the history."""
        workers = {
            name: {"local_steps": steps, "examples": steps * self._batch_size}
            for name, steps in sorted(self._steps.items())
        }
        if not self._staleness:
            return {"workers": workers}
        return {
            "workers": workers,
            "staleness_mean": float(np.mean(self._staleness)),
            "staleness_p95": float(np.percentile(self._staleness, 95)),
        }

"""The input position for `data.partition: dynamic`: the examples that training has visited.

All epochs form one stream of positions, and each epoch has its own order of the examples: position
p refers to the example `Stream.numbers(p)`. The chief leases ranges of positions to free
workers, and a worker computes the examples of a range itself. No lease is open between two inner
loops, so a `Position` describes all visits: the visited length of the stream, and the gaps, which
are ranges whose gradients arrived too late. A checkpoint stores the position with the variables.

`Tally` counts the steps and examples of each worker, and the staleness of its updates.
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
# A range of positions, as its start and length. In a plan, a pair as returned by `Position.plan`.
Range = tuple[int, int]
# Number of recent staleness values to keep, enough for a 95th percentile.
STALENESS_WINDOW = 400


@dataclass(frozen=True, kw_only=True)
class Position:
    """The positions that training has visited: all below `visited`, except those in `gaps`."""

    visited: int = 0
    gaps: tuple[Range, ...] = ()

    def plan(self) -> list[Range]:
        """Return pairs (n, p): upcoming examples from index n on are at positions p, p + 1, ..."""
        pairs, begin = [], 0
        for first, count in self.gaps:
            pairs.append((begin, first))
            begin += count
        return [*pairs, (begin, self.visited)]

    def advance(self, taken: Iterable[Range]) -> Position:
        """Return the position after visiting ranges of plan indices. Skipped ones become gaps."""
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
        """The number of visited examples."""
        return self.visited - sum(count for _, count in self.gaps)


def _append(gaps: list[Range], new: Range) -> None:
    if gaps and sum(gaps[-1]) == new[0]:
        gaps[-1] = (gaps[-1][0], gaps[-1][1] + new[1])
    else:
        gaps.append(new)


@dataclass(frozen=True, kw_only=True)
class Stream:
    """The training split as a stream of example numbers, with the input position.

    Attributes:
        examples: the number of examples in the split.
        seed: the seed for the order of every epoch.
        held: builds a dataset with a single element, which each worker keeps in memory.
        read: a function from that element and a vector of example numbers to a batch.
        run: the length of each run of examples that stay adjacent in every order.
        position: the input position at which the attempt starts.
    """

    examples: int
    seed: int
    held: Callable[[], tf.data.Dataset]
    read: Callable[[Any, tf.Tensor], Any]
    run: int = 1
    position: Position = field(default_factory=Position)

    def resume(self, saved: Any, uri: str) -> Stream:
        """Return the stream at the `saved` position, or unchanged if `saved` has another order."""
        fields = saved if isinstance(saved, Mapping) else {}
        other = [name for name, value in self._order.items() if fields.get(name) != value]
        if other:
            log.warning(
                "%s has no input position for this order of the examples (%s differs): starting "
                "a new epoch",
                uri,
                other[0],
            )
            return self
        gaps = tuple((int(first), int(count)) for first, count in fields["gaps"])
        return replace(self, position=Position(visited=int(fields["visited"]), gaps=gaps))

    def to_json(self, position: Position) -> dict[str, Any]:
        """Return a position as JSON fields for a checkpoint."""
        return {**self._order, **asdict(position)}

    @property
    def _order(self) -> dict[str, Any]:
        return {"partition": DYNAMIC, "of": self.examples, "seed": self.seed, "run": self.run}

    def epoch(self, position: Position) -> float:
        """Return the number of epochs visited so far, with a fraction for the current one."""
        return round(position.examples / self.examples, 4)

    def numbers(self, positions: tf.Tensor) -> tf.Tensor:
        """Return the numbers of the examples at `positions`, as int64."""
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
        # If the last group of `run` examples is incomplete, it stays in place.
        in_runs = shuffled * self.run + places % self.run
        return tf.where(places < whole * self.run, in_runs, places)

    def batch(self, held: Any, plan: tf.Tensor, first: tf.Tensor, size: int) -> Any:
        """Return the batch of the next `size` examples from index `first` of an encoded plan."""
        wanted = first + tf.range(size, dtype=tf.int64)
        plan = tf.reshape(tf.io.decode_raw(plan, tf.int64), (-1, 2))
        pair = tf.searchsorted(plan[:, 0], wanted, side="right") - 1
        rows = tf.gather(plan, pair)
        numbers = self.numbers(rows[:, 1] + wanted - rows[:, 0])
        batch = self.read(held, numbers)
        # A compiled graph needs the static size of a batch.
        return tf.nest.map_structure(
            lambda each: tf.ensure_shape(each, [size, *each.shape[1:]]), batch
        )

    def lend(
        self, held: Any, plan: tf.Tensor, first: tf.Tensor, *, batches: tf.Tensor, size: int
    ) -> tf.data.Dataset:
        """Return a dataset of the next `batches` batches from index `first` of an encoded plan."""
        numbers = tf.data.Dataset.range(tf.cast(batches, tf.int64))
        return numbers.map(lambda n: self.batch(held, plan, first + n * size, size))

    def endless(self, size: int, index: int = 0, of: int = 1) -> tf.data.Dataset:
        """Return an endless dataset of the batches `index`, `index + of`, ... of the stream."""
        plan = encode_plan(self.position)
        both = tf.data.Dataset.zip((self.held().cache().repeat(), tf.data.Dataset.counter()))
        return both.map(
            lambda held, n: self.batch(held, plan, (n * of + index) * size, size)
        ).prefetch(2)


class Batches:
    """An iterator over batches 0, 1, 2, ..., for use in a `tf.function`."""

    def __init__(self, batch: Callable[[int], Any], parts: int) -> None:
        """Create an iterator over stacks of `parts` batches, or over batches if `parts` is 1."""
        self._batches = map(batch, itertools.count())
        self._parts = parts

    def __next__(self) -> Any:
        """Return the next batch or stack."""
        found = list(itertools.islice(self._batches, self._parts))
        if self._parts == 1:
            return found[0]
        return tf.nest.map_structure(lambda *each: tf.stack(each), *found)


def encode_plan(position: Position) -> tf.Tensor:
    """Return a position's plan as a string scalar, so that its length never causes a retrace."""
    return tf.constant(np.array(position.plan(), "<i8").tobytes())


class Tally:
    """The local steps of each worker and the recent staleness, in one attempt of the chief."""

    def __init__(self, *, batch_size: int) -> None:
        """Start the counts at zero. A local step has `batch_size` examples."""
        self._batch_size = batch_size
        self._steps = Counter[str]()
        self._staleness: deque[float] = deque(maxlen=STALENESS_WINDOW)

    def add(self, worker: str, steps: int, staleness: float | None = None) -> None:
        """Add local steps of a worker and, if measured, their mean staleness.

        The staleness of an update is the number of other updates between its pull and its push.
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

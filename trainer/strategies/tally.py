"""Who did how much: local steps and examples of each worker, and how stale its updates were."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import tensorflow as tf

# Stands in the working folder of every worker.
NUMBER_FILE = "number.txt"
# So many of the last closures tell the staleness: enough for a 95th percentile.
WATCHED = 400


def worker_number() -> tf.Tensor:
    """Return the number of the worker that runs this graph, as a scalar int64."""
    return tf.strings.to_number(tf.io.read_file(NUMBER_FILE), tf.int64)


class Tally:
    """Sums over the life of a chief."""

    def __init__(self, *, batch_size: int) -> None:
        """Begin at zero; a local step takes `batch_size` examples."""
        self._batch_size = batch_size
        self._steps: dict[str, int] = {}
        self._staleness: deque[float] = deque(maxlen=WATCHED)

    def add(self, worker: str, steps: int, staleness: float | None = None) -> None:
        """Add local steps of a worker and, where it was watched, their mean staleness.

        The staleness of an update is the number of other updates that were applied between its
        pull and its push.
        """
        self._steps[worker] = self._steps.get(worker, 0) + steps
        if staleness is not None:
            self._staleness.append(staleness)

    def figures(self) -> dict[str, Any]:
        """Return the figures for the history."""
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

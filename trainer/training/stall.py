"""The end of a wait that would last for ever: training without a step for `stall_timeout`.

A task that is stopped leaves its connections standing, and TensorFlow waits on them without end.
What is a step is read from the exact counter, so that a long stretch of slow steps is no stall.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from trainer import events
from trainer.cluster import liveness, termination
from trainer.cluster.liveness import STARTING_SECONDS, Peers
from trainer.errors import BEGIN_AGAIN
from trainer.strategies.strategy import Strategy
from trainer.topology import Cluster, Task

# How often the counter is looked at while the timeout lasts.
_LOOKS = 4
_REMEDY = "raise training.stall_timeout if a step takes longer"


class StallWatch:
    """Ends this process with `BEGIN_AGAIN` when training stands still because of another task."""

    def __init__(self, strategy: Strategy, look: Callable[[], Peers], folder: Path) -> None:
        """Watch the steps of `strategy`; `look` asks the other tasks.

        The words go to `folder`, the working folder of this task.
        """
        self._strategy = strategy
        self._seconds = strategy.config.training.stall_timeout
        self._ask = look
        self._folder = folder
        self._began = time.monotonic()
        self._has_stepped = False
        # How often nothing has moved though every task answered.
        self._waits = 0
        self._moved = threading.Event()
        self._stepping = threading.Event()

    def begin(self) -> None:
        """Watch from now on, to the end of the process."""
        for work in (self._look, self._wait):
            threading.Thread(target=work, name="stall", daemon=True).start()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Steps are due in this block; around it only a task that is silent is a stall."""
        self._moved.set()
        self._stepping.set()
        try:
            yield
            self._has_stepped = True
        finally:
            self._stepping.clear()
            self._moved.set()

    def _look(self) -> None:
        seen, pause = -1, threading.Event()
        while not pause.wait(self._seconds / _LOOKS):
            # Before the cluster is connected, and after it is lost, there is no counter to read;
            # the read of one on a server that is stopped does not return.
            with suppress(Exception):
                step = self._strategy.global_step()
                if step != seen:
                    self._moved.set()
                seen = step

    def _wait(self) -> None:
        while True:
            self._moved.clear()
            if self._moved.wait(self._seconds):
                self._waits = 0
            else:
                self._judge()

    def _judge(self) -> None:
        peers = self._ask()
        if self._moved.is_set():
            return
        names = [str(task) for task in peers.silent]
        if names:
            events.emit("stalled", tasks=names, seconds=self._seconds)
            if not self._strategy.spares_workers or {t.role for t in peers.silent} != {"worker"}:
                verb = "do" if len(names) > 1 else "does"
                self._end(f"{', '.join(names)} {verb} not answer", self._seconds)
        elif self._stepping.is_set() and not peers.gone and self._is_warm():
            self._waits += 1
            # A task that was started again answers before it has come to its first step.
            if self._waits > 1:
                self._end(f"every task answers; {_REMEDY}", self._waits * self._seconds)

    def _is_warm(self) -> bool:
        """Say whether no graph is used for the first time, traced and compiled, any more."""
        warm = self._has_stepped and not self._strategy.warming
        return warm or time.monotonic() - self._began > STARTING_SECONDS

    def _end(self, why: str, seconds: float) -> NoReturn:
        words = f"no progress for {seconds:g} s: {why}"
        # The main thread waits inside of TensorFlow, where no exception would reach it.
        termination.leave(self._folder, words)
        with suppress(OSError):
            sys.stderr.write(f"flotilla: {words}\n")
            sys.stderr.flush()
        os._exit(BEGIN_AGAIN)


def stall_watch(strategy: Strategy, cluster: Cluster, task: Task, folder: Path) -> StallWatch:
    """Return the watch of a task that leads, or of one of those that lead side by side."""
    return StallWatch(strategy, lambda: liveness.probe_peers(cluster, task), folder)

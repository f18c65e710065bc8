"""Stall detection, which ends a process if training makes no progress.

A stopped task keeps its connections open, and TensorFlow waits on them forever. The exact counter
shows progress, so a long inner loop with slow steps is not a stall.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from flotilla.trainer import events
from flotilla.trainer.cluster import termination
from flotilla.trainer.cluster.liveness import STARTING_SECONDS, Peers
from flotilla.trainer.runtime.background import Loop
from flotilla.trainer.runtime.errors import BEGIN_AGAIN
from flotilla.trainer.runtime.output.streams import say
from flotilla.trainer.strategies.strategy import Strategy

# Number of reads of the counter per timeout.
_READS = 4
_REMEDY = "raise training.stall_timeout if a step takes longer"


class StallWatch:
    """A thread that ends this process if training stalls for `training.stall_timeout`."""

    def __init__(self, strategy: Strategy, probe: Callable[[], Peers], folder: Path) -> None:
        """Watch the steps. `probe` checks the other tasks. The message is written to `folder`."""
        self._strategy = strategy
        self._seconds = strategy.config.training.stall_timeout
        self._probe = probe
        self._folder = folder
        self._began = time.monotonic()
        self._has_stepped = False
        self._seen = -1
        # The number of consecutive timeouts in which every task answered but no step was completed.
        self._waits = 0
        self._moved = threading.Event()
        self._stepping = threading.Event()

    def begin(self) -> None:
        """Start the thread, which runs until the process ends."""
        threading.Thread(target=self._wait, name="stall", daemon=True).start()
        pause = self._seconds / _READS
        Loop(self._read_counter, pause, name="steps", failing="cannot read the global step").start()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Expect steps in this block. Outside of it, only an unresponsive task is a stall."""
        self._moved.set()
        self._stepping.set()
        try:
            yield
            self._has_stepped = True
        finally:
            self._stepping.clear()
            self._moved.set()

    def _read_counter(self) -> None:
        # Ignore errors, because there is no counter before the cluster is connected.
        with suppress(Exception):
            step = self._strategy.global_step()
            if step != self._seen:
                self._moved.set()
            self._seen = step

    def _wait(self) -> None:
        while True:
            self._moved.clear()
            if self._moved.wait(self._seconds):
                self._waits = 0
            else:
                self._judge()

    def _judge(self) -> None:
        peers = self._probe()
        if self._moved.is_set():
            return
        names = [str(task) for task in peers.silent]
        if names:
            events.emit(events.Stalled(tasks=tuple(names), seconds=self._seconds))
            are_spared = self._strategy.capabilities.spares_workers
            if not are_spared or {t.role for t in peers.silent} != {"worker"}:
                verb = "do" if len(names) > 1 else "does"
                self._end(f"{', '.join(names)} {verb} not answer", self._seconds)
        elif self._stepping.is_set() and not peers.gone and self._is_warm():
            self._waits += 1
            # Wait for two timeouts, because a restarted task answers before it completes a step.
            if self._waits > 1:
                self._end(f"every task responds; {_REMEDY}", self._waits * self._seconds)

    def _is_warm(self) -> bool:
        """Return whether all graphs are traced and compiled, or have had enough time for it."""
        warm = self._has_stepped and not self._strategy.warming
        return warm or time.monotonic() - self._began > STARTING_SECONDS

    def _end(self, why: str, seconds: float) -> NoReturn:
        message = f"no progress for {seconds:g} s: {why}"
        # An exception would not reach the main thread, which waits inside TensorFlow.
        termination.write(self._folder, message)
        say(f"flotilla: {message}")
        os._exit(BEGIN_AGAIN)

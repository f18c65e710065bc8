"""Map the parts of a source in parallel processes on this machine.

A process takes seconds to import TensorFlow. If there are only a few parts, they are mapped in the
current process, unless `data.runner.processes` is set. On Linux, each process ends when its parent
ends, even if the parent is killed.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.data.preparation.parts import map_part
from flotilla.trainer.data.source import Part, Source
from flotilla.trainer.events.progress.work import Work
from flotilla.trainer.runtime import cores
from flotilla.trainer.runtime.errors import UserError

# Minimum number of parts per process that makes starting it worthwhile.
_FEWEST = 2
_PR_SET_PDEATHSIG = 1  # prctl(2)
Done = Callable[[Path], None]


def map_parts(  # noqa: PLR0913
    source: Source,
    parts: Sequence[Part],
    folder: Path,
    *,
    config: DataConfig,
    work: Work,
    done: Done,
) -> None:
    """Map parts into subfolders of `folder`, in any order.

    `work` counts the examples, and `done` is called in this process with the subfolder of each
    mapped part. Raises `UserError` if a part cannot be read, or a process was killed.
    """
    processes = config.runner.processes
    count = min(processes or cores.usable(), len(parts) if processes else len(parts) // _FEWEST)
    mapping = _Mapping(source, folder, config)
    if count < _FEWEST:
        mapping.map(parts, work.add, lambda part: done(folder / part.folder))
        return
    stripes = [parts[index::count] for index in range(count)]
    work.say(f"starting {count} processes")

    def took(answer: Part | int) -> None:
        if isinstance(answer, Part):
            done(folder / answer.folder)
        else:
            work.add(answer)
            work.say("")

    _run_processes(mapping, stripes, took)


@dataclass(frozen=True)
class _Mapping:
    source: Source
    folder: Path
    config: DataConfig

    def map(
        self, parts: Sequence[Part], count: Callable[[int], None], done: Callable[[Part], None]
    ) -> None:
        selection = self.source.select()
        for part in parts:
            place = self.folder / part.folder
            map_part(self.source, selection, part, place, config=self.config, count=count)
            done(part)


def _run_processes(
    mapping: _Mapping, stripes: Sequence[Sequence[Part]], took: Callable[[Part | int], None]
) -> None:
    context = multiprocessing.get_context("spawn")
    running: dict[Any, tuple[SpawnProcess, list[Part]]] = {}
    try:
        for stripe in stripes:
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(
                target=_work, args=(mapping, stripe, os.getpid(), writer), daemon=True
            )
            process.start()
            # Close the parent's copy, so that the pipe ends when the process ends.
            writer.close()
            running[reader] = (process, list(stripe))
        while running:
            for reader in set(running).intersection(wait(list(running))):
                process, left = running[reader]
                if not _take_answer(reader, process, left, took):
                    del running[reader]
    finally:
        for process, _ in running.values():
            process.kill()
            process.join()


def _take_answer(
    reader: Any, process: SpawnProcess, left: list[Part], took: Callable[[Part | int], None]
) -> bool:
    """Handle a message, which is None at the end of a part; return whether more will follow."""
    try:
        answer = reader.recv()
    except EOFError:
        process.join()
        if left:
            code = process.exitcode or 0
            cause = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise UserError(
                f"a process that prepared part {left[0].number} was ended by {cause}; finished "
                "parts are kept: run it again, with fewer data.runner.processes if it ran out of "
                "memory"
            ) from None
        return False
    if isinstance(answer, Exception):
        raise answer
    took(left.pop(0) if answer is None else answer)
    return True


def _work(mapping: _Mapping, parts: Sequence[Part], parent: int, answers: Any) -> None:
    # Ctrl-C reaches the whole process group; the parent ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _exit_with_parent(parent)
    try:
        mapping.map(parts, answers.send, lambda _part: answers.send(None))
    # The parent raises the exception again.
    except Exception as error:
        answers.send(error if isinstance(error, UserError | OSError) else RuntimeError(repr(error)))


def _exit_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)

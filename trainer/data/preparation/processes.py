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

    Args:
        source: the source to read.
        parts: the parts that have not been mapped yet.
        folder: local folder; the subfolder of a part has the part's number as its name.
        config: the data section, with the maximum number of processes.
        work: counts the examples.
        done: called in this process with the folder of each mapped part.

    Raises:
        UserError: a part cannot be read, or a process was killed.
    """
    processes = config.runner.processes
    count = min(processes or cores.usable(), len(parts) if processes else len(parts) // _FEWEST)
    if count < _FEWEST:
        selection = source.select()
        for part in parts:
            place = folder / part.folder
            map_part(source, selection, part, place, config=config, count=work.add)
            done(place)
        return
    stripes = [parts[index::count] for index in range(count)]

    work.say(f"starting {count} processes")

    def took(answer: Part | int) -> None:
        if isinstance(answer, Part):
            done(folder / answer.folder)
        else:
            work.add(answer)
            work.say("")

    _run_processes(source, stripes, folder, config, took)


def _run_processes(
    source: Source,
    stripes: Sequence[Sequence[Part]],
    folder: Path,
    config: DataConfig,
    took: Callable[[Part | int], None],
) -> None:
    context = multiprocessing.get_context("spawn")
    running: dict[Any, tuple[SpawnProcess, list[Part]]] = {}
    try:
        for stripe in stripes:
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(
                target=_work,
                args=(source, stripe, folder, config, os.getpid(), writer),
                daemon=True,
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
            raise UserError(
                f"a process that prepared part {left[0].number} was ended by "
                f"{_cause(process.exitcode or 0)}; finished parts are kept: run it again, with "
                "fewer data.runner.processes if it ran out of memory"
            ) from None
        return False
    if isinstance(answer, Exception):
        raise answer
    took(left.pop(0) if answer is None else answer)
    return True


def _cause(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _work(  # noqa: PLR0913, PLR0917
    source: Source,
    parts: Sequence[Part],
    folder: Path,
    config: DataConfig,
    parent: int,
    answers: Any,
) -> None:
    """Map parts one after another, as the main function of a process."""
    # Ctrl-C reaches the whole process group; the parent ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _exit_with_parent(parent)
    try:
        selection = source.select()
        for part in parts:
            place = folder / part.folder
            map_part(source, selection, part, place, config=config, count=answers.send)
            answers.send(None)
    # The parent raises the exception again.
    except Exception as error:
        answers.send(error if isinstance(error, UserError | OSError) else RuntimeError(repr(error)))


def _exit_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)

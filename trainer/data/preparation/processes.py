"""Map the parts of a source in parallel processes on this machine.

A process takes seconds to import TensorFlow. If there are only a few parts, they are mapped in the
current process, unless `data.runner.processes` is set. On Linux, each process ends when its parent
ends, even if the parent is killed.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path

from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.data.preparation.parts import map_part
from flotilla.trainer.data.source import Part, Source
from flotilla.trainer.events.progress import Work
from flotilla.trainer.runtime import threads
from flotilla.trainer.runtime.errors import UserError

# Minimum number of parts per process that makes starting it worthwhile.
_FEWEST = 2
_PR_SET_PDEATHSIG = 1  # prctl(2)
_COMMAND = (
    "import sys; from flotilla.trainer.data.preparation import processes; "
    "processes.run(int(sys.argv[1]))"
)
Took = Callable[[Part | int], None]


def map_parts(  # noqa: PLR0913
    source: Source,
    parts: Sequence[Part],
    folder: Path,
    *,
    config: DataConfig,
    work: Work,
    done: Callable[[Path], None],
) -> None:
    """Map parts into subfolders of `folder`, in any order.

    `work` counts the examples, and `done` is called in this process with the subfolder of each
    mapped part. Raises `UserError` if a part cannot be read, or a process was killed.
    """
    processes = config.runner.processes
    count = min(processes or threads.usable(), len(parts) if processes else len(parts) // _FEWEST)
    mapping = partial(_map, source, folder, config)
    if count < _FEWEST:
        mapping(parts, work.add, lambda part: done(folder / part.folder))
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


def _map(  # noqa: PLR0913, PLR0917
    source: Source,
    folder: Path,
    config: DataConfig,
    parts: Sequence[Part],
    count: Callable[[int], None],
    done: Callable[[Part], None],
) -> None:
    selection = source.select()
    for part in parts:
        map_part(source, selection, part, folder / part.folder, config=config, count=count)
        done(part)


def _run_processes(
    mapping: Callable[..., None], stripes: Sequence[Sequence[Part]], took: Took
) -> None:
    running: dict[Connection, tuple[subprocess.Popen[bytes], list[Part]]] = {}
    try:
        for stripe in stripes:
            reader, process = _start(mapping, stripe)
            running[reader] = (process, list(stripe))
        while running:
            for reader in set(running).intersection(wait(list(running))):
                assert isinstance(reader, Connection)
                process, left = running[reader]
                if not _take_answer(reader, process, left, took):
                    del running[reader]
    finally:
        for process, _ in running.values():
            process.kill()
            process.wait()


def _start(
    mapping: Callable[..., None], parts: Sequence[Part]
) -> tuple[Connection, subprocess.Popen[bytes]]:
    """Start a process for some parts. Return the connection to its answers, and the process.

    `multiprocessing` is not used, because it would import the user's script again, and hang if the
    process ended before it read its arguments.
    """
    with tempfile.TemporaryFile() as request:
        pickle.dump(sys.path, request)
        pickle.dump((mapping, parts, os.getpid()), request)
        request.seek(0)
        reader, writer = Pipe(duplex=False)
        # Close the parent's copy of the writer, so that the reader gets EOF when the process ends.
        with writer:
            process = subprocess.Popen(
                [sys.executable, "-c", _COMMAND, str(writer.fileno())],
                stdin=request,
                pass_fds=[writer.fileno()],
            )
    return reader, process


def _take_answer(
    reader: Connection, process: subprocess.Popen[bytes], left: list[Part], took: Took
) -> bool:
    """Process a message. Return False if the process has ended. None reports a finished part."""
    try:
        answer = reader.recv()
    except EOFError:
        code = process.wait()
        if left:
            cause = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise UserError(
                f"a process that prepared part {left[0].number} ended unexpectedly ({cause}); run "
                "the command again to prepare the remaining parts; if memory ran out, set a "
                "lower data.runner.processes"
            ) from None
        return False
    if isinstance(answer, Exception):
        raise answer
    took(left.pop(0) if answer is None else answer)
    return True


def run(descriptor: int) -> None:
    """Map the parts requested on standard input, and send answers to the pipe `descriptor`."""
    # Ignore Ctrl-C, which reaches the whole process group. The parent ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Set the parent's import path before unpickling the mapping, which may import modules from it.
    sys.path = pickle.load(sys.stdin.buffer)
    mapping, parts, parent = pickle.load(sys.stdin.buffer)
    _exit_with_parent(parent)
    answers = Connection(descriptor, readable=False)
    try:
        mapping(parts, answers.send, lambda _part: answers.send(None))
    except Exception as error:
        answers.send(error if isinstance(error, UserError | OSError) else RuntimeError(repr(error)))


def _exit_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)

"""Map the parts of a source: in processes of this machine, or with Apache Beam.

A process takes seconds to import TensorFlow. If there are only a few parts, they are mapped in the
current process, unless `data.runner.processes` is set. On Linux, each process ends when its parent
ends, even if the parent is killed.

Beam workers publish the parts, and this process fetches them. A worker needs this package. It also
needs the module of `data.map` or of a user's builder, which it fetches from the run's code bundle
if there is one. The pipeline options, and the stores that workers need, are checked first. Beam is
an optional dependency. It is imported only if it is used. TensorFlow is imported only to map parts.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from flotilla.trainer import code as bundle
from flotilla.trainer import storage
from flotilla.trainer.config.data import DataConfig, RunnerConfig
from flotilla.trainer.data.source import Part, Source
from flotilla.trainer.events.progress import Work
from flotilla.trainer.runtime import threads, user_code
from flotilla.trainer.runtime.errors import ConfigError, TransientError, UserError, nearest
from flotilla.trainer.runtime.loop import Loop

# Minimum number of parts per process that makes starting it worthwhile.
_FEWEST = 2
_PR_SET_PDEATHSIG = 1  # prctl(2)
_COMMAND = (
    "import sys; from flotilla.trainer.data.preparation import runners; "
    "runners.run(int(sys.argv[1]))"
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
    from flotilla.trainer.data.preparation.shards import map_part  # noqa: PLC0415

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


_FAILED = "failed part"
_SUFFIX = ".failed"
_LOOK_SECONDS = 5.0


def map_parts_by_beam(  # noqa: PLR0913
    source: Source, parts: Sequence[Part], folder: Path, *, config: DataConfig, uri: str, work: Work
) -> None:
    """Map parts with a pipeline that publishes each one below `uri`, and fetch them to `folder`.

    Workers report no progress, so the published parts are counted at intervals for `work`. Raises
    `UserError` if a part cannot be read, or the pipeline failed.
    """
    # Beam has no type hints for these calls.
    beam: Any = importlib.import_module("apache_beam")
    for name in storage.names(uri):
        if name.endswith(_SUFFIX):
            storage.delete(storage.join(uri, name))
    if parts:
        mapper = PartMapper(pickle.dumps(source), uri, config)
        try:
            options = pipeline_options(config.runner)
            with _quiet(), _watch(parts, uri, work), beam.Pipeline(options=options) as pipeline:
                # Without a reshuffle, all parts would be one bundle for a single worker.
                made = pipeline | beam.Create(list(parts), reshuffle=False) | beam.Reshuffle()
                _ = made | "map" >> beam.Map(mapper)
        # Catch everything, because a runner may raise any exception.
        except Exception as error:
            failures = storage.list_published(uri, _FAILED)
            for place, _ in failures:
                storage.delete(place)
            if failures:
                raise UserError(failures[0][1].fields["message"]) from error
            raise UserError(
                f"data.runner: the Beam pipeline failed: {user_code.format_error(error)}; run "
                "again to prepare the remaining parts"
            ) from error
    for part in parts:
        storage.fetch(storage.join(uri, part.folder), folder / part.folder)


@contextlib.contextmanager
def _watch(parts: Sequence[Part], uri: str, work: Work) -> Iterator[None]:
    names, seen = {part.folder for part in parts}, 0

    def look() -> None:
        nonlocal seen
        before, seen = seen, len(names.intersection(storage.names(uri)))
        work.add(0, seen - before)

    loop = Loop(look, _LOOK_SECONDS, name="parts", failing="the finished parts cannot be counted")
    loop.start()
    try:
        yield
    finally:
        loop.stop()


class PartMapper:
    """A callable that maps and publishes a part in a Beam worker."""

    def __init__(self, source: bytes, uri: str, config: DataConfig) -> None:
        """Store the pickled source, and the URI below which parts are published."""
        self._source, self._uri, self._config = source, uri, config
        # Workers on other machines get the user's modules from this bundle.
        self._code = user_code.bundle()
        self._opened: tuple[Source, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the opened source out of the pickle. Each worker opens the source again."""
        return {**vars(self), "_opened": None}

    def __call__(self, part: Part) -> int:
        """Map and publish a part, and return its number.

        A failure is published too, because a runner returns only the text of an error.
        """
        from flotilla.trainer.data.preparation.shards import map_part  # noqa: PLC0415

        uri = storage.join(self._uri, part.folder)
        with tempfile.TemporaryDirectory(prefix="part-") as name:
            place = Path(name) / part.folder
            try:
                if self._opened is None:
                    bundle.enter(self._code)
                    source = pickle.loads(self._source)
                    self._opened = source, source.select()
                map_part(*self._opened, part, place, config=self._config)
                storage.publish(place, uri, kind="part")
            except TransientError:
                raise
            except UserError as error:
                empty, fields = Path(name) / "empty", {"message": str(error)}
                empty.mkdir()
                with contextlib.suppress(UserError):
                    storage.publish(empty, f"{uri}{_SUFFIX}", kind=_FAILED, fields=fields)
                raise
        return part.number


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress Beam's info logs, and its error logs for exceptions that are raised anyway."""
    levels = {"apache_beam": logging.WARNING, "apache_beam.runners.common": logging.CRITICAL}
    before = {name: logging.getLogger(name).level for name in levels}
    try:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


# Full class name of the direct runner. With its short name, Beam may download and use another
# runner.
_DIRECT = "apache_beam.runners.portability.fn_api_runner.FnApiRunner"
_HERE = {"FnApiRunner", "PrismRunner", "BundleBasedDirectRunner", "SwitchingDirectRunner"}


def pipeline_options(runner: RunnerConfig) -> Any:
    """Return Beam's `PipelineOptions` for `data.runner`. Raises `ConfigError`."""
    beam = _beam()
    given = _parse(beam, runner.options)
    name = given["runner"] or ""
    if name.lower().removesuffix("runner") in ("", "direct"):
        name = _DIRECT
    try:
        kind = _kind_of_runner(name)
    # Catch everything, because Beam may import the class from any module.
    except Exception as error:
        raise ConfigError(
            f"data.runner.options: --runner={name}: {user_code.format_error(error)}"
        ) from error
    unknown = sorted(given.keys() - _parse(beam, ()).keys())
    # Allow unknown options for other runners, because their job servers may define them.
    if kind in _HERE and unknown:
        hint = nearest(unknown[0], sorted(_parse(beam, ())))
        raise ConfigError(f"data.runner.options: Beam has no option --{unknown[0]}{hint}")
    options = beam.PipelineOptions([*runner.options, f"--runner={name}"])
    # Disable type checks, because Beam infers types that differ from those of the elements.
    options.view_as(beam.TypeOptions).pipeline_type_check = False
    return options


def require_reachable(config: DataConfig, root: str) -> None:
    """Raise `ConfigError` if remote workers cannot reach the storage at `root`."""
    if config.runner.name != "beam":
        return
    beam = _beam()
    options = pipeline_options(config.runner)
    name = options.view_as(beam.StandardOptions).runner
    loopback = options.view_as(beam.PortableOptions).environment_type == "LOOPBACK"
    if _kind_of_runner(name) in _HERE or loopback:
        return
    workers = f"data.runner: the workers of {name} cannot reach"
    if storage.local_path(root):
        raise ConfigError(f"{workers} {root}; set storage.root to a bucket, or leave --runner out")
    named = [str(each) for each in vars(config.splits).values() if "://" in str(each)]
    for place in filter(None, [config.source, *named]):
        if "://" not in place or place.startswith("file:"):
            raise ConfigError(f"{workers} {place}; set data.source to the URI of a bucket")
    if not config.source and not os.environ.get("TFDS_DATA_DIR"):
        raise ConfigError(
            f"{workers} the files of {config.dataset} that TFDS writes on this machine; set "
            "TFDS_DATA_DIR to a folder that the workers mount at the same path"
        )


def _beam() -> Any:
    try:
        return importlib.import_module("apache_beam.options.pipeline_options")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"data.runner: beam needs {error.name}; run pip install 'kfp-flotilla[beam]'"
        ) from None


def _kind_of_runner(name: str) -> str:
    return type(importlib.import_module("apache_beam.runners.runner").create_runner(name)).__name__


def _parse(beam: Any, flags: tuple[str, ...]) -> dict[str, Any]:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            found = beam.PipelineOptions(list(flags)).get_all_options(retain_unknown_options=True)
    except SystemExit:
        reason = said.getvalue().strip().rpartition("error: ")[2]
        raise ConfigError(f"data.runner.options: {reason}") from None
    return dict(found)

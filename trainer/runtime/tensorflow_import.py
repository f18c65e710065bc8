"""Imports TensorFlow and Keras faster, and hides meaningless startup messages of libraries.

Keras 3 imports scikit-learn, matplotlib and pandas, which take a third of the import time, and
TensorBoard imports the S3 client. Both also work without these packages. Garbage collection takes a
fifth of the import time, so it is paused during the import, and later collections skip the imported
objects.

The messages are in a table with their sources. TensorFlow prints its first lines before it reads
any log setting, so they can only be filtered. `filter_output` filters a terminal or the log of a
pod, `QUIET` filters a logger, and `flotilla logs` filters the rest. This file also runs as a
program, and imports nothing of this project.
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from glob import glob
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_NAMES = {"IPython", "botocore", "matplotlib", "pandas", "sklearn"}
_IMPORTERS = {"keras", "tensorboard", "tensorflow"}
# Modules of the import system, whose frames are between the importing module and the finder.
_MACHINERY = {"importlib", "_frozen_importlib"}


class _Absent(MetaPathFinder):
    """A finder that reports some packages as missing, but only to some importers."""

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in _NAMES and _importer() in _IMPORTERS:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return None


def _importer() -> str:
    frame = sys._getframe(2)
    while frame:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _MACHINERY:
            return package
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""


class _Uncollected(MetaPathFinder):
    """A finder that imports TensorFlow without garbage collection and hides its first log lines."""

    def __init__(self) -> None:
        self._searches = False

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # `importlib.util.find_spec` below calls all finders, so ignore its call of this one.
        if fullname != "tensorflow" or self._searches:
            return None
        self._searches = True
        try:
            found = importlib.util.find_spec(fullname)
        finally:
            self._searches = False
        if found is None or found.loader is None:
            return found
        loader, execute = found.loader, found.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            # Restore the loader, because it may also load other modules.
            with suppress(AttributeError):
                del loader.exec_module
            with filter_output():
                _pause_collections(lambda: execute(module))

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return found


def _pause_collections(execute: Callable[[], None]) -> None:
    if not gc.isenabled():
        execute()
        return
    # Collect now, because garbage that exists when the objects are frozen would never be collected.
    gc.collect()
    gc.disable()
    try:
        execute()
        gc.freeze()
    finally:
        gc.enable()


def has_gpus() -> bool:
    """Return whether this machine has a GPU, without loading a library that would initialize it."""
    return any(map(glob, ("/dev/nvidia[0-9]*", "/dev/dxg")))


def prepare() -> None:
    """Prepare this process to import TensorFlow faster and without noise, and to share GPUs."""
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    # Without a GPU, hide errors too, because TensorFlow reports the missing GPU as an error.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2" if has_gpus() else "3")
    logging.getLogger("tensorflow").addFilter(QUIET)
    if not any(isinstance(finder, _Absent) for finder in sys.meta_path):
        sys.meta_path[:0] = [_Absent(), _Uncollected()]


_ABSL = r"\d{4} (?:\d\d:){1,2}\d+(?:\.\d+)?(?::\d+\.\d+)? +\d+ "
# The source file of each message, and a pattern of its text after a logger's time and level.
TABLE: tuple[tuple[str, str], ...] = (
    ("absl/log/initialize.cc", r"WARNING: All log messages before absl::InitializeLog\(\)"),
    ("absl, of TensorFlow: INFO", rf"I{_ABSL}[\w./-]+\.(?:cc|cu|h):\d+\] "),
    ("tsl/platform/default/logging.cc: INFO", r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: I "),
    ("cpu_feature_guard.cc", r"To enable the following instructions: .* rebuild TensorFlow"),
    ("cuda_platform.cc", r"(?:E.*cuda_platform\.cc:\d+\] |.*: E .*)failed call to cuInit"),
    ("cuda_(dnn|fft|blas).cc", r".*Unable to register cu\w+ (?:plugin )?factory"),
    ("cuda_executor.cc", r"W.*cuda_executor\.cc:\d+\] .*NUMA node"),
    ("gpu_device.cc", r"W.*gpu_device\.cc:\d+\] Cannot dlopen some GPU libraries"),
    ("tf2tensorrt/utils/py_utils.cc", r".*TF-TRT Warning: Could not find TensorRT"),
    ("tensorflow/python/saved_model", r"(?:INFO:tensorflow:)?Assets written to: "),
    ("tensorflow/python/distribute", r"(?:INFO:tensorflow:)?Sharding callback duration: "),
    ("tensorflow/python/distribute", r"(?:INFO:tensorflow:)?Using MirroredStrategy with "),
    ("tensorflow/python/distribute", r"(?:INFO:tensorflow:)?(?:Reduce|Collective all_reduce) "),
    ("tensorflow/python/distribute", r"default session config: "),
    ("tensorflow_datasets", r"Generating dataset \w|Done writing /|Load dataset info from "),
    ("tensorflow_datasets", r"Downloading and preparing dataset |Dataset \S+ downloaded and prep"),
    ("tensorflow_datasets", r"`FeatureConnector\.dtype` is deprecated\."),
    ("tensorflow_datasets", r"(?:Dl (?:Completed|Size)|Extraction completed|Generating splits|"
     r"Generating \w+ examples|Shuffling) ?.*\.\.\.: "),
)  # fmt: skip
_NOISE = re.compile("|".join(pattern for _, pattern in TABLE))
_SECONDS_TO_END = 5.0


def is_noise(text: str) -> bool:
    """Return whether a line is known library noise."""
    return _NOISE.match(text) is not None


class _Quiet(logging.Filter):
    """A filter that removes known library noise from a handler or a logger."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not is_noise(record.getMessage())


#: Share this instance, because a logger or a handler adds the same filter only once.
QUIET = _Quiet()


@contextmanager
def filter_output() -> Iterator[None]:
    """Remove known library noise from this process's standard error in the block.

    The filter runs in another process, so that messages that this process prints while it exits
    are not lost.
    """
    reader, writer = os.pipe()
    with suppress(OSError, ValueError):
        sys.stderr.flush()
    saved = os.dup(2)
    try:
        # Run in isolated mode, so that the program imports nothing from the user's folder.
        command = [sys.executable or "python3", "-I", "-S", __file__]
        process = subprocess.Popen(command, stdin=reader, stdout=saved, stderr=saved)
    except OSError:
        os.close(writer)
        process = None
    finally:
        os.close(reader)
    if process is None:
        os.close(saved)
        yield
        return
    os.dup2(writer, 2)
    os.close(writer)
    try:
        yield
    finally:
        with suppress(OSError, ValueError):
            sys.stderr.flush()
        os.dup2(saved, 2)
        os.close(saved)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_SECONDS_TO_END)


def main() -> None:
    """Copy standard input to standard output line by line, without noise."""
    # Signals go to the whole process group, but the filter must run until its input ends.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for line in sys.stdin.buffer:
        if not is_noise(line.decode("utf-8", "replace")):
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()

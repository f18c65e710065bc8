"""Meaningless startup messages of libraries, listed in a table with their sources.

TensorFlow prints its first lines before it reads any log setting, so they can only be filtered.
`filter_output` filters a terminal or the log of a pod, `QUIET` filters a logger, and `flotilla
logs` filters the rest. This file also runs as a program, and imports nothing of this project.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

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

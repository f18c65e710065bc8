"""Errors that are reported in one line, and the exit codes of all processes.

A `UserError` tells what is wrong, where, and how to fix it. Any other exception is a bug.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from flotilla.trainer.runtime.masking import one_line

DONE = 0
FAILED = 1
USAGE = 2
REFUSED = 3
INTERRUPTED = 130
BEGIN_AGAIN = 138
# A task with this exit code or a higher one, such as the code of a signal, is restarted. A lower
# nonzero code means that the task has failed permanently.
RETRYABLE = 128
# The exit code of a task that fails with a `TransientError`: EX_TEMPFAIL of sysexits(3). It is
# below `RETRYABLE`, because the task has already retried for minutes and must not be restarted.
TRY_AGAIN = 75
EXIT_CODES = {
    DONE: "finished, and blessed if there is a gate",
    FAILED: "failed",
    USAGE: "wrong usage, configuration or input",
    REFUSED: "finished, but the data or the model was refused",
    INTERRUPTED: "interrupted; a run on this machine has stopped, and training has published a "
    "last checkpoint; a run on a KFP instance continues",
}
_NO_MEMORY = re.compile(
    r"OOM when allocating tensor with shape\[([\d,]*)\] and type (\w+) "
    r"on /job:(\w+)/replica:\d+/task:(\d+)/device:(\w+)"
)


class UserError(Exception):
    """An error that the user can fix. Its message is the whole report.

    Attributes:
        exit_code: the exit code of a process that fails with this error.
        traceback: the traceback of the user's code in another process, or empty.
    """

    exit_code = FAILED
    traceback = ""

    def __init__(self, message: str = "") -> None:
        """Reduce the message, which may quote damaged files, to one line without credentials."""
        super().__init__(one_line(message))


class TransientError(UserError):
    """An operation, such as a store request, failed until its deadline, but may succeed later."""


class ConfigError(UserError):
    """An invalid command line or configuration."""

    exit_code = USAGE


def error_for_exit(code: int | None) -> type[UserError]:
    """Return the class of the error to raise after a task has exited with this code."""
    return {TRY_AGAIN: TransientError, USAGE: ConfigError}.get(code or DONE, UserError)


class RunInterruptedError(UserError):
    """The run stops because the user or the platform requested it. It can be resumed."""

    exit_code = INTERRUPTED


class ClusterLostError(UserError):
    """A task of the cluster is lost. The process that raises this must start a new attempt."""

    exit_code = BEGIN_AGAIN


def nearest(word: str, allowed: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the closest allowed word, or an empty string."""
    close = difflib.get_close_matches(word, list(allowed), n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else ""


def describe_out_of_memory(error: BaseException, what: str = "a tensor") -> str:
    """Return the message for a task that ran out of memory, or "" for any other error."""
    found = _NO_MEMORY.search(str(error))
    if not found:
        return ""
    shape, kind, role, index, device = found.groups()
    task = "this process" if role == "localhost" else f"{role}-{index}"
    return (
        f"{task} ({device}) has too little memory for {what} of type {kind} and shape "
        f"[{shape.replace(',', ', ')}]: make tables smaller (capacity, dimension), use more "
        "cluster.parameter_servers or a smaller training.batch_size, or give the task more memory"
    )


def describe_divergence(what: str, step: int, last: str, *, at_once: bool = False) -> str:
    """Return the message for diverged training. Set `at_once` if it diverged in the first steps."""
    zero = (
        "look for a logarithm or a root of zero, or a division by zero; otherwise "
        if at_once
        else ""
    )
    last_one = f"the last finite checkpoint is {last}" if last else "no checkpoint was written"
    return (
        f"training diverged: {what} at global step {step}; {zero}lower "
        f"training.optimizer.learning_rate or clip the gradient ({last_one})"
    )

"""Errors that are reported as one line, and the exit codes of all processes.

A `UserError` says what is wrong, where, and the remedy. Any other exception is a bug.
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
# A task that ends with this code or a higher one is started again: those of signals, and the one
# above. With a lower one it has failed for good.
RETRYABLE = 128
# Of a task that ends for a `TransientError`: EX_TEMPFAIL of sysexits(3). It is below 128, so that
# neither a supervisor nor an operator starts the task again at once: it has tried for minutes.
TRY_AGAIN = 75
EXIT_CODES = {
    DONE: "done, and blessed where there is a gate",
    FAILED: "failed",
    USAGE: "wrong usage or configuration; nothing was started",
    REFUSED: "done, but the data or the model was refused",
    INTERRUPTED: "interrupted; everything is stopped and the last checkpoint is published",
}
# What TensorFlow says where a tensor finds no memory.
_NO_MEMORY = re.compile(
    r"OOM when allocating tensor with shape\[([\d,]*)\] and type (\w+) "
    r"on /job:(\w+)/replica:\d+/task:(\d+)/device:(\w+)"
)


class UserError(Exception):
    """Something that the user can fix; the message is the whole report.

    Attributes:
        exit_code: of the process that ends with it.
        traceback: of the user's own code in another process, or empty.
    """

    exit_code = FAILED
    traceback = ""

    def __init__(self, message: str = "") -> None:
        """Keep one line without credentials: words of libraries and of damaged files are in it."""
        super().__init__(one_line(message))


class TransientError(UserError):
    """What failed within a deadline may succeed later, such as a store that did not answer."""


class ConfigError(UserError):
    """A wrong command line or configuration."""

    exit_code = USAGE


def error_for_exit(code: int | None) -> type[UserError]:
    """Return the error by which a process ends whose task has ended with this code."""
    return {TRY_AGAIN: TransientError, USAGE: ConfigError}.get(code or DONE, UserError)


class RunInterruptedError(UserError):
    """The user or the platform requested a stop; the last checkpoint is published."""

    exit_code = INTERRUPTED


class ClusterLostError(UserError):
    """A task of the cluster is gone; the process that raises this has to begin a new attempt."""

    exit_code = BEGIN_AGAIN


def nearest(word: str, allowed: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the nearest allowed word, or an empty text."""
    close = difflib.get_close_matches(word, list(allowed), n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else ""


def describe_out_of_memory(error: BaseException, what: str = "a tensor") -> str:
    """Return the error message of a task without memory for `what`; empty for another error."""
    found = _NO_MEMORY.search(str(error))
    if not found:
        return ""
    shape, kind, role, index, device = found.groups()
    task = "this process" if role == "localhost" else f"{role}-{index}"
    return (
        f"{task} ({device}) has no memory for {what} of type {kind} and shape "
        f"[{shape.replace(',', ', ')}]: make tables smaller (capacity, dimension), take more "
        "cluster.parameter_servers or a smaller training.batch_size, or give it more memory"
    )


def describe_divergence(what: str, step: int, last: str, *, at_once: bool = False) -> str:
    """Return the error message of training that has diverged, `at_once` from its first steps on."""
    zero = "look for a logarithm, a root or a division of zero, or " if at_once else ""
    last_one = f"the last finite checkpoint is {last}" if last else "no checkpoint was written"
    return (
        f"training diverged: {what} at global step {step}; {zero}lower "
        f"training.optimizer.learning_rate or clip the gradient ({last_one})"
    )

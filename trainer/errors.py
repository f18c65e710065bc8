"""What a user can do wrong, and how a process says so.

Every error in this module is shown as its message alone, without a traceback. The message is one
line that says what is wrong, where, and what to do. Anything else that is raised is a bug.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

DONE = 0
FAILED = 1
USAGE = 2
REFUSED = 3
INTERRUPTED = 130
BEGIN_AGAIN = 138
EXIT_CODES = {
    DONE: "done, and blessed where there is a gate",
    FAILED: "failed",
    USAGE: "wrong usage or configuration; nothing was started",
    REFUSED: "done, but the gate or the registry refused the model",
    INTERRUPTED: "interrupted; everything is stopped and the last checkpoint is published",
}


class UserError(Exception):
    """Something that the user can put right; the message is the whole report."""

    exit_code = FAILED


class ConfigError(UserError):
    """A wrong command line or configuration."""

    exit_code = USAGE


class RunInterruptedError(UserError):
    """The user or the platform asked for an end; the last checkpoint is published."""

    exit_code = INTERRUPTED


class ClusterLostError(UserError):
    """A task of the cluster went away; the chief that raises this has to begin again."""

    exit_code = BEGIN_AGAIN


def nearest(word: str, allowed: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the nearest allowed word, or an empty string."""
    close = difflib.get_close_matches(word, list(allowed), n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else ""

"""What a process writes to standard output, standard error and its log: lines, masked.

Nothing else of this project writes there but programs whose answer is a document.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import traceback
import warnings
from copy import copy
from typing import IO

from flotilla.trainer.runtime.masking import mask, unbroken
from flotilla.trainer.runtime.output import noise

_FORMAT = warnings.formatwarning
_BREAK = re.compile(r"\r?\n(?=\S)")


def say(line: str) -> None:
    """Write a line to standard error; one that nobody can read is no reason to end."""
    try:
        sys.stderr.write(f"{unbroken(line)}\n")
        sys.stderr.flush()
    except OSError:
        discard(sys.stderr)


def relay(task: str, line: str) -> None:
    """Write a line of a task to the log of the step, in which the user looks for it."""
    sys.stdout.write(f"[{task}] {mask(line)}\n")
    sys.stdout.flush()


def discard(stream: IO[str]) -> None:
    """Discard everything that is still written to a stream whose reader has gone."""
    # What is left in the buffer would raise again when the process exits.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def log_to_stderr() -> None:
    """Write the log of this process to standard error, masked, quiet; the last traceback as well.

    Where another program has begun the process, as KFP's, its log is masked where it is.
    """
    mask_libraries()
    sys.excepthook = lambda *bug: logging.critical("not handled", exc_info=bug)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    for handler in logging.getLogger().handlers:
        handler.addFilter(noise.QUIET)
        if not isinstance(handler.formatter, _Masked):
            handler.setFormatter(_Masked(handler.formatter or logging.Formatter()))


def mask_libraries() -> None:
    """Mask what is logged in a process without a log, and the warnings of Python."""
    if logging.lastResort:
        logging.lastResort.setFormatter(_Masked(logging.Formatter()))
    warnings.formatwarning = lambda *warned, **more: mask(_indent(_FORMAT(*warned, **more)))


class _Masked(logging.Formatter):
    """Masks the whole text of a record, the traceback of an exception too.

    Only its first line begins at the margin: what it quotes is no other line, and no event.
    """

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        quoted = copy(record)
        quoted.msg, quoted.args = _indent(record.getMessage()), None
        if record.exc_info and record.exc_info[1]:
            quoted.exc_text = format_traceback(record.exc_info[1])
        return mask(self._inner.format(quoted))


def format_traceback(error: BaseException) -> str:
    """Return the traceback of an error, in which no line of its message begins at the margin."""
    return "".join(map(_indent, traceback.format_exception(error))).rstrip("\n")


def _indent(text: str) -> str:
    return _BREAK.sub("\n  ", text)

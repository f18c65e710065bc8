"""The debugger of a replay: it stops at the line of the user's code that has failed."""

from __future__ import annotations

import pdb
import sys
from types import TracebackType

from trainer.user_code import frames_of, line_of


def post_mortem(error: BaseException) -> None:
    """Open pdb at the innermost frame of the user's code in an error, or where it was raised.

    `up` leads to what called it. The end of the input ends the debugger.
    """
    trace: TracebackType | None = None
    for frame, line in reversed(frames_of(error)):
        # What the user's code has called is left out: pdb begins at the last one.
        trace = TracebackType(trace, frame, frame.f_lasti, line)
    if trace is None:
        return
    sys.stderr.write(f"flotilla: {line_of(error)}\n")
    debugger = pdb.Pdb(stdin=sys.stdin, stdout=sys.stderr)
    debugger.reset()
    debugger.interaction(None, trace)

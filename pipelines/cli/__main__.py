"""The console script `flotilla`: from its first moment on an interrupt is one line."""

import json
import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import NoReturn

_INTERRUPTED = 130


def main() -> NoReturn:
    """Be the console script; what takes time to load is loaded when an interrupt can be told."""
    signal.signal(signal.SIGINT, _end)
    from pipelines.cli.app import called

    sys.exit(called(sys.argv[1:]))


def _end(_number: int, _frame: FrameType | None) -> NoReturn:
    # An exception could come to light in the midst of an import, as another one. A run that goes
    # on has handlers of its own.
    with suppress(OSError):
        os.write(2, b"flotilla: interrupted\n")
        if "--json" in sys.argv:
            told = {"status": "interrupted", "run_id": "", "metrics": {}, "artifacts": {}}
            os.write(1, f"{json.dumps({**told, 'message': 'interrupted'})}\n".encode())
    os._exit(_INTERRUPTED)

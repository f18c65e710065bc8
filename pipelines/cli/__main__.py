"""The console script `flotilla`: an interrupt is one line from its first moment on."""

import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from pipelines.cli.answer import failure
from trainer.errors import INTERRUPTED


def main() -> NoReturn:
    """Handle interrupts, then load what takes time and run the command line."""
    signal.signal(signal.SIGINT, _end)
    _open_closed_streams()
    from pipelines.cli.app import called

    sys.exit(called(sys.argv[1:]))


def _open_closed_streams() -> None:
    """Discard what is written to a stream that was closed by `>&-`.

    Python has None in its place, and the first file that is opened would get its number.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def _end(_number: int, _frame: FrameType | None) -> NoReturn:
    # Raised in the middle of an import, an exception could surface as another one. A run that has
    # started has handlers of its own.
    with suppress(OSError):
        os.write(2, b"flotilla: interrupted\n")
        if "--json" in sys.argv:
            os.write(1, f"{failure('interrupted', INTERRUPTED).json()}\n".encode())
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()

"""The console script `flotilla`: an interrupt is one line from its first moment on.

A terminal that is closed (SIGHUP) is a SIGTERM to every command. What a command, or a process that
it starts, leaves in the temporary folder goes with it, however it ends.
"""

import atexit
import os
import shutil
import signal
import sys
import tempfile
from contextlib import suppress
from types import FrameType
from typing import NoReturn

# As `flotilla.pipelines.cli.exit` has them: nothing can be imported in the middle of an import.
INTERRUPTED = 130
_OWN: list[tuple[int, str]] = []
ANSWER = (
    b'{"status": "interrupted", "run_id": "", "metrics": {}, "artifacts": {}, '
    b'"message": "interrupted"}\n'
)


def _end(_number: int, _frame: FrameType | None) -> NoReturn:
    # Raised in the middle of an import, an exception could surface as another one. A run that has
    # started has handlers of its own.
    try:
        os.write(2, b"flotilla: interrupted\n")
        if "--json" in sys.argv:
            os.write(1, ANSWER)
        _remove_temporary()
    finally:
        os._exit(INTERRUPTED)


def _catch() -> None:
    handlers = {signal.SIGINT: _end, signal.SIGTERM: _end, signal.SIGHUP: _hang_up}
    for number, handler in handlers.items():
        # Whoever ignores them (`nohup`, a shell's background) has asked for that.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def _hang_up(_number: int, _frame: FrameType | None) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _own_temporary() -> None:
    """Give this process, and those that it starts, a temporary folder of their own."""
    # Without one there is nothing to leave; who needs it says so.
    with suppress(OSError):
        tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="flotilla-")
        _OWN.append((os.getpid(), tempfile.tempdir))
        atexit.register(_remove_temporary)


def _remove_temporary() -> None:
    # A fork inherits what is called at the end.
    for process, folder in _OWN:
        if process == os.getpid():
            shutil.rmtree(folder, ignore_errors=True)


def main() -> NoReturn:
    """Handle interrupts, then load what takes time and run the command line."""
    _require_utf8()
    _catch()
    _open_closed_streams()
    _own_temporary()
    sys.excepthook = _show_bug
    from flotilla.pipelines.cli.app import called

    sys.exit(called(sys.argv[1:]))


def _open_closed_streams() -> None:
    """Discard what is written to a closed stream (`>&-`), whose number a file would get."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def _require_utf8() -> None:
    """Begin again with UTF-8 for the names of files and for texts, where the locale has another.

    A working folder, a column or a class may have any name, and all processes have to agree.
    """
    if sys.getfilesystemencoding() != "utf-8":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _show_bug(_kind: object, error: BaseException, _trace: object) -> None:
    from flotilla.trainer.runtime.masking import mask
    from flotilla.trainer.runtime.output.streams import format_traceback

    sys.stderr.write(f"{mask(format_traceback(error))}\n")


if __name__ == "__main__":
    main()

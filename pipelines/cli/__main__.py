"""The console script `flotilla`, which reports an interrupt in one line, even during imports.

Closing the terminal (SIGHUP) has the same effect as SIGTERM. When the command ends, it removes its
temporary files and those of its child processes.
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

# The same value is defined in `flotilla.trainer.runtime.errors`, which a signal handler must not
# import, because it may run during another import.
INTERRUPTED = 130
_OWN: list[tuple[int, str]] = []
ANSWER = (
    b'{"status": "interrupted", "run_id": "", "metrics": {}, "artifacts": {}, '
    b'"message": "interrupted"}\n'
)


def _end(_number: int, _frame: FrameType | None) -> NoReturn:
    # An exception raised during an import could surface as a different exception, so exit directly.
    # Once a run has started, its own handlers replace this one.
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
        # Keep ignoring a signal that was ignored at the start, for example because of `nohup`.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def _hang_up(_number: int, _frame: FrameType | None) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _own_temporary() -> None:
    # If no folder can be created, there is nothing to remove. Code that needs a temporary folder
    # reports the error.
    with suppress(OSError):
        tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="flotilla-")
        _OWN.append((os.getpid(), tempfile.tempdir))
        atexit.register(_remove_temporary)


def _remove_temporary() -> None:
    # A forked child inherits the exit handlers, and must not remove its parent's folder.
    for process, folder in _OWN:
        if process == os.getpid():
            shutil.rmtree(folder, ignore_errors=True)


def main() -> NoReturn:
    """Install the signal handlers, then load the slow modules and run the command line."""
    _require_utf8()
    _catch()
    _open_closed_streams()
    _own_temporary()
    sys.excepthook = _show_bug
    from flotilla.pipelines.cli.app import call

    sys.exit(call(sys.argv[1:]))


def _open_closed_streams() -> None:
    """Reopen closed standard streams (`>&-`), so that no other file gets their descriptors."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def _require_utf8() -> None:
    """Restart the process in UTF-8 mode if the locale has another encoding.

    Names may contain any characters, and all processes must read them in the same way.
    """
    if sys.getfilesystemencoding() != "utf-8":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _show_bug(_kind: object, error: BaseException, _trace: object) -> None:
    from flotilla.trainer.runtime.masking import mask
    from flotilla.trainer.runtime.streams import format_traceback

    sys.stderr.write(f"{mask(format_traceback(error))}\n")


if __name__ == "__main__":
    main()

"""The termination message of a task: one line in a file that is allocated in advance.

Because of this, a full disk cannot prevent the message. The message passes through these places
before it becomes the last line of a failed run:

1. The task writes its error here (`trainer/__main__.py`).
2. The supervisor of the local cluster (`local.py`), or the launcher on Kubernetes
   (`components/kubernetes/supervisor.py`), reads it and raises a `UserError`.
3. `components/records/record.py` writes the error into the record and the event of its step.
4. `pipelines/runs/outcome.py` formats the line, and `pipelines/cli/exit.py` prints it.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from flotilla.trainer.runtime.masking import mask

FILE = "termination.txt"
ROOM = 4096


def reserve(workdir: Path) -> None:
    """Reserve space for a message, and erase an earlier attempt's message. Raises `OSError`."""
    (workdir / FILE).write_bytes(_pad(""))


def remove(workdir: Path) -> None:
    """Remove the message of an earlier attempt."""
    path = workdir / FILE
    try:
        path.unlink(missing_ok=True)
    except OSError:
        # In a container, the file may be a mount, which can only be emptied.
        with suppress(OSError):
            os.truncate(path, 0)


def write(workdir: Path, message: str) -> None:
    """Write the message into a task's folder, as one line."""
    path = workdir / FILE
    # Ignore errors, because the task must still exit with its exit code.
    with suppress(OSError):
        path.touch()
        with path.open("r+b") as file:
            file.write(_pad(" ".join(mask(message).split())))


def read(workdir: Path) -> str:
    """Return the termination message of a task, or an empty string if it was killed."""
    try:
        return (workdir / FILE).read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return ""


def _pad(message: str) -> bytes:
    return message.encode(errors="replace")[: ROOM - 1].ljust(ROOM - 1) + b"\n"

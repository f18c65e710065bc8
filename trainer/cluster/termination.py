"""What a task writes in its folder when it ends by an error: one line, for whoever started it.

The room for it is taken before: a full disk has to be told of, too.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

FILE = "words.txt"
ROOM = 4096


def reserve(workdir: Path) -> None:
    """Take the room for the words of a life to come, and forget those before; raises `OSError`."""
    (workdir / FILE).write_bytes(_filled(""))


def leave(workdir: Path, words: str) -> None:
    """Leave the words in a task's folder, as one line."""
    path = workdir / FILE
    # Without room for the words the exit code still has to arrive.
    with suppress(OSError):
        path.touch()
        with path.open("r+b") as file:
            file.write(_filled(" ".join(words.split())))


def read(workdir: Path) -> str:
    """Return the words of a task, or nothing if it just died."""
    try:
        return (workdir / FILE).read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return ""


def _filled(words: str) -> bytes:
    return words.encode(errors="replace")[: ROOM - 1].ljust(ROOM - 1) + b"\n"

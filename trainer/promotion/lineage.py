"""Where a model comes from: the code. Free of TensorFlow."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

COMMIT = "FLOTILLA_COMMIT"
_SECONDS = 10


def commit() -> str:
    """Return the commit of the running code, `-dirty` behind it where files were changed.

    An image says it in `FLOTILLA_COMMIT`; a checkout is asked itself. Empty where neither knows.
    """
    if told := os.environ.get(COMMIT):
        return told
    home = Path(__file__).resolve().parents[2]
    try:
        # Of an installed package, the repository around it is somebody else's.
        if Path(_git(home, "rev-parse", "--show-toplevel")).resolve() != home:
            return ""
        dirty = "-dirty" if _git(home, "status", "--porcelain", "--untracked-files=no") else ""
        return _git(home, "rev-parse", "HEAD") + dirty
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(home: Path, *words: str) -> str:
    command = ["git", "-C", str(home), *words]
    ended = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS)
    return ended.stdout.strip()

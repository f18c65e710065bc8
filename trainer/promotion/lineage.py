"""Finds the commit of the code that trained a model."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

COMMIT = "FLOTILLA_COMMIT"
_SECONDS = 10


def commit() -> str:
    """Return the commit of the image or checkout, or "". `-dirty` marks uncommitted changes."""
    if commit_of_image := os.environ.get(COMMIT):
        return commit_of_image
    home = Path(__file__).resolve().parents[2]
    try:
        # An installed package may be in a folder of an unrelated repository.
        if Path(_git(home, "rev-parse", "--show-toplevel")).resolve() != home:
            return ""
        dirty = "-dirty" if _git(home, "status", "--porcelain", "--untracked-files=no") else ""
        return _git(home, "rev-parse", "HEAD") + dirty
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(home: Path, *words: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(home), *words]
    ended = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS)
    return ended.stdout.strip()

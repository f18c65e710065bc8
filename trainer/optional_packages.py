"""Keras without the packages that it imports only where they are installed.

Keras 3 imports scikit-learn, matplotlib and pandas for wrappers and pictures of its own, which no
process of a run uses: a third of the import of TensorFlow. TensorBoard imports the client of S3,
and is given local folders only.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_NAMES = {"IPython", "botocore", "matplotlib", "pandas", "sklearn"}
_IMPORTERS = {"keras", "tensorboard", "tensorflow"}
# The machinery of imports, between the importer and the finder.
_MACHINERY = {"importlib", "_frozen_importlib"}


class _Absent(MetaPathFinder):
    """Says to these importers that a package is not installed; others find it."""

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `MetaPathFinder`."""
        if fullname in _NAMES and _importer() in _IMPORTERS:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return None


def _importer() -> str:
    """Return the package whose module imports; empty for none."""
    frame = sys._getframe(2)
    while frame:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _MACHINERY:
            return package
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""


def leave_out() -> None:
    """Let Keras in this process be imported without them."""
    if not any(isinstance(finder, _Absent) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Absent())

"""The user's own modules: where Python finds them, and how one is imported by name.

The folder in which the command was given comes last on Python's path, in every process: a folder
`components` or a file `json.py` there hides neither Flotilla's modules nor the standard library.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

FOLDER_VARIABLE = "FLOTILLA_USER_FOLDER"
_OWN = {"components", "pipelines", "trainer"}


def folder() -> str:
    """Return the folder of the user's modules: where the command was given."""
    return os.environ.get(FOLDER_VARIABLE) or os.getcwd()


def environment() -> dict[str, str]:
    """Return the variables with which a child process finds modules in the same places.

    Without `PYTHONSAFEPATH` Python itself would put the working directory first.
    """
    return {"PYTHONSAFEPATH": "1", FOLDER_VARIABLE: folder()}


def import_module(name: str) -> ModuleType:
    """Import a module that the configuration names; raises whatever its code raises."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
    return importlib.import_module(name)


def remedy(name: str) -> str:
    """Say where a module that cannot be imported has to be, or why it is hidden."""
    top = name.partition(".")[0]
    if top in _OWN or top in sys.stdlib_module_names:
        return f"{top} is a name of {'Flotilla' if top in _OWN else 'Python'} itself; rename yours"
    return f"it has to be in {folder()} or on PYTHONPATH"


class _Finder(MetaPathFinder):
    """Looks into the user's folder for what is nowhere else.

    An entry at the end of `sys.path` would come before the finder of an editable installation.
    """

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Return where a top-level module is; packages know their own folders."""
        return None if path is not None else PathFinder.find_spec(fullname, [folder()], target)

"""Imports TensorFlow and Keras faster and without noise, and configures shared GPUs.

Keras 3 imports scikit-learn, matplotlib and pandas, which take a third of the import time, and
TensorBoard imports the S3 client. Both also work without these packages. Garbage collection takes a
fifth of the import time, so it is paused during the import, and later collections skip the imported
objects.
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from glob import glob
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from flotilla.trainer.runtime import noise

_NAMES = {"IPython", "botocore", "matplotlib", "pandas", "sklearn"}
_IMPORTERS = {"keras", "tensorboard", "tensorflow"}
# Modules of the import system, whose frames are between the importing module and the finder.
_MACHINERY = {"importlib", "_frozen_importlib"}


class _Absent(MetaPathFinder):
    """A finder that reports some packages as missing, but only to some importers."""

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in _NAMES and _importer() in _IMPORTERS:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return None


def _importer() -> str:
    frame = sys._getframe(2)
    while frame:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _MACHINERY:
            return package
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""


class _Uncollected(MetaPathFinder):
    """A finder that imports TensorFlow without garbage collection and hides its first log lines."""

    def __init__(self) -> None:
        self._searches = False

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # `importlib.util.find_spec` below calls all finders, so ignore its call of this one.
        if fullname != "tensorflow" or self._searches:
            return None
        self._searches = True
        try:
            found = importlib.util.find_spec(fullname)
        finally:
            self._searches = False
        if found is None or found.loader is None:
            return found
        loader, execute = found.loader, found.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            # Restore the loader, because it may also load other modules.
            with suppress(AttributeError):
                del loader.exec_module
            with noise.filter_output():
                _pause_collections(lambda: execute(module))

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return found


def _pause_collections(execute: Callable[[], None]) -> None:
    if not gc.isenabled():
        execute()
        return
    # Collect now, because garbage that exists when the objects are frozen would never be collected.
    gc.collect()
    gc.disable()
    try:
        execute()
        gc.freeze()
    finally:
        gc.enable()


def has_gpus() -> bool:
    """Return whether this machine has a GPU, without loading a library that would initialize it."""
    return any(map(glob, ("/dev/nvidia[0-9]*", "/dev/dxg")))


def prepare() -> None:
    """Prepare this process to import TensorFlow faster and without noise, and to share GPUs."""
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    # Without a GPU, hide errors too, because TensorFlow reports the missing GPU as an error.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2" if has_gpus() else "3")
    logging.getLogger("tensorflow").addFilter(noise.QUIET)
    if not any(isinstance(finder, _Absent) for finder in sys.meta_path):
        sys.meta_path[:0] = [_Absent(), _Uncollected()]

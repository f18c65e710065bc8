"""Files of a source on this machine: local ones in place, others fetched and removed again."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.errors import UserError
from trainer.storage.errors import reported
from trainer.storage.schemes import store_for
from trainer.storage.uri import local_path


@contextmanager
def local(file: Any, scratch: Path) -> Iterator[Path]:
    """Give a file of a listing as a local path.

    Raises:
        UserError: it is not what was listed, or cannot be read; the message names it.
    """
    path = local_path(file.uri)
    if path:
        with _named(file, path):
            _check(file, path)
            yield path
        return
    # A worker on another machine has no such folder.
    place = scratch if scratch.is_dir() else None
    with tempfile.TemporaryDirectory(dir=place, prefix="file-") as folder:
        path = Path(folder) / file.path.rpartition("/")[2]
        with _named(file, path):
            store_for(file.uri).download(file.uri, path)
            _check(file, path)
            yield path


@contextmanager
def _named(file: Any, path: Path) -> Iterator[None]:
    named = str(local_path(file.uri) or file.uri)
    try:
        with reported("read data.source"):
            yield
    except UserError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise UserError(
                f"data.source: {named} was listed and is gone; run again with those that are left"
            ) from error
        if str(path) == named:
            raise
        raise type(error)(str(error).replace(str(path), named)) from error


def _check(file: Any, path: Path) -> None:
    size = path.stat().st_size
    if size != file.size:
        raise UserError(
            f"data.source: {path} has {size} bytes and had {file.size} when it was listed; run "
            "again when nothing writes to it"
        )

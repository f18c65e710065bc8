"""The single check of a configuration with its source and the user's code, before a run.

The first half takes a moment and loads no TensorFlow: it lists the files, and requires the columns
of the data section in the header of the first file. The second half is a separate process, which
reads the first rows, builds the model, and tries the parts of a run on it.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flotilla.trainer.cluster import fitting
from flotilla.trainer.cluster.process import require_gpus
from flotilla.trainer.config.data import SINCE_CHAMPION, DataConfig
from flotilla.trainer.config.schema import Config
from flotilla.trainer.data import listing
from flotilla.trainer.runtime import user_code
from flotilla.trainer.runtime.errors import ConfigError, TransientError, UserError
from flotilla.trainer.storage import patterns


@dataclass(frozen=True, kw_only=True)
class Checked:
    """The result of a successful check.

    Attributes:
        found: properties of the model and the dataset, see `flotilla.trainer.cluster.fitting`;
            empty if unknown.
        notes: what could not be checked, with the reasons.
    """

    found: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def check(
    config: Config,
    dataset: str = "",
    *,
    is_remote: bool = False,
    seconds: float = fitting.SECONDS,
) -> Checked:
    """Check a configuration; `dataset` is the URI of a prepared one, or empty.

    Args:
        config: what to check.
        dataset: URI of the dataset to train on, if it is prepared.
        is_remote: whether the steps run on other machines, which may have access to other stores.
        seconds: time limit of the trial of the model.

    Raises:
        ConfigError: the configuration has a mistake; the message names it, its place and its
            remedy.
    """
    if not is_remote and config.cluster.launcher == "local":
        require_gpus(config)
    notes = () if dataset else require_source(config.data, is_remote=is_remote)
    if program := config.program.command:
        if config.cluster.launcher == "local":
            require_program(config)
        name = " ".join(program)
        return Checked(notes=(*notes, f"not tried: {name} trains its own model"))
    if notes:
        return Checked(notes=notes)
    try:
        found = fitting.try_fit(config, dataset, seconds=seconds, elsewhere=is_remote)
    except fitting.NotKnownError as error:
        return Checked(notes=(f"not known: {error}",))
    return Checked(found=found, notes=tuple(found.get("notes", ())))


def require_program(config: Config) -> None:
    """Raise `ConfigError` if this machine cannot start the program."""
    program = config.program
    folder = os.path.join(user_code.folder(), program.working_dir)
    if not os.path.isdir(folder):
        raise ConfigError(f"program.working_dir: there is no folder {folder}")
    path = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", "")))
    name = program.command[0]
    found = os.access(os.path.join(folder, name), os.X_OK) if os.sep in name else False
    if not found and not shutil.which(name, path=path):
        raise ConfigError(f"program.command: there is no program {name} on this machine")


def require_source(data: DataConfig, *, is_remote: bool = False) -> tuple[str, ...]:
    """Require the files and their named columns; return notes on unchecked things.

    Raises:
        ConfigError: files or columns are missing.
    """
    # A version is a listing that the creating run has checked.
    if not data.source or data.version:
        return ()
    if is_remote and (remark := remark_on_path(data)):
        raise ConfigError(remark)
    try:
        with tempfile.TemporaryDirectory(prefix="flotilla-") as scratch:
            _require_columns(data, Path(scratch))
    except ConfigError:
        raise
    except UserError as error:
        # The store has denied access or not answered; a missing file is a user's mistake instead.
        is_closed = error.__cause__ and not isinstance(error.__cause__, FileNotFoundError)
        elsewhere = is_remote and is_closed and not patterns.is_local(data.source)
        if elsewhere or isinstance(error, TransientError):
            return (f"the source is not checked: {error}",)
        raise ConfigError(str(error)) from error
    return ()


def remark_on_path(data: DataConfig) -> str:
    """Return what is wrong with a source of this machine for steps elsewhere, or nothing."""
    if not data.source or data.version or not patterns.is_local(data.source):
        return ""
    return (
        f"data.source: {data.source} is a path of this machine, which no step of the instance "
        "sees: put the files into gs://, s3:// or minio://BUCKET/FOLDER"
    )


def _require_columns(data: DataConfig, scratch: Path) -> None:
    found = listing.list_source(data)
    taken = found if data.spans == SINCE_CHAMPION else listing.select_spans(found, data.spans, {})
    # This import loads Arrow, which takes half a second.
    from flotilla.trainer.data.files.file_pieces import one_format, select_pieces  # noqa: PLC0415
    from flotilla.trainer.preflight.head import few_files  # noqa: PLC0415

    form, _ = one_format(data, taken.files)
    # Skip TFRecord, which needs TensorFlow to read it, and JSON, which has no header.
    if form not in ("csv", "parquet", "npz", "images"):
        return
    few = few_files(data, taken, scratch)
    if few.listing.files:
        pieces = select_pieces(data, few.listing, scratch)
        pieces.roles(data, *pieces.header())

"""Checks a configuration, its data source and the user's code before a run.

The first part is quick and does not import TensorFlow: it lists the files, and requires that the
header of the first file has the columns of the `data` section. The second part runs in a separate
process: it reads the first rows, builds the model, and tries the stages of a run with it.
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
from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.config.schema import Config
from flotilla.trainer.runtime import user_code
from flotilla.trainer.runtime.errors import ConfigError, TransientError, UserError
from flotilla.trainer.storage.uri import is_local


@dataclass(frozen=True, kw_only=True)
class Checked:
    """The result of a successful check.

    Attributes:
        found: properties of the model and the dataset (see `flotilla.trainer.cluster.fitting`), or
            empty if unknown.
        notes: what could not be checked, and why.
    """

    found: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def check(
    config: Config, dataset: str = "", *, is_remote: bool = False, seconds: float = fitting.SECONDS
) -> Checked:
    """Check a configuration, its data source and its model. Raises `ConfigError`.

    `dataset` is the URI of the prepared dataset, or empty. With `is_remote`, the steps run on other
    machines, which may have access to other stores. The model is tried for at most `seconds`.
    """
    if not is_remote and config.cluster.launcher == "local":
        require_gpus(config)
    notes = () if dataset else require_source(config.data, is_remote=is_remote)
    if program := config.program.command:
        if config.cluster.launcher == "local":
            require_program(config)
        name = " ".join(program)
        return Checked(
            notes=(*notes, f"the model is not checked, because the program {name!r} builds it")
        )
    if notes:
        return Checked(notes=notes)
    try:
        found = fitting.try_fit(config, dataset, seconds=seconds, elsewhere=is_remote)
    except fitting.NotKnownError as error:
        return Checked(notes=(f"cannot check whether the model fits the dataset: {error}",))
    return Checked(found=found, notes=tuple(found.get("notes", ())))


def require_program(config: Config) -> None:
    """Raise `ConfigError` if this machine lacks the program or its working directory."""
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
    """Raise `ConfigError` if files or columns are missing. Return what was not checked."""
    # Skip the check: the run that created this dataset version already checked the source.
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
        # Only add a note if the store denied access or did not answer: other machines may reach it.
        is_closed = error.__cause__ and not isinstance(error.__cause__, FileNotFoundError)
        elsewhere = is_remote and is_closed and not is_local(data.source)
        if elsewhere or isinstance(error, TransientError):
            return (f"data.source was not checked: {error}",)
        raise ConfigError(str(error)) from error
    return ()


def remark_on_path(data: DataConfig) -> str:
    """Return a message if the source is a local path that remote steps cannot read, or else ""."""
    if not data.source or data.version or not is_local(data.source):
        return ""
    return (
        f"data.source: the steps of the pipeline cannot read {data.source}, because it is on this "
        "machine; copy the files to gs://, s3:// or minio://BUCKET/FOLDER"
    )


def _require_columns(data: DataConfig, scratch: Path) -> None:
    # Import these modules late, because they import Arrow, which takes half a second.
    from flotilla.trainer.data.files.file_pieces import one_format, select_pieces  # noqa: PLC0415
    from flotilla.trainer.preflight.head import few_files, list_files  # noqa: PLC0415

    taken = list_files(data)
    form, _ = one_format(data, taken.files)
    # Skip TFRecord, because reading it imports TensorFlow, and JSON, because it has no header.
    if form not in ("csv", "parquet", "npz", "images"):
        return
    few = few_files(data, taken, scratch)
    if few.listing.files:
        pieces = select_pieces(data, few.listing, scratch)
        pieces.roles(data, *pieces.header())

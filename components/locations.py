"""The id of a run, the URIs below which it publishes, and its folders on this machine."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainer import storage
from trainer.config.data import DataConfig
from trainer.errors import ConfigError, UserError
from trainer.storage import patterns

RUN_ID = "FLOTILLA_RUN_ID"
RUN_FOLDER = "FLOTILLA_RUN_FOLDER"
#: The folder below a pipeline root where a run publishes that has no `storage.root`.
FLOTILLA = "flotilla"


def run_id_of(kfp_run_id: str) -> str:
    """Return the run id: that of the command line if it started the run, else KFP's."""
    return os.environ.get(RUN_ID) or kfp_run_id


def is_local_run() -> bool:
    """Return whether the command line runs the pipeline on this machine."""
    return bool(os.environ.get(RUN_ID))


def root_of(configured: str, artifact: str, kfp_run_id: str) -> str:
    """Return `storage.root`, or the folder `flotilla` below the run's KFP pipeline root.

    Args:
        configured: `storage.root`.
        artifact: URI of an output: `<pipeline root>/<pipeline>/<run id>/<step>/<name>`, with or
            without the endpoint of its store after a question mark.
        kfp_run_id: KFP's id of the run.

    Raises:
        UserError: `storage.root` is empty and the artifact shows no pipeline root.
    """
    if configured:
        return configured
    if pipeline_root := pipeline_root_in(artifact, kfp_run_id):
        return storage.join(pipeline_root, FLOTILLA)
    raise UserError("storage.root is empty: set it to the URI below which all is published")


def pipeline_root_in(artifact: str, kfp_run_id: str) -> str:
    """Return KFP's pipeline root in the URI of an output, see `root_of`; empty if there is none."""
    path, mark, query = artifact.partition("?")
    before, found, _ = path.partition(f"/{kfp_run_id}/")
    pipeline_root = before.rpartition("/")[0]
    return f"{pipeline_root}{mark}{query}" if found and "://" in pipeline_root else ""


def check_shared(root: str) -> None:
    """Raise a `ConfigError` where this is a pod, and `root` a folder that no other pod sees."""
    if os.environ.get("KFP_POD_NAME") and storage.local_path(root):
        raise ConfigError(
            f"storage.root: {root} is a folder of this pod, which no other step sees: set it to "
            "gs://, s3:// or minio://BUCKET/FOLDER, or leave it empty"
        )


def check_source(data: DataConfig) -> None:
    """Raise a `ConfigError` where this is a pod and the source a path, which is not there."""
    if data.source and os.environ.get("KFP_POD_NAME") and patterns.is_local(data.source):
        raise ConfigError(
            f"data.source: {data.source} is a path, and there are no files of yours in this pod: "
            "put them into gs://, s3:// or minio://BUCKET/FOLDER"
        )


def output_of(root: str, run_id: str, kind: str, source: str, *origin: str) -> str:
    """Return the URI at which to publish what is made of `source`.

    Its name is that of `source`, which has the global step, and a digest of all other origins: a
    run that is resumed with another policy or other formats, or that trained a lost checkpoint
    again, publishes next to what it published before.
    """
    name = storage.name_of(source)
    digest = hashlib.sha256("\n".join(origin).encode()).hexdigest()[:12]
    return storage.join(root, run_id, kind, f"{name}-{digest}")


def run_at(root: str, run_id: str) -> str:
    """Return the URI of a run whose steps share no folder.

    Empty where they share one, and where the root is not known or is no URI: the code that needs
    the URI reports that.
    """
    if os.environ.get(RUN_FOLDER) or not (root and run_id):
        return ""
    with suppress(UserError):
        return storage.join(root, run_id)
    return ""


def run_at_first(configured: str, artifact: str, kfp_run_id: str) -> str:
    """Return what `run_at` does, for a step that finds the root by `root_of`."""
    with suppress(UserError):
        return run_at(root_of(configured, artifact, kfp_run_id), run_id_of(kfp_run_id))
    return ""


def run_id_in(artifact: str, step: str) -> str:
    """Return the run id in the URI of an output of `step`; empty where there is none.

    For a step that must not take the run as an input, so that KFP can cache it.
    """
    named = re.match(rf".+://.*/([^/]+)/{re.escape(step)}(-\d+)?/", artifact.partition("?")[0])
    return run_id_of(named[1] if named else "")


def folder_of_run() -> Path:
    """Return the run's folder on this machine: that of the command line, or a temporary one."""
    return Path(os.environ.get(RUN_FOLDER) or tempfile.mkdtemp(prefix="flotilla-"))


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a temporary folder; raises `UserError` when the disk is full."""
    try:
        with tempfile.TemporaryDirectory(prefix="flotilla-") as folder:
            yield Path(folder)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        where = tempfile.gettempdir()
        raise UserError(
            f"cannot write below {where}: {error.strerror}; free some space, or set TMPDIR"
        ) from error

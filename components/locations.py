"""Which run this is, and where it publishes and works.

A folder of this machine for the time of a step.
"""

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
from trainer.errors import UserError

RUN_ID = "FLOTILLA_RUN_ID"
RUN_FOLDER = "FLOTILLA_RUN_FOLDER"


def run_id_of(kfp_run_id: str) -> str:
    """Return the run id: the command line's where it started the run, else KFP's own."""
    return os.environ.get(RUN_ID) or kfp_run_id


def is_local_run() -> bool:
    """Say whether the command line runs the pipeline on this machine."""
    return bool(os.environ.get(RUN_ID))


def root_of(configured: str, artifact: str, kfp_run_id: str) -> str:
    """Return `storage.root`, or the folder of ours below the run's KFP pipeline root.

    Args:
        configured: `storage.root`.
        artifact: URI of an output: `<pipeline root>/<pipeline>/<run id>/<step>/<name>`, which may
            carry the endpoint of its store behind a question mark.
        kfp_run_id: KFP's id of the run.

    Raises:
        UserError: there is none.
    """
    if configured:
        return configured
    path, mark, query = artifact.partition("?")
    before, found, _ = path.partition(f"/{kfp_run_id}/")
    pipeline_root = before.rpartition("/")[0]
    if not found or "://" not in pipeline_root:
        raise UserError("storage.root is empty: set it to the URI below which all is published")
    return storage.join(f"{pipeline_root}{mark}{query}", "flotilla")


def output_of(root: str, run_id: str, kind: str, source: str, *origin: str) -> str:
    """Return where to publish what is made of `source`, whose name says its global step.

    What else it is made of is in the name too: a run that is resumed with another policy or other
    forms, or that had to train a lost checkpoint again, publishes beside what it had published.
    """
    name = storage.name_of(source)
    digest = hashlib.sha256("\n".join(origin).encode()).hexdigest()[:12]
    return storage.join(root, run_id, kind, f"{name}-{digest}")


def run_at(root: str, run_id: str) -> str:
    """Return the URI of the run where its steps share no folder, and an empty text where they do.

    Empty too where it is not known, or is no URI: whoever needs it says so.
    """
    if os.environ.get(RUN_FOLDER) or not (root and run_id):
        return ""
    with suppress(UserError):
        return storage.join(root, run_id)
    return ""


def run_at_first(configured: str, artifact: str, kfp_run_id: str) -> str:
    """Return what `run_at` does, for a step that has to find the root as `root_of` does."""
    with suppress(UserError):
        return run_at(root_of(configured, artifact, kfp_run_id), run_id_of(kfp_run_id))
    return ""


def run_id_in(artifact: str, step: str) -> str:
    """Return the run id that stands in the URI of an output of `step`; empty where none does.

    For the step that must not depend on the run, so that KFP can take it from its cache.
    """
    named = re.match(rf".+://.*/([^/]+)/{re.escape(step)}(-\d+)?/", artifact.partition("?")[0])
    return run_id_of(named[1] if named else "")


def folder_of_run() -> Path:
    """Return this run's folder on this machine: the command line's, else a temporary one."""
    return Path(os.environ.get(RUN_FOLDER) or tempfile.mkdtemp(prefix="flotilla-"))


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Lend a folder; where it is full the step has failed, and not its code."""
    try:
        with tempfile.TemporaryDirectory(prefix="flotilla-") as folder:
            yield Path(folder)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        where = tempfile.gettempdir()
        raise UserError(
            f"cannot write below {where}: {error.strerror}; free some space, or set TMPDIR"
        ) from error

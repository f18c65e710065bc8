"""Describes the origin of a run (user, commit, dataset) in MLflow's terms."""

from __future__ import annotations

import getpass
import json
import os
import subprocess
from contextlib import suppress
from importlib.metadata import version
from typing import Any

from flotilla.trainer import storage
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.runtime.masking import mask

# The variable that holds the commit of the code in an image.
_OF_IMAGE = "FLOTILLA_COMMIT"
_GIT_SECONDS = 10
# MLflow's limits for the name and the digest of a dataset.
_LONGEST_NAME, _LONGEST_DIGEST = 500, 36
_SOURCES = {"file": "local", "gs": "gs", "s3": "s3", "minio": "s3"}


def describe_origin() -> dict[str, str]:
    """Return MLflow tags for Flotilla's version, the user, and the commit of the code."""
    tags = {"mlflow.source.name": "flotilla", "flotilla.version": version("kfp-flotilla")}
    # Omit a user without a name, such as a numeric id in a container.
    with suppress(OSError, KeyError):
        tags["mlflow.user"] = getpass.getuser()
    if commit := os.environ.get(_OF_IMAGE) or _ask_git("rev-parse", "HEAD"):
        tags["mlflow.source.git.commit"] = commit
    if not os.environ.get(_OF_IMAGE) and commit:
        tags["mlflow.source.git.branch"] = _ask_git("rev-parse", "--abbrev-ref", "HEAD")
        changed = _ask_git("status", "--porcelain", "--untracked-files=no")
        tags["mlflow.source.git.dirty"] = str(bool(changed)).lower()
    return {key: value for key, value in tags.items() if value}


def _ask_git(*words: str) -> str:
    try:
        ended = subprocess.run(
            ["git", *words], check=True, capture_output=True, text=True, timeout=_GIT_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return ended.stdout.strip()


def describe_dataset(uri: str) -> dict[str, Any]:
    """Return the fields of MLflow's `Dataset` for a published dataset, or {} on an error."""
    try:
        fields = storage.read_manifest(uri).fields
    except UserError:
        return {}
    splits = fields.get("splits", {})
    rows = {name: each.get("examples", 0) for name, each in splits.items()}
    profile = {"num_rows": sum(rows.values()), **{f"num_rows_{key}": n for key, n in rows.items()}}
    place = mask(uri.partition("?")[0])
    return {
        "name": str(fields.get("dataset") or storage.name_of(uri))[:_LONGEST_NAME],
        "digest": str(fields.get("fingerprint") or storage.name_of(uri))[:_LONGEST_DIGEST],
        "source_type": _SOURCES.get(place.partition("://")[0], "local"),
        "source": json.dumps({"uri": place}),
        "profile": json.dumps(profile),
    }

"""The descriptor of what a step has published: the small file behind its typed KFP artifact.

KFP copies every input artifact into the pod before a step starts. So the artifact is a file of some
hundred bytes with the URI and a digest of the content, and never the data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer import storage
from trainer.errors import UserError
from trainer.events import to_tree
from trainer.json_records import record_in


@dataclass(frozen=True, kw_only=True)
class Descriptor:
    """A published directory; `facts` are for people, and the same as the artifact's metadata."""

    kind: str
    uri: str
    digest: str
    facts: Mapping[str, Any] = field(default_factory=dict)


def describe(artifact: Any, uri: str, facts: Mapping[str, Any]) -> None:
    """Let a KFP artifact describe what is published at `uri`; raises `UserError`."""
    manifest = storage.read_manifest(uri)
    write(
        artifact,
        to_tree(Descriptor(kind=manifest.kind, uri=uri, digest=manifest.digest, facts=facts)),
    )
    artifact.metadata.update({"uri": uri, **facts})


def write(artifact: Any, tree: Mapping[str, Any]) -> None:
    """Write JSON as the file of a KFP artifact; raises `UserError` where that is not possible."""
    path = Path(artifact.path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(tree, indent=2, allow_nan=False), encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror}; free some space in the pod of the step"
        ) from None


def check(artifact: Any, uri: str) -> None:
    """Check that the artifact, if there is one, describes what is at `uri`; raises `UserError`."""
    if artifact is None or not Path(artifact.path).exists():
        return
    found = _read(artifact)
    if found.uri != uri:
        raise UserError(
            f"the artifact describes the {found.kind} {found.uri}, and the URI next to it is "
            f"{uri}: take both from the same step"
        )
    if storage.read_manifest(uri).digest != found.digest:
        raise UserError(
            f"{uri} was published again, with another content, after the step that made the "
            f"{found.kind}: start a new run"
        )


def _read(artifact: Any) -> Descriptor:
    with suppress(OSError):
        if found := record_in(Descriptor, Path(artifact.path).read_bytes()):
            return found
    raise UserError(
        f"the artifact {artifact.uri} is no descriptor of what a step has published: take it from "
        "that step, or leave it out and pass the URI alone"
    )

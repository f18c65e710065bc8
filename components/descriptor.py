"""The KFP artifacts of a step: descriptors of published directories, and metrics for the UI.

KFP copies every input artifact into the pod before a step starts. Therefore a descriptor contains
only the URI and the digest of a published directory, never its data.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flotilla.trainer import storage
from flotilla.trainer.events import to_tree
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.runtime.json_records import read_record


@dataclass(frozen=True, kw_only=True)
class Descriptor:
    """A reference to a published directory. `facts` are also stored as the artifact's metadata."""

    kind: str
    uri: str
    digest: str
    facts: Mapping[str, Any] = field(default_factory=dict)


def describe(artifact: Any, uri: str, facts: Mapping[str, Any]) -> None:
    """Write the descriptor of the directory at `uri` to an artifact. Raises `UserError`."""
    manifest = storage.read_manifest(uri)
    write(
        artifact,
        to_tree(Descriptor(kind=manifest.kind, uri=uri, digest=manifest.digest, facts=facts)),
    )
    artifact.metadata.update({"uri": uri, **facts})


def write(artifact: Any, tree: Mapping[str, Any]) -> None:
    """Write a JSON object to the file of a KFP artifact."""
    path = Path(artifact.path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(tree, indent=2, allow_nan=False), encoding="utf-8")


def check(artifact: Any, uri: str) -> None:
    """Raise a `UserError` if the artifact exists but does not describe the directory at `uri`."""
    if artifact is None or not Path(artifact.path).exists():
        return
    found = _read_descriptor(artifact)
    if found.uri != uri:
        raise UserError(
            f"the artifact describes the {found.kind} {found.uri}, but the step received the URI "
            f"{uri}; pass the artifact and the URI from the same step"
        )
    if storage.read_manifest(uri).digest != found.digest:
        raise UserError(
            f"the content of {uri} has changed since a step published the {found.kind}: start a "
            "new run"
        )


def _read_descriptor(artifact: Any) -> Descriptor:
    with suppress(OSError):
        if found := read_record(Descriptor, Path(artifact.path).read_bytes()):
            return found
    raise UserError(
        f"the artifact {artifact.uri} does not describe the output of a step: pass the artifact "
        "from the step that published the output, or pass only the URI"
    )


# A confusion matrix of more classes is not logged: it would be illegible and fill KFP's database.
MOST_CLASSES = 50
# Kubernetes sets this variable in pods of the namespace that contains KFP's API server. Steps run
# there if KFP is installed without profiles, and otherwise in the namespace of a profile.
_API_HERE = "ML_PIPELINE_SERVICE_HOST"


def scalars(found: Mapping[str, float]) -> dict[str, float]:
    """Return only the finite metrics. KFP's database rejects NaN and infinity."""
    return {name: float(value) for name, value in found.items() if math.isfinite(value)}


def log_confusion(confusion: Any, labels: Sequence[str], matrix: Sequence[Sequence[int]]) -> None:
    """Log a confusion matrix (rows are true classes) to a ClassificationMetrics artifact."""
    if not len(matrix):
        confusion.metadata["left_out"] = "the evaluation has no confusion matrix"
    elif len(labels) > MOST_CLASSES:
        confusion.metadata["left_out"] = (
            f"the matrix has {len(labels)} classes, but the UI shows at most {MOST_CLASSES}"
        )
    else:
        # The UI identifies rows by name, so add the index to a name that several classes share.
        names = [
            f"{each} ({i})" if labels.count(each) > 1 else each for i, each in enumerate(labels)
        ]
        confusion.log_confusion_matrix(names, [[int(cell) for cell in row] for row in matrix])
    write(confusion, confusion.metadata)


def log_roc(roc: Any, curve: Sequence[Sequence[float]]) -> None:
    """Log a ROC curve. Each row is a false positive rate, a true positive rate and a threshold."""
    if curve:
        columns = zip(*curve, strict=True)
        false, true, thresholds = ([float(value) for value in each] for each in columns)
        roc.log_roc_curve(false, true, thresholds)
    else:
        roc.metadata["left_out"] = "the evaluation has no ROC curve"
    write(roc, roc.metadata)


def write_viewers(artifact: Any, logs: str) -> None:
    """Write the file that makes KFP's UI offer TensorBoard for the logs at URI `logs`.

    The viewer does not work in the namespace of KFP's API server. There, the UI shows a command.
    """
    # Drop the query of the URI, because KFP passes the endpoint to the viewer separately.
    source, _, _ = logs.partition("?")
    words = f"TensorBoard: `{_command(source)}`"
    viewers = [{"type": "markdown", "storage": "inline", "source": words}]
    if not os.environ.get(_API_HERE):
        viewers.append({"type": "tensorboard", "source": source})
    write(artifact, {"version": 1, "outputs": viewers})
    artifact.metadata["tensorboard"] = source


def _command(source: str) -> str:
    """Return the command that shows these logs in TensorBoard on the user's machine."""
    scheme, _, path = source.partition("://")
    if scheme not in ("s3", "minio"):
        return f"tensorboard --logdir {path if scheme == 'file' else source}"
    endpoint = " --endpoint-url ENDPOINT" if scheme == "minio" else ""
    return f"aws s3 sync{endpoint} s3://{path} logs && tensorboard --logdir logs"

"""The UI artifacts of a step: plain, finite values, and no more than the KFP UI can draw."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from components import descriptor

# The UI cannot draw a larger matrix readably, and KFP stores its cells in a database.
MOST_CLASSES = 50
#: The output name under which the UI looks for viewers that KFP v2 has no artifact type for.
VIEWERS = "mlpipeline_ui_metadata"
# Kubernetes sets it in pods next to the service of KFP's API. The pods of an instance without
# profiles are there; those of a profile are in its namespace.
_API_HERE = "ML_PIPELINE_SERVICE_HOST"


def scalars(found: Mapping[str, float]) -> dict[str, float]:
    """Return all finite metrics: KFP's database takes no others."""
    return {name: float(value) for name, value in found.items() if math.isfinite(value)}


def log_confusion(confusion: Any, labels: Sequence[str], matrix: Sequence[Sequence[int]]) -> None:
    """Log the matrix, whose rows are the true classes; `confusion` is ClassificationMetrics."""
    if not len(matrix):
        confusion.metadata["left_out"] = "the evaluation has no confusion matrix"
    elif len(labels) > MOST_CLASSES:
        confusion.metadata["left_out"] = f"{len(labels)} classes are more than {MOST_CLASSES}"
    else:
        # The UI finds a row by its name, and two classes may have the same name.
        names = [
            f"{each} ({i})" if labels.count(each) > 1 else each for i, each in enumerate(labels)
        ]
        confusion.log_confusion_matrix(names, [[int(cell) for cell in row] for row in matrix])
    descriptor.write(confusion, confusion.metadata)


def log_roc(roc: Any, curve: Sequence[Sequence[float]]) -> None:
    """Log (false positive rate, true positive rate, threshold) to KFP's ClassificationMetrics."""
    if curve:
        columns = zip(*curve, strict=True)
        false, true, thresholds = ([float(value) for value in each] for each in columns)
        roc.log_roc_curve(false, true, thresholds)
    else:
        roc.metadata["left_out"] = "the evaluation has no curve"
    descriptor.write(roc, roc.metadata)


def write_viewers(artifact: Any, logs: str) -> None:
    """Write the file by which the UI offers TensorBoard for the folder at `logs`.

    The viewer needs a profile's namespace; without one the file has the command line alone.
    """
    # The viewer gets its endpoint from KFP.
    source, _, _ = logs.partition("?")
    words = f"TensorBoard: `{_command(source)}`"
    viewers = [{"type": "markdown", "storage": "inline", "source": words}]
    if not os.environ.get(_API_HERE):
        viewers.append({"type": "tensorboard", "source": source})
    descriptor.write(artifact, {"version": 1, "outputs": viewers})
    artifact.metadata["tensorboard"] = source


def _command(source: str) -> str:
    """Return the command that displays the logs at a URI on a person's own machine."""
    scheme, _, path = source.partition("://")
    if scheme not in ("s3", "minio"):
        return f"tensorboard --logdir {path if scheme == 'file' else source}"
    endpoint = " --endpoint-url ENDPOINT" if scheme == "minio" else ""
    return f"aws s3 sync{endpoint} s3://{path} logs && tensorboard --logdir logs"

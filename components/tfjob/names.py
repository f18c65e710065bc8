"""What a job is called, and by which labels and annotations Flotilla knows its own."""

from __future__ import annotations

import hashlib
import re

GROUP, VERSION, PLURAL = "kubeflow.org", "v1", "tfjobs"
# Written by the operator on every pod.
JOB_NAME = "training.kubeflow.org/job-name"
REPLICA_TYPE = "training.kubeflow.org/replica-type"
REPLICA_INDEX = "training.kubeflow.org/replica-index"
# Written by Flotilla, on the job and on its pods.
RUN = "flotilla/run"
MANAGED = "flotilla/launcher"
MANIFEST = "flotilla/manifest"
HEARTBEAT = "flotilla/heartbeat"

# A pod, its service and the label with the job's name take 63 characters.
MOST = 63
_LONGEST_END = len("-evaluator-9999")
_DIGEST = 12


def job_name(model: str, checkpoints: str) -> str:
    """Return the name of the job that trains to `checkpoints`: the same for every retry.

    The URI of the checkpoints names the run and is written by one step alone, so that two runs, or
    two steps, never share a name.
    """
    slug = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")
    # The name of a service has to begin with a letter.
    slug = slug if slug[:1].isalpha() else f"f-{slug}"
    most = MOST - _LONGEST_END - _DIGEST - 1
    return f"{slug[:most].rstrip('-')}-{_digest(checkpoints)}"


def run_label(run_id: str) -> str:
    """Return a run id as the value of a label; one that does not fit ends with a digest."""
    if re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", run_id):
        return run_id
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", run_id).strip("-._")[: MOST - _DIGEST - 1]
    return f"{slug}-{_digest(run_id)}".lstrip("-")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST]

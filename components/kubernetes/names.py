"""Names of a job, of its container, and of the labels and annotations by which it is found."""

from __future__ import annotations

import hashlib
import re
from importlib.metadata import version
from typing import Any

# A Kubernetes object, or a part of one, as JSON.
Tree = dict[str, Any]

# The controllers find the container by this name.
CONTAINER = "tensorflow"
# By this name a network policy and a PodMonitor find the port of the metrics.
METRICS_PORT = "metrics"
# Labels that the controllers set on every pod: of its role, and of its index among those of a role.
ROLE_LABELS = ("training.kubeflow.org/replica-type", "jobset.sigs.k8s.io/replicatedjob-name")
INDEX_LABELS = ("training.kubeflow.org/replica-index", "jobset.sigs.k8s.io/job-index")
# Labels of Flotilla, on the job and on its pods.
RUN = "flotilla/run"
MANAGED = "flotilla/launcher"
# Label of pods that have a network policy of their job: no other one of Flotilla selects them.
NETWORK = "flotilla/network"
# Label of a job that waits for its admission in a queue of Kueue.
KUEUE = "kueue.x-k8s.io/queue-name"
# The prefix of the labels that Kubernetes recommends.
APP = "app.kubernetes.io/"
# Annotations of Flotilla: the digest of a job, and the request to end it, on its lease or on it.
MANIFEST = "flotilla/manifest"
STOP = "flotilla/stop"
# What the guard of the leading task writes to its log when it has seen `STOP`.
STOPPING = "the run is cancelled: training ends with a last checkpoint"

# Names of pods and services, and values of labels, have at most 63 characters.
MAX_LENGTH = 63
# With the index of the only pod of a child Job and its random end, which pods of a JobSet have.
_LONGEST_SUFFIX = max(len("-evaluator-0-0-abcde"), len("-worker-9999-0-abcde"))
_DIGEST_LENGTH = 12


def job_name(model: str, checkpoints: str) -> str:
    """Return the name of the job that trains to `checkpoints`: the same for every retry."""
    slug = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")
    # The name of a service has to begin with a letter.
    slug = slug if slug[:1].isalpha() else f"f-{slug}"
    length = MAX_LENGTH - _LONGEST_SUFFIX - _DIGEST_LENGTH - 1
    return f"{slug[:length].rstrip('-')}-{_digest(checkpoints)}"


def label_value(text: str) -> str:
    """Return a text as the value of a label; one that does not fit is digested."""
    if re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", text):
        return text
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[: MAX_LENGTH - _DIGEST_LENGTH - 1]
    return f"{slug}-{_digest(text)}".lstrip("-")


def app_labels(component: str, instance: str) -> dict[str, str]:
    """Return the labels by which tools and policies recognize a part of a run."""
    values = {
        "name": "flotilla",
        "part-of": "flotilla",
        "managed-by": "flotilla",
        "component": component,
        "instance": instance,
        "version": label_value(version("flotilla")),
    }
    return {f"{APP}{name}": value for name, value in values.items()}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_LENGTH]

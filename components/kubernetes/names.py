"""Names of jobs, containers, labels and annotations, and the resources of the Kubernetes API."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

# A Kubernetes object, or a part of it, as JSON.
Tree = dict[str, Any]

# The controllers identify the container of a task by this name.
CONTAINER = "tensorflow"
# Name of the sidecar container of a user's program.
AGENT = "flotilla-agent"
# A network policy and a PodMonitor refer to the metrics port by this name.
METRICS_PORT = "metrics"
# Labels that the training operator or JobSet sets on every pod: role, and index within the role.
ROLE_LABELS = ("training.kubeflow.org/replica-type", "jobset.sigs.k8s.io/replicatedjob-name")
INDEX_LABELS = ("training.kubeflow.org/replica-index", "jobset.sigs.k8s.io/job-index")
# Flotilla's labels on the job and its pods.
RUN = "flotilla/run"
MANAGED = "flotilla/launcher"
# Label of isolated pods, which only their own job's network policy selects.
NETWORK = "flotilla/network"
KUEUE = "kueue.x-k8s.io/queue-name"
# Prefix of the labels that Kubernetes recommends.
APP = "app.kubernetes.io/"
# Flotilla's annotations: the digest of a job, and a stop request (on the lease or the job).
MANIFEST = "flotilla/manifest"
STOP = "flotilla/stop"
# The start of a guard's log line about unresolved names, and its line once all names resolve.
UNRESOLVED = "these names do not resolve: "
RESOLVED = "the names of all tasks resolve"
# The line that the guard of the leading task logs when it receives a stop request.
STOPPING = "the run is being cancelled: training ends with a last checkpoint"

# Maximum length of a label value, of a Service name, and of a pod name that is also a host name.
MAX_LENGTH = 63
# Length of the longest suffix of a pod's name: its role, its indexes and a random part.
_LONGEST_SUFFIX = max(len("-evaluator-0-0-abcde"), len("-worker-9999-0-abcde"))
_DIGEST_LENGTH = 12


def job_name(model: str, checkpoints: str) -> str:
    """Return the name of the job that writes to `checkpoints`. Every retry gets the same name."""
    return f"{_job_prefix(model)}{_digest(checkpoints)}"


def is_job_name(name: str, model: str) -> bool:
    """Return whether this is the name of a job of the model."""
    digest = re.compile(rf"[0-9a-f]{{{_DIGEST_LENGTH}}}")
    prefix = _job_prefix(model)
    return name.startswith(prefix) and digest.fullmatch(name.removeprefix(prefix)) is not None


def _job_prefix(model: str) -> str:
    slug = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")
    # The name of a Service must start with a letter.
    slug = slug if slug[:1].isalpha() else f"f-{slug}"
    length = MAX_LENGTH - _LONGEST_SUFFIX - _DIGEST_LENGTH - 1
    return f"{slug[:length].rstrip('-')}-"


def label_value(text: str) -> str:
    """Return `text` as a label value. If it is not a valid value, clean it and append a digest."""
    if re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", text):
        return text
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[: MAX_LENGTH - _DIGEST_LENGTH - 1]
    return f"{slug}-{_digest(text)}".lstrip("-")


def app_labels(component: str, instance: str) -> dict[str, str]:
    """Return the labels that Kubernetes recommends for a component of a run."""
    values = {
        "name": "flotilla",
        "part-of": "flotilla",
        "managed-by": "flotilla",
        "component": component,
        "instance": instance,
        "version": label_value(version("kfp-flotilla")),
    }
    return {f"{APP}{name}": value for name, value in values.items()}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_LENGTH]


@dataclass(frozen=True)
class Resource:
    """A namespaced resource of the API. `group` is empty for the core API."""

    plural: str
    group: str = ""
    version: str = "v1"

    @property
    def api_version(self) -> str:
        """The `apiVersion` of the objects."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str) -> str:
        """Return the path of all objects of this kind in a namespace."""
        root = f"apis/{self.api_version}" if self.group else f"api/{self.version}"
        return f"/{root}/namespaces/{namespace}/{self.plural}"


@dataclass(frozen=True, kw_only=True)
class JobKind:
    """The kind of job that an engine creates.

    Attributes:
        resource: the API resource of the jobs.
        kind: the `kind` of the objects, such as `TFJob`.
        label: the key of the pod label that contains the name of the job.
        controller: the controller's name for messages.
        show: the command that shows whether the controller runs.
        remedy: what to do if the cluster does not serve the kind.
        has_child_jobs: whether the controller creates a Kubernetes Job for each task.
        outdated: what to do if the controller lacks a field of the job.
    """

    resource: Resource
    kind: str
    label: str
    controller: str
    show: str
    remedy: str
    has_child_jobs: bool = False
    outdated: str = ""

    def selector(self, name: str) -> str:
        """Return the label selector of the pods of a job."""
        return f"{self.label}={name}"

    def owner(self, job: Tree) -> Tree:
        """Return the owner reference for an object that must be deleted together with a job."""
        metadata = job["metadata"]
        return {
            "apiVersion": self.resource.api_version,
            "kind": self.kind,
            "name": metadata["name"],
            "uid": metadata["uid"],
        }


def own_labels(job: Tree) -> dict[str, str]:
    """Return a job's Flotilla labels, for the objects that it owns."""
    prefixes = (APP, RUN, MANAGED)
    labels = job["metadata"].get("labels") or {}
    return {key: value for key, value in labels.items() if key.startswith(prefixes)}


PODS = Resource("pods")
EVENTS = Resource("events")
JOBS = Resource("jobs", "batch")
LEASES = Resource("leases", "coordination.k8s.io")
SERVICES = Resource("services")
NETWORK_POLICIES = Resource("networkpolicies", "networking.k8s.io")

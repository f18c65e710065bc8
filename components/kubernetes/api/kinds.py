"""The kinds of objects that Flotilla asks the Kubernetes API for."""

from __future__ import annotations

from dataclasses import dataclass

from components.kubernetes.names import Tree


@dataclass(frozen=True)
class Resource:
    """A kind of objects in a namespace, as the API addresses it; the core has no group."""

    plural: str
    group: str = ""
    version: str = "v1"

    @property
    def api_version(self) -> str:
        """Return it as the objects name it."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str) -> str:
        """Return the path of all objects of this kind in a namespace."""
        root = f"apis/{self.api_version}" if self.group else f"api/{self.version}"
        return f"/{root}/namespaces/{namespace}/{self.plural}"


@dataclass(frozen=True, kw_only=True)
class JobKind:
    """The kind of the jobs of an engine.

    Attributes:
        resource: how the API addresses them.
        kind: as the objects name it, such as `TFJob`.
        label: of every pod; its value is the name of the job.
        controller: what acts on the jobs, in words.
        show: the command that shows whether it runs.
        remedy: what to do where the cluster does not serve the kind.
        has_child_jobs: whether its controller makes a Job of Kubernetes for each task.
        outdated: what to do where it does not know a field of the job.
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
        """Return the owner reference of an object that is deleted with a job."""
        metadata = job["metadata"]
        return {
            "apiVersion": self.resource.api_version,
            "kind": self.kind,
            "name": metadata["name"],
            "uid": metadata["uid"],
        }


PODS = Resource("pods")
EVENTS = Resource("events")
JOBS = Resource("jobs", "batch")
LEASES = Resource("leases", "coordination.k8s.io")
NETWORK_POLICIES = Resource("networkpolicies", "networking.k8s.io")

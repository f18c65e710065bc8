"""Adopts the unfinished job of an earlier attempt, or creates one, and isolates its pods.

A retry of the step finds the job of the earlier attempt under the same name. It adopts the job if
the digest of the manifest is the same. A job is replaced if it has finished, is being stopped or
deleted, or has another manifest. The new job resumes training from the newest checkpoint. No job is
created while an earlier one still has a pod, because both would train at the same time.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

from flotilla.components.kubernetes import names
from flotilla.components.kubernetes.client import (
    Api,
    RefusedError,
    SilentControllerError,
    call_with_retry,
    describe_refusal,
)
from flotilla.components.kubernetes.engine import Engine, is_stop_requested
from flotilla.components.kubernetes.names import NETWORK_POLICIES, PODS, SERVICES, JobKind, Tree
from flotilla.trainer.config.cluster import DeadlinesConfig
from flotilla.trainer.runtime.errors import UserError

log = logging.getLogger(__name__)
POLL_SECONDS = 1.0


@dataclass
class Adoption:
    """Creates or adopts the job. `is_adopted` is true if an earlier attempt created it.

    `wait` sleeps, and raises if the run is interrupted.
    """

    engine: Engine
    api: Api
    deadlines: DeadlinesConfig
    wait: Callable[[float], None]
    is_adopted: bool = False

    def __post_init__(self) -> None:
        """Store the kind of job."""
        self.kind = self.engine.kind

    def adopt_or_create(self, manifest: Tree, own: Tree, delete_seconds: float) -> Tree:
        """Adopt or create the job, and return it as stored by the API.

        `own` is metadata with the owner reference of this attempt. Deleting an earlier job of this
        name may take at most `delete_seconds`. Raises `UserError`.
        """
        metadata = manifest["metadata"]
        name = metadata["name"]
        resource = self.kind.resource
        job = {**manifest, "metadata": {**metadata, **own}}
        while True:
            found = self._get(name)
            if found is None:
                self.wait_until_deleted(name, delete_seconds)
                self._require_own_service(name)
                # Expect a conflict: the job exists if the response to an earlier request was lost.
                create = partial(self.api.create, resource, job, strict=self.engine.is_strict)
                created = self._ask(create, unless=HTTPStatus.CONFLICT)
                if created is not None:
                    return created
                continue
            self._require_own(found)
            if self._may_adopt(found, metadata):
                adopted = self._take_over(found, own)
                if adopted is None:
                    continue
                log.info("adopted the job %s from an earlier attempt", name)
                self.is_adopted = True
                return adopted
            self._delete(found, delete_seconds)

    def wait_until_deleted(self, name: str, seconds: float) -> None:
        """Wait until a job and its pods are deleted. Raises `UserError` after `seconds`."""
        label = self.kind.selector(name)
        left = seconds
        while self._get(name) or self._ask(lambda: self.api.list_labelled(PODS, label)):
            if left == seconds:
                log.info("waiting for the deletion of the earlier job %s and its pods", name)
            if left <= 0:
                raise UserError(
                    f"the earlier job {name} was not deleted within {seconds:g} s; check its "
                    f"pods with: kubectl get pods -l {label}"
                )
            self.wait(POLL_SECONDS)
            left -= POLL_SECONDS

    def _require_own(self, found: Tree) -> None:
        metadata = found["metadata"]
        if names.MANAGED not in (metadata.get("labels") or {}):
            raise UserError(
                f"the {self.kind.kind} {metadata['name']} does not belong to Flotilla, and "
                "Flotilla did not change it; delete it, or rename the model"
            )

    def _require_own_service(self, name: str) -> None:
        if not self.kind.has_child_jobs:
            return
        try:
            limit = self.deadlines.unreachable
            service = call_with_retry(partial(self.api.get, SERVICES, name), limit, self.wait)
        except RefusedError:
            # Continue if the Service does not exist or the launcher may not read it.
            return
        if is_foreign(self.kind, service):
            raise UserError(
                f"the Service {name} does not belong to a {self.kind.kind}, and would prevent the "
                "tasks of the job from reaching each other; delete it (kubectl delete "
                f"service {name}), or rename the model"
            )

    def _may_adopt(self, found: Tree, metadata: Tree) -> bool:
        annotations = found["metadata"].get("annotations") or {}
        same = annotations.get(names.MANIFEST) == metadata["annotations"][names.MANIFEST]
        if not same or found["metadata"].get("deletionTimestamp") or self.engine.end(found):
            return False
        return not self._ask(partial(is_stop_requested, self.api, found))

    def _take_over(self, found: Tree, own: Tree) -> Tree | None:
        """Make this attempt the owner of a job and return the job, or None if it was deleted."""
        if not own:
            return found
        name = found["metadata"]["name"]

        def patch() -> Tree:
            try:
                return self.api.patch(self.kind.resource, name, {"metadata": own})
            except SilentControllerError as error:
                # Do not retry: the lease would expire meanwhile, and the guard would end the job.
                log.warning("the job %s is still owned by an earlier attempt: %s", name, error)
                return found

        owned: Tree | None = self._ask(patch, unless=HTTPStatus.NOT_FOUND)
        return owned

    def _delete(self, found: Tree, seconds: float) -> None:
        metadata = found["metadata"]
        if not self.engine.end(found) and self._ask(partial(is_stop_requested, self.api, found)):
            # Wait, because the job's chief may still be saving a checkpoint.
            self.engine.stop(found).wait(self.api, self.wait)
        if not metadata.get("deletionTimestamp"):
            resource = self.kind.resource
            self._ask(partial(self.api.delete, resource, metadata["name"], metadata["uid"]))
        self.wait_until_deleted(metadata["name"], seconds)

    def _get(self, name: str) -> Tree | None:
        found: Tree | None = self._ask(partial(self.api.find, self.kind.resource, name))
        return found

    def _ask(self, call: Callable[[], Any], unless: HTTPStatus | None = None) -> Any:
        """Return the result of a call, or None if the API refuses it with the status `unless`."""
        try:
            limits = self.deadlines
            return call_with_retry(call, limits.unreachable, self.wait, self.kind, limits.operator)
        except RefusedError as error:
            if error.code == unless:
                return None
            raise UserError(describe_refusal(error, self.kind)) from None


def step_pod() -> Tree | None:
    """Return the owner reference to this step's pod, or None outside a pod.

    Use it only in the pod's namespace, because Kubernetes considers an owner in another namespace
    missing and would delete the job.
    """
    name, uid = (os.environ.get(key, "") for key in ("KFP_POD_NAME", "KFP_POD_UID"))
    if not name or not uid:
        return None
    return {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid}


def isolate(templates: Collection[Tree]) -> None:
    """Label pod templates so that only their job's network policy applies to them."""
    for template in templates:
        template["metadata"]["labels"][names.NETWORK] = "job"


def network_policy(kind: JobKind, job: Tree, templates: Collection[Tree]) -> Tree | None:
    """Return the network policy of an existing job, or None for a job without isolation.

    The pods of the job can reach each other on every port, because NCCL uses any port. All pods of
    the cluster can reach the metrics port. The name is unique to this job, because the policy of an
    earlier job may still exist.
    """
    labels = [each.get("metadata", {}).get("labels") or {} for each in templates]
    if not all(names.NETWORK in each for each in labels):
        return None
    metadata = job["metadata"]
    name, uid = metadata["name"], metadata["uid"]
    pods = {"podSelector": {"matchLabels": {kind.label: name}}}
    return {
        "apiVersion": NETWORK_POLICIES.api_version,
        "kind": "NetworkPolicy",
        "metadata": {
            "name": f"{name}-{uid[:8]}",
            "labels": names.own_labels(job),
            "ownerReferences": [kind.owner(job)],
        },
        "spec": {
            **pods,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [pods]}, *([_SCRAPED] if any(map(_serves, templates)) else [])],
        },
    }


def is_foreign(kind: JobKind, service: Tree) -> bool:
    """Return whether a Service with a job's name is not owned by that job.

    JobSet 0.12 uses any existing Service that has the name of the Service that it would create.
    """
    owners = service["metadata"].get("ownerReferences") or []
    name = service["metadata"]["name"]
    return not any((each.get("kind"), each.get("name")) == (kind.kind, name) for each in owners)


# Prometheus may run in any namespace.
_SCRAPED: Tree = {
    "from": [{"namespaceSelector": {}}],
    "ports": [{"port": names.METRICS_PORT, "protocol": "TCP"}],
}


def _serves(template: Tree) -> bool:
    containers = template["spec"].get("containers") or []
    ports = [port for each in containers for port in each.get("ports") or []]
    return any(port.get("name") == names.METRICS_PORT for port in ports)

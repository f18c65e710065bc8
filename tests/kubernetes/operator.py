"""The part of the training operator 1.9 that a launcher can observe.

It creates pods by role and index, with labels and TF_CONFIG (with the evaluator, and none where the
job has one task); restarts pods by the policy `ExitCode`; ends the job with the chief or worker 0;
and follows `cleanPodPolicy`, `activeDeadlineSeconds`, `ttlSecondsAfterFinished` and `suspend`.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import ExitStack, suppress
from typing import Any

from tests.kubernetes import events
from tests.kubernetes.network import host_of
from tests.kubernetes.store import RefusedError, Store, Tree, now

JOB_NAME = "training.kubeflow.org/job-name"
RESYNC_SECONDS = 0.2


def exit_code(pod: Tree) -> int:
    """Return the exit code that the operator sees; 0xbeef where no container has one."""
    for status in pod.get("status", {}).get("containerStatuses", []):
        terminated = status["state"].get("terminated")
        if status["name"] == "tensorflow" and terminated:
            return int(terminated["exitCode"])
    return 0xBEEF


def condition(tree: Tree, kind: str, reason: str = "", message: str = "") -> None:
    """Add a condition to the status of a job."""
    found = tree.setdefault("status", {}).setdefault("conditions", [])
    if kind in [each["type"] for each in found]:
        return
    found.append(
        {
            "type": kind,
            "status": "True",
            "reason": reason or f"TFJob{kind}",
            "message": message,
            "lastTransitionTime": now(),
        }
    )


def is_finished(job: Tree) -> bool:
    kinds = [each["type"] for each in job.get("status", {}).get("conditions", [])]
    return "Succeeded" in kinds or "Failed" in kinds


class Operator:
    """Reconciles the pods and the status of all jobs, in a thread of its own.

    Attributes:
        down: whether it is not running: jobs then have no conditions and no new pods.
    """

    def __init__(self, store: Store) -> None:
        self.down = False
        self._store = store
        self._ports = ExitStack()
        self._addresses: dict[str, int] = {}
        self._stopping = False
        self._created_at: dict[str, float] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Operator:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stopping = True
        self._thread.join()
        self._ports.close()

    def _run(self) -> None:
        reconciled = -1
        while not self._stopping:
            with self._store.changed:
                for job in [] if self.down else self._store.all("tfjobs"):
                    with suppress(RefusedError):
                        self._reconcile(job)
                # The same version twice: there is nothing to do until the next event.
                if self._store.version() == reconciled:
                    self._store.changed.wait(RESYNC_SECONDS)
                reconciled = self._store.version()

    def _reconcile(self, job: Tree) -> None:
        meta, policy = job["metadata"], job["spec"]["runPolicy"]
        if meta.get("deletionTimestamp"):
            return
        if policy.get("suspend"):
            self._status(job, "Suspended", "TFJobSuspended", f"TFJob {meta['name']} is suspended.")
            return
        created_at = self._created_at.setdefault(meta["uid"], time.monotonic())
        if not is_finished(job):
            if time.monotonic() - created_at > policy.get("activeDeadlineSeconds", 10**9):
                self._status(job, "Failed", "DeadlineExceeded", "job was active too long")
            else:
                self._pods(job)
            return
        if policy.get("cleanPodPolicy", "Running") != "None":
            for pod in self._of(job):
                if pod["status"]["phase"] in ("Running", "Pending"):
                    self._clean(pod)
        if time.monotonic() - created_at > policy.get("ttlSecondsAfterFinished", 10**9):
            self._store.delete("tfjobs", meta["namespace"], meta["name"])

    def _pods(self, job: Tree) -> None:
        pods = {pod["metadata"]["name"]: pod for pod in self._of(job)}
        specs = job["spec"]["tfReplicaSpecs"]
        for role, spec in specs.items():
            for index in range(spec["replicas"]):
                name = f"{job['metadata']['name']}-{role.lower()}-{index}"
                if name not in pods:
                    self._create(job, role, index, name)
                    continue
                self._check(job, pods[name], spec["restartPolicy"])
        # The condition is written with the first status, for which all pods have to be made.
        self._status(job, "Created")
        role = "chief" if "Chief" in specs else "worker"
        leader = pods.get(f"{job['metadata']['name']}-{role}-0")
        if leader and leader["status"]["phase"] == "Succeeded":
            self._status(job, "Succeeded")

    def _check(self, job: Tree, pod: Tree, policy: str) -> None:
        if pod["status"]["phase"] == "Running":
            self._status(job, "Running")
        if pod["status"]["phase"] != "Failed" or pod["metadata"].get("deletionTimestamp"):
            return
        if policy == "ExitCode" and exit_code(pod) >= 128:
            self._status(job, "Restarting")
            self._delete(pod)
        else:
            message = f"{pod['metadata']['name']} failed with exit code {exit_code(pod)}"
            self._status(job, "Failed", "TFJobFailed", message)

    def _create(self, job: Tree, role: str, index: int, name: str) -> None:
        template = json.loads(json.dumps(job["spec"]["tfReplicaSpecs"][role]["template"]))
        labels = {
            JOB_NAME: job["metadata"]["name"],
            "training.kubeflow.org/replica-type": role.lower(),
            "training.kubeflow.org/replica-index": str(index),
        }
        restart = job["spec"]["tfReplicaSpecs"][role]["restartPolicy"]
        spec = template["spec"] | {"restartPolicy": "Never" if restart == "ExitCode" else restart}
        tf_config = self._tf_config(job, role, index)
        if tf_config:
            spec["containers"][0].setdefault("env", []).append(
                {"name": "TF_CONFIG", "value": tf_config}
            )
        owner = {
            "apiVersion": "kubeflow.org/v1",
            "kind": "TFJob",
            "name": job["metadata"]["name"],
            "uid": job["metadata"]["uid"],
            "controller": True,
        }
        metadata = template.get("metadata", {})
        metadata["labels"] = {**metadata.get("labels", {}), **labels}
        metadata |= {"name": name, "ownerReferences": [owner]}
        self._serve(job, name, labels, owner)
        pod = {"metadata": metadata, "spec": spec, "status": {"phase": "Pending"}}
        try:
            self._store.create("pods", job["metadata"]["namespace"], pod)
        except RefusedError as error:
            events.warn(self._store, job, "FailedCreatePod", f"Error creating: {error}")
            raise

    def _serve(self, job: Tree, name: str, labels: Tree, owner: Tree) -> None:
        """Create the headless Service of a pod; it stays when the pod is replaced."""
        metadata = {"name": name, "labels": labels, "ownerReferences": [owner]}
        service = {"metadata": metadata, "spec": {"clusterIP": "None", "selector": labels}}
        with suppress(RefusedError):
            self._store.create("services", job["metadata"]["namespace"], service)

    def _tf_config(self, job: Tree, role: str, index: int) -> str:
        name = job["metadata"]["name"]
        specs = job["spec"]["tfReplicaSpecs"]
        if sum(spec["replicas"] for spec in specs.values()) == 1:
            return ""
        cluster = {
            kind.lower(): [
                f"{host_of(pod, job['metadata']['namespace'])}:{self._port(pod)}"
                for pod in (f"{name}-{kind.lower()}-{i}" for i in range(spec["replicas"]))
            ]
            for kind, spec in specs.items()
        }
        task = {"type": role.lower(), "index": index}
        return json.dumps({"cluster": cluster, "task": task, "environment": "cloud"})

    def _port(self, name: str) -> int:
        """Return the port of a pod and of its replacements: all share one machine."""
        if name not in self._addresses:
            holder = self._ports.enter_context(socket.socket())
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("127.0.0.1", 0))
            self._addresses[name] = holder.getsockname()[1]
        return self._addresses[name]

    def _of(self, job: Tree) -> list[Tree]:
        uid = job["metadata"]["uid"]
        pods = self._store.all("pods", job["metadata"]["namespace"])
        return [p for p in pods if p["metadata"].get("ownerReferences", [{}])[0].get("uid") == uid]

    def _clean(self, pod: Tree) -> None:
        """Delete a pod and its Service."""
        self._delete(pod)
        meta = pod["metadata"]
        self._store.remove("services", meta["namespace"], meta["name"])

    def _delete(self, pod: Tree) -> None:
        meta = pod["metadata"]
        self._store.delete("pods", meta["namespace"], meta["name"], meta["uid"])

    def _status(self, job: Tree, kind: str, *more: str) -> None:
        meta = job["metadata"]

        def by(tree: Any) -> None:
            condition(tree, kind, *more)

        self._store.change("tfjobs", meta["namespace"], meta["name"], by)

"""What the training operator 1.9 does with a TFJob, as far as a launcher can see it.

Pods by role and index with labels and TF_CONFIG (the evaluator in it, and none where the job has
one task); restarts by `ExitCode`; the end of the job by the chief or worker 0; `cleanPodPolicy`,
`activeDeadlineSeconds`, `ttlSecondsAfterFinished` and `suspend`.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import ExitStack, suppress
from typing import Any

from tests.kubernetes.store import RefusedError, Store, Tree, now

JOB_NAME = "training.kubeflow.org/job-name"
LOOK_SECONDS = 0.2


def exit_code(pod: Tree) -> int:
    """Return the exit code that the operator sees; 0xbeef where no container has one."""
    for status in pod.get("status", {}).get("containerStatuses", []):
        ended = status["state"].get("terminated")
        if status["name"] == "tensorflow" and ended:
            return int(ended["exitCode"])
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


def ended(job: Tree) -> bool:
    kinds = [each["type"] for each in job.get("status", {}).get("conditions", [])]
    return "Succeeded" in kinds or "Failed" in kinds


class Operator:
    """Keeps pods and status of all jobs as they should be, in a thread of its own."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._ports = ExitStack()
        self._taken: dict[str, int] = {}
        self._stopping = False
        self._born: dict[str, float] = {}
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Operator:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stopping = True
        self._thread.join()
        self._ports.close()

    def _work(self) -> None:
        seen = -1
        while not self._stopping:
            with self._store.changed:
                for job in self._store.all("tfjobs"):
                    with suppress(RefusedError):
                        self._reconcile(job)
                # Twice the same version: nothing is left to be done until something happens.
                if self._store.version() == seen:
                    self._store.changed.wait(LOOK_SECONDS)
                seen = self._store.version()

    def _reconcile(self, job: Tree) -> None:
        meta, policy = job["metadata"], job["spec"]["runPolicy"]
        if meta.get("deletionTimestamp") or policy.get("suspend"):
            return
        born = self._born.setdefault(meta["uid"], time.monotonic())
        if not ended(job):
            if time.monotonic() - born > policy.get("activeDeadlineSeconds", 10**9):
                self._status(job, "Failed", "DeadlineExceeded", "job was active too long")
            else:
                self._pods(job)
            return
        if policy.get("cleanPodPolicy", "Running") != "None":
            for pod in self._of(job):
                if pod["status"]["phase"] in ("Running", "Pending"):
                    self._delete(pod)
        if time.monotonic() - born > policy.get("ttlSecondsAfterFinished", 10**9):
            self._store.delete("tfjobs", meta["namespace"], meta["name"])

    def _pods(self, job: Tree) -> None:
        there = {pod["metadata"]["name"]: pod for pod in self._of(job)}
        specs = job["spec"]["tfReplicaSpecs"]
        self._status(job, "Created")
        for role, spec in specs.items():
            for index in range(spec["replicas"]):
                name = f"{job['metadata']['name']}-{role.lower()}-{index}"
                if name not in there:
                    self._create(job, role, index, name)
                    continue
                self._judge(job, there[name], spec["restartPolicy"])
        leads = "chief" if "Chief" in specs else "worker"
        leader = there.get(f"{job['metadata']['name']}-{leads}-0")
        if leader and leader["status"]["phase"] == "Succeeded":
            self._status(job, "Succeeded")

    def _judge(self, job: Tree, pod: Tree, policy: str) -> None:
        if pod["status"]["phase"] == "Running":
            self._status(job, "Running")
        if pod["status"]["phase"] != "Failed" or pod["metadata"].get("deletionTimestamp"):
            return
        if policy == "ExitCode" and exit_code(pod) >= 128:
            self._status(job, "Restarting")
            self._delete(pod)
        else:
            words = f"{pod['metadata']['name']} failed with exit code {exit_code(pod)}"
            self._status(job, "Failed", "TFJobFailed", words)

    def _create(self, job: Tree, role: str, index: int, name: str) -> None:
        template = json.loads(json.dumps(job["spec"]["tfReplicaSpecs"][role]["template"]))
        labels = {
            JOB_NAME: job["metadata"]["name"],
            "training.kubeflow.org/replica-type": role.lower(),
            "training.kubeflow.org/replica-index": str(index),
        }
        restart = job["spec"]["tfReplicaSpecs"][role]["restartPolicy"]
        spec = template["spec"] | {"restartPolicy": "Never" if restart == "ExitCode" else restart}
        config = self._tf_config(job, role, index)
        if config:
            spec["containers"][0].setdefault("env", []).append(
                {"name": "TF_CONFIG", "value": config}
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
        pod = {"metadata": metadata, "spec": spec, "status": {"phase": "Pending"}}
        self._store.create("pods", job["metadata"]["namespace"], pod)

    def _tf_config(self, job: Tree, role: str, index: int) -> str:
        name = job["metadata"]["name"]
        specs = job["spec"]["tfReplicaSpecs"]
        if sum(spec["replicas"] for spec in specs.values()) == 1:
            return ""
        cluster = {
            kind.lower(): [
                f"127.0.0.1:{self._port(f'{name}-{kind.lower()}-{i}')}"
                for i in range(spec["replicas"])
            ]
            for kind, spec in specs.items()
        }
        task = {"type": role.lower(), "index": index}
        return json.dumps({"cluster": cluster, "task": task, "environment": "cloud"})

    def _port(self, name: str) -> int:
        """Return the port of a pod; a pod that is made again has its old address."""
        if name not in self._taken:
            holder = self._ports.enter_context(socket.socket())
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("127.0.0.1", 0))
            self._taken[name] = holder.getsockname()[1]
        return self._taken[name]

    def _of(self, job: Tree) -> list[Tree]:
        uid = job["metadata"]["uid"]
        pods = self._store.all("pods", job["metadata"]["namespace"])
        return [p for p in pods if p["metadata"].get("ownerReferences", [{}])[0].get("uid") == uid]

    def _delete(self, pod: Tree) -> None:
        meta = pod["metadata"]
        self._store.delete("pods", meta["namespace"], meta["name"], meta["uid"])

    def _status(self, job: Tree, kind: str, *words: str) -> None:
        meta = job["metadata"]

        def by(tree: Any) -> None:
            condition(tree, kind, *words)

        self._store.change("tfjobs", meta["namespace"], meta["name"], by)

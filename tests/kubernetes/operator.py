"""The part of training operator 1.9.4 that a launcher can observe.

The operator creates pods by role and index, with labels and TF_CONFIG. TF_CONFIG includes the
evaluator, and is omitted if the job has only one task. Failed pods are replaced according to the
restart policy. The job ends with the chief or worker 0, and fails if a pod has failed; a running
pod that is being deleted counts as failed. The operator also applies `cleanPodPolicy`,
`activeDeadlineSeconds`, `ttlSecondsAfterFinished` and `suspend`.
"""

from __future__ import annotations

import json
from contextlib import ExitStack, suppress
from typing import Any

from tests.kubernetes import events
from tests.kubernetes.conditions import condition, is_finished, is_true, message_of, seconds_since
from tests.kubernetes.network import host_of
from tests.kubernetes.reconciler import Reconciler
from tests.kubernetes.store import RefusedError, Store, Tree, now
from tests.ports import held_port

JOB_NAME = "training.kubeflow.org/job-name"
REPLICA_INDEX = "training.kubeflow.org/replica-index"
# Order in which the operator checks roles: its message names the first role that failed.
ORDER = ("Chief", "Evaluator", "PS", "Worker")


def exit_code(pod: Tree) -> int:
    """Return the exit code that the operator sees: 0xbeef if no container has one."""
    for status in pod.get("status", {}).get("containerStatuses", []):
        terminated = status["state"].get("terminated")
        if status["name"] == "tensorflow" and terminated:
            return int(terminated["exitCode"])
    return 0xBEEF


class Operator(Reconciler):
    """Reconciles the pods and status of all TFJobs."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._ports = ExitStack()
        self._addresses: dict[str, int] = {}

    def __exit__(self, *_error: object) -> None:
        super().__exit__()
        self._ports.close()

    def reconcile(self) -> None:
        for job in self._store.all("tfjobs"):
            with suppress(RefusedError):
                self._reconcile(job)

    def _reconcile(self, job: Tree) -> None:
        meta, policy = job["metadata"], job["spec"]["runPolicy"]
        if meta.get("deletionTimestamp"):
            return
        status = job.setdefault("status", {})
        condition(job, "Created", message=f"TFJob {meta['name']} is created.")
        if is_finished(job):
            self._clean_up(job)
        elif policy.get("suspend"):
            self._suspend(job)
        elif seconds_since(status.get("startTime")) >= policy.get("activeDeadlineSeconds", 10**9):
            status.setdefault("completionTime", now())
            words = "has failed because it was active longer than specified deadline"
            condition(job, "Failed", message=f"Job {meta['name']} {words}")
        else:
            if is_true(job, "Suspended"):
                condition(job, "Suspended", "TFJobResumed", status="False")
                status["startTime"] = now()
            self._count(job, self._pods(job))
        self._store.change(
            "tfjobs", meta["namespace"], meta["name"], lambda tree: tree.update(status=status)
        )

    def _clean_up(self, job: Tree) -> None:
        """Delete a finished job's pods according to its policy, and the job after its TTL."""
        policy, status, meta = job["spec"]["runPolicy"], job["status"], job["metadata"]
        clean = policy.get("cleanPodPolicy", "None")
        for pod in self._of(job):
            if clean == "All" or (clean == "Running" and _is_active(pod)):
                self._clean(pod)
        ended = status.get("completionTime")
        if ended and seconds_since(ended) > policy.get("ttlSecondsAfterFinished", 10**9):
            self._store.delete("tfjobs", meta["namespace"], meta["name"])

    def _suspend(self, job: Tree) -> None:
        for pod in self._of(job):
            self._clean(pod)
        if is_true(job, "Running"):
            condition(job, "Running", "TFJobSuspended", status="False")
        condition(job, "Suspended", message=f"TFJob {job['metadata']['name']} is suspended.")

    def _pods(self, job: Tree) -> dict[str, list[Tree]]:
        found = {pod["metadata"]["name"]: pod for pod in self._of(job)}
        by_role: dict[str, list[Tree]] = {}
        for role, spec in job["spec"]["tfReplicaSpecs"].items():
            by_role[role] = []
            for index in range(spec["replicas"]):
                name = f"{job['metadata']['name']}-{role.lower()}-{index}"
                if name in found:
                    by_role[role].append(found[name])
                    self._replace(job, role, found[name], spec["restartPolicy"])
                else:
                    self._create(job, role, index, name)
        return by_role

    def _replace(self, job: Tree, role: str, pod: Tree, policy: str) -> None:
        if pod["status"]["phase"] != "Failed":
            return
        name = job["metadata"]["name"]
        if policy in ("OnFailure", "Always") or (policy == "ExitCode" and exit_code(pod) >= 128):
            self._delete(pod)
            words = f"job {name} is restarting because {role} replica(s) failed."
            condition(job, "Restarting", message=words)
        elif policy == "ExitCode":
            words = f'job "{name}" is failing because "{role}" replica(s) failed.'
            condition(job, "Failed", message=words)

    def _count(self, job: Tree, pods: dict[str, list[Tree]]) -> None:
        status, meta = job["status"], job["metadata"]
        status.setdefault("startTime", now())
        title = f"TFJob {meta['namespace']}/{meta['name']}"
        restarting = message_of(job, "Restarting")
        leader = "Chief" if "Chief" in pods else "Worker"
        counts = status["replicaStatuses"] = {role: _counts(pods[role]) for role in pods}
        for role in (each for each in ORDER if each in pods):
            succeeded = counts[role].get("succeeded") == job["spec"]["tfReplicaSpecs"][role][
                "replicas"
            ] or (leader == "Worker" and _is_done(pods[role]))
            if role == leader and succeeded:
                status.setdefault("completionTime", now())
                condition(job, "Succeeded", message=f"{title} successfully completed.")
            elif role == leader and counts[role].get("active"):
                condition(job, "Running", message=f"{title} is running.")
            failed = counts[role].get("failed")
            if failed and restarting:
                # A restarting job does not fail. The condition Running has replaced Restarting, so
                # set it again.
                condition(job, "Restarting", message=restarting)
            elif failed:
                status.setdefault("completionTime", now())
                words = f"has failed because {failed} {role} replica(s) failed."
                condition(job, "Failed", message=f"{title} {words}")

    def _create(self, job: Tree, role: str, index: int, name: str) -> None:
        template = json.loads(json.dumps(job["spec"]["tfReplicaSpecs"][role]["template"]))
        labels = {
            JOB_NAME: job["metadata"]["name"],
            "training.kubeflow.org/replica-type": role.lower(),
            REPLICA_INDEX: str(index),
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
        """Create a pod's headless Service; a replacement of the pod uses the same one."""
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
                f"{host_of(pod, job['metadata']['namespace'])}:{self.port(pod)}"
                for pod in (f"{name}-{kind.lower()}-{i}" for i in range(spec["replicas"]))
            ]
            for kind, spec in specs.items()
        }
        task = {"type": role.lower(), "index": index}
        return json.dumps({"cluster": cluster, "task": task, "environment": "cloud"})

    def port(self, name: str) -> int:
        """Return the port of a pod and its replacements; all pods share this machine's address."""
        if name not in self._addresses:
            self._addresses[name] = self._ports.enter_context(held_port())
        return self._addresses[name]

    def _of(self, job: Tree) -> list[Tree]:
        uid = job["metadata"]["uid"]
        pods = self._store.all("pods", job["metadata"]["namespace"])
        return [p for p in pods if p["metadata"].get("ownerReferences", [{}])[0].get("uid") == uid]

    def _clean(self, pod: Tree) -> None:
        self._delete(pod)
        meta = pod["metadata"]
        self._store.remove("services", meta["namespace"], meta["name"])

    def _delete(self, pod: Tree) -> None:
        meta = pod["metadata"]
        if not meta.get("deletionTimestamp"):
            self._store.delete("pods", meta["namespace"], meta["name"], meta["uid"])


def _is_active(pod: Tree) -> bool:
    return pod["status"]["phase"] in ("Running", "Pending")


def _is_done(pods: list[Tree]) -> bool:
    """Return whether the first replica has succeeded; it may be missing while it is replaced."""
    first = [pod for pod in pods if pod["metadata"]["labels"][REPLICA_INDEX] == "0"]
    return any(pod["status"]["phase"] == "Succeeded" for pod in first)


def _counts(pods: list[Tree]) -> dict[str, Any]:
    """Count active, succeeded and failed pods; counts of 0 are omitted."""
    counts: dict[str, int] = {}
    for pod in pods:
        phase = pod["status"]["phase"]
        ending = phase == "Running" and pod["metadata"].get("deletionTimestamp")
        names = {"Running": "active", "Succeeded": "succeeded", "Failed": "failed"}
        name = "failed" if ending else names.get(phase)
        if name:
            counts[name] = counts.get(name, 0) + 1
    return counts

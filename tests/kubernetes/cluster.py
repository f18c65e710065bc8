"""A fake cluster for tests: an API server, an operator, and optionally a kubelet."""

import json
import signal
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from flotilla.components.kubernetes import names
from flotilla.components.kubernetes.heartbeat import is_renewed, read_heartbeat
from flotilla.trainer.events import JOB, Event, to_tree
from tests.kubernetes import events, jobset_api, jobset_controller, pods, rbac
from tests.kubernetes.containers import Addresses
from tests.kubernetes.job_controller import ENDED, JobController
from tests.kubernetes.jobset_controller import JobSetController
from tests.kubernetes.kubelet import Kubelet
from tests.kubernetes.network import Network
from tests.kubernetes.operator import Operator
from tests.kubernetes.server import Server
from tests.kubernetes.store import Store, Tree

NAMESPACE = "models"
# The service account of a job's tasks, and its token.
TRAINER, TRAINER_TOKEN = f"system:serviceaccount:{NAMESPACE}:flotilla-trainer", "a-pods-token"


class Cluster:
    """A fake cluster; without a kubelet, the test sets the states of pods."""

    def __init__(self, server: Server, operator: Operator, kubeconfig: Path) -> None:
        self.server = server
        self.operator = operator
        self.store: Store = server.store
        self.faults = server.faults
        self.kubeconfig = kubeconfig
        self.job_controller = JobController(self.store)
        self.jobset_controller = JobSetController(self.store)
        self.jobset_controller.down = True
        self.kubelet: Kubelet | None = None
        self.network: Network | None = None

    def install_operator(self, replicas: int = 1) -> None:
        """Create the operator's deployment, or scale it."""
        name, place = "training-operator", "kubeflow"
        status = {"readyReplicas": replicas} if replicas else {}
        if not self.store.all("deployments", place):
            labels = {"control-plane": "kubeflow-training-operator"}
            self.store.create("deployments", place, {"metadata": {"name": name, "labels": labels}})
        self.store.change("deployments", place, name, lambda tree: tree.update(status=status))
        self.operator.down = not replicas

    def install_jobset(
        self, version: str = "v0.12.0", replicas: int = 1, lacks: Iterable[str] = ()
    ) -> None:
        """Serve JobSets without the fields in `lacks`, and start or stop their controller."""
        name, place = "jobset-controller-manager", "jobset-system"
        parts = {"name": "jobset", "instance": "jobset", "component": "manager"}
        labels = {f"app.kubernetes.io/{key}": value for key, value in parts.items()}
        labels |= {
            "app.kubernetes.io/created-by": "jobset",
            "app.kubernetes.io/part-of": "jobset",
            "app.kubernetes.io/managed-by": "kustomize",
            "control-plane": "controller-manager",
        }
        image = f"jobset/jobset:{version}"
        template = {"spec": {"containers": [{"name": "manager", "image": image}]}}
        with self.store.changed:
            if not self.store.all("deployments", place):
                tree = {
                    "metadata": {"name": name, "labels": labels},
                    "spec": {"template": template},
                }
                self.store.create("deployments", place, tree)
            status = {"readyReplicas": replicas} if replicas else {}
            self.store.change(
                "deployments",
                place,
                name,
                lambda tree: tree.update(status=status, spec={"template": template}),
            )
            self.server.control.kinds |= jobset_api.KINDS
            self.server.control.jobsets.install(is_away=not replicas, lacks=lacks)
            self.jobset_controller.down = not replicas

    def jobsets(self) -> list[Tree]:
        return self.store.all("jobsets", NAMESPACE)

    def jobset(self) -> Tree:
        found: list[Tree] = self.store.wait(self.jobsets)
        return found[0]

    def child_jobs(self) -> dict[str, Tree]:
        return {task_of(job): job for job in self.store.all("jobs", NAMESPACE)}

    def pods_of(self, task: str) -> list[Tree]:
        """Return all pods of a task, including those that have ended, oldest first."""
        found = self.store.all("pods", NAMESPACE)
        return [pod for pod in found if task_of(pod) == task]

    def leases(self) -> list[Tree]:
        return self.store.all("leases", NAMESPACE)

    def stop_is_asked(self) -> bool:
        asked = [*self.leases(), *self.jobs(), *self.jobsets()]
        return any(names.STOP in (each["metadata"].get("annotations") or {}) for each in asked)

    def jobs(self) -> list[Tree]:
        return self.store.all("tfjobs", NAMESPACE)

    def job(self) -> Tree:
        found: list[Tree] = self.store.wait(self.jobs)
        return found[0]

    def wait_until_deleted(self) -> None:
        kinds = ("tfjobs", "jobsets", "jobs", "pods")
        self.store.wait(lambda: not any(self.store.all(kind, NAMESPACE) for kind in kinds))

    def of_jobs(self) -> list[Tree]:
        kinds = ("tfjobs", "jobsets", "jobs", "pods", "services", "leases", "networkpolicies")
        return [each for kind in kinds for each in self.store.all(kind, NAMESPACE)]

    def suspend(self, job: Tree, is_suspended: bool) -> None:
        is_tfjob = "tfReplicaSpecs" in job["spec"]

        def change(tree: Tree) -> None:
            spec = tree["spec"]["runPolicy"] if is_tfjob else tree["spec"]
            spec["suspend"] = is_suspended

        kind = "tfjobs" if is_tfjob else "jobsets"
        self.store.change(kind, NAMESPACE, job["metadata"]["name"], change)

    def pods(self) -> dict[str, Tree]:
        """Return one pod per task, by names such as `worker-0`.

        If a task has several pods, the newest running pod is returned, or the newest pod if none is
        running.
        """
        found: dict[str, Tree] = {}
        for pod in self.store.all("pods", NAMESPACE):
            before = found.get(task_of(pod))
            if before is None or _is_alive(pod) or not _is_alive(before):
                found[task_of(pod)] = pod
        return found

    def pod(self, task: str, but: str = "") -> Tree:
        """Wait until a task has a pod whose UID is not `but`, and return the pod."""

        def found() -> Tree | None:
            pod = self.pods().get(task)
            return pod if pod and pod["metadata"]["uid"] != but else None

        tree: Tree = self.store.wait(found)
        return tree

    def all_pods(self) -> dict[str, Tree]:
        self.store.wait(lambda: self.jobs() or self.jobsets())
        if self.jobsets():
            roles = self.jobset()["spec"]["replicatedJobs"]
        else:
            roles = list(self.job()["spec"]["tfReplicaSpecs"].values())
        count = sum(each["replicas"] for each in roles)
        self.store.wait(lambda: len(self.pods()) == count)
        return self.pods()

    def wait_watched(self, *kinds: str, times: int = 1) -> None:
        """Wait until each kind (default: TFJobs and pods) has been watched this many times."""
        for kind in kinds or ("tfjobs", "pods"):

            def watched(kind: str = f"{kind}?") -> bool:
                begun = [each for each in self.server.requests if kind in each and "watch=" in each]
                return len(begun) >= times

            self.store.wait(watched)

    def wait_followed(self, task: str) -> None:
        """Wait until a client has started to read the log of a task's newest pod."""
        self.store.wait(
            lambda: (
                (pods := self.pods_of(task))
                and self.server.logs.is_asked(pods[-1]["metadata"]["uid"])
            )
        )

    def wait_renewed(self, but: str = "") -> str:
        def found() -> str:
            for lease in self.leases():
                beat = read_heartbeat(lease)
                # The holder's ID changes when another launcher renews the lease.
                if is_renewed(lease) and beat.partition(" ")[0] != but.partition(" ")[0]:
                    return beat
            return ""

        return str(self.store.wait(found))

    def run_all(self) -> dict[str, Tree]:
        for pod in self.all_pods().values():
            pods.running(self.store, pod)
        return self.pods()

    def write_log(self, task: str, *lines: str) -> None:
        uid = self.pod(task)["metadata"]["uid"]
        for line in lines:
            self.server.logs.write(uid, 0, line)

    def write_event(self, task: str, event: Event) -> str:
        """Append an event to a task's log, as the task's process does, and return the line."""
        [container] = self.pod(task)["spec"]["containers"]
        job = next(each["value"] for each in container["env"] if each["name"] == JOB)
        line = f"2026-01-01 00:00:00,000 INFO {json.dumps({**to_tree(event), 'job': job})}"
        self.write_log(task, line)
        return line

    def finish(self, task: str, code: int, message: str = "", reason: str = "") -> Tree:
        return self._finish(self.pod(task), code, message, reason)

    def _finish(self, pod: Tree, code: int, message: str = "", reason: str = "") -> Tree:
        self.server.logs.end(pod["metadata"]["uid"], 0)
        return pods.finished(self.store, pod, code, message, reason)

    def kill(self, task: str, number: int = signal.SIGKILL, reason: str = "") -> Tree:
        """Send a signal to a task's processes, and return its pod."""
        assert self.kubelet
        pod = self.pod(task)
        self.kubelet.kill(NAMESPACE, pod["metadata"]["name"], number, reason)
        return pod

    def take_away(self, task: str, reason: str = "", grace: int | None = None) -> Tree:
        """Delete a task's pod. Set `reason` if Kubernetes itself disrupts the pod, not a user."""
        with self.store.changed:
            pod = self.pod(task)
            if reason:
                pods.disrupted(self.store, pod, reason)
            meta = pod["metadata"]
            self.store.delete("pods", NAMESPACE, meta["name"], meta["uid"], grace)
        return pod

    def end_deleted(self, codes: Mapping[str, int] | None = None) -> None:
        """End the pods that are being deleted; `codes` maps tasks to exit codes (default: 143)."""
        for pod in self.store.all("pods", NAMESPACE):
            if pod["metadata"].get("deletionTimestamp"):
                if pod["status"]["phase"] == "Running":
                    self._finish(pod, (codes or {}).get(task_of(pod), 143))
                self.store.remove("pods", NAMESPACE, pod["metadata"]["name"])

    def event(self, involved: str, reason: str, message: str) -> None:
        kinds = ("tfjobs", "jobsets", "jobs", "pods")
        objects = [each for kind in kinds for each in self.store.all(kind, NAMESPACE)]
        [found] = [each for each in objects if each["metadata"]["name"] == involved]
        events.warn(self.store, found, reason, message)


def tfjob(
    name: str = "job",
    roles: Mapping[str, int] | None = None,
    restart: str = "ExitCode",
    **policy: object,
) -> Tree:
    """Return a TFJob whose tasks do nothing."""
    roles = roles or {"Chief": 1, "PS": 1, "Worker": 2}
    template = {"spec": {"containers": [{"name": "tensorflow", "command": ["true"]}]}}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "TFJob",
        "metadata": {"name": name, "labels": {"run": "r"}},
        "spec": {
            "runPolicy": policy,
            "tfReplicaSpecs": {
                role: {"replicas": count, "restartPolicy": restart, "template": template}
                for role, count in roles.items()
            },
        },
    }


def jobset(
    name: str = "a",
    roles: Mapping[str, int] | None = None,
    job: Mapping[str, object] | None = None,
    pod: Mapping[str, object] | None = None,
    **spec: object,
) -> Tree:
    """Return a JobSet whose tasks do nothing, and which is complete when its chief ends."""
    container = {"name": "tensorflow", "command": ["true"]}
    pods_spec = {"containers": [container], "restartPolicy": "Never", **(pod or {})}
    template = {"spec": {"completions": 1, "parallelism": 1, "template": {"spec": pods_spec}}}
    template["spec"] |= job or {}
    roles = roles or {"chief": 1, "ps": 1, "worker": 2}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, "labels": {"run": "r"}},
        "spec": {
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["chief"]},
            "replicatedJobs": [
                {"name": role, "replicas": count, "template": json.loads(json.dumps(template))}
                for role, count in roles.items()
            ],
            **spec,
        },
    }


def task_of(tree: Tree) -> str:
    """Return the task of a pod or Job, such as `worker-0`."""
    meta = tree["metadata"]
    labels = meta.get("labels") or {}
    if jobset_controller.ROLE in labels:
        return f"{labels[jobset_controller.ROLE]}-{labels[jobset_controller.JOB_INDEX]}"
    return "-".join(meta["name"].rsplit("-", 2)[1:])


def _is_alive(pod: Tree) -> bool:
    is_going = bool(pod["metadata"].get("deletionTimestamp"))
    return not is_going and pod["status"].get("phase") not in ENDED


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Yield a cluster whose pods have the states that the test sets."""
    with Server() as server, Operator(server.store) as operator:
        made = Cluster(server, operator, kubeconfig(folder, server.url))
        with made.job_controller, made.jobset_controller:
            yield made


@contextmanager
def real_cluster(
    folder: Path, secrets: Mapping[str, Mapping[str, str]] | None = None
) -> Iterator[Cluster]:
    """Yield a cluster that runs the command of every pod as a local process."""
    with Server() as server, Network(server.store) as network:
        operator = Operator(server.store)
        made = Cluster(server, operator, kubeconfig(folder, server.url))
        control = server.control
        control.users[TRAINER_TOKEN] = TRAINER
        control.granted = {
            control.user: rbac.grants(rbac.LAUNCHER),
            TRAINER: rbac.grants(rbac.TRAINER),
        }
        in_pods = kubeconfig(folder / "pods", server.url, TRAINER_TOKEN)
        environment = {"KUBECONFIG": str(in_pods), **network.environment}
        kubelet = Kubelet(server.store, server.logs, folder / "pods", environment, secrets or {})
        kubelet.node.addresses = Addresses(network.ports)
        kubelet.node.addresses.of_tfjobs = operator.port
        made.kubelet, made.network = kubelet, network
        with operator, made.job_controller, made.jobset_controller, kubelet:
            yield made


def shared(folder: Path) -> str:
    """Return the setting for a shared folder; local processes need no actual volume."""
    volume = {"name": "shared", "mount_path": str(folder), "source": {"emptyDir": {}}}
    return f"cluster.kubernetes.pod.volumes={json.dumps([volume])}"


def kubeconfig(folder: Path, url: str, token: str = "a-token") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "kubeconfig"
    tree = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "contexts": [
            {"name": "test", "context": {"cluster": "c", "user": "u", "namespace": NAMESPACE}}
        ],
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": token}}],
    }
    path.write_text(json.dumps(tree), encoding="utf-8")
    return path

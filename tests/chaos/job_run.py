"""Runs a pipeline that trains as a job on the fake cluster, and injects faults into the job."""

import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flotilla.components.kubernetes import names
from tests.chaos.faults import MissedError
from tests.chaos.invariants import Outcome
from tests.chaos.job_plan import JobPlan
from tests.chaos.plan import Fault
from tests.chaos.run import Run, Say
from tests.chaos.stores import Store
from tests.kubernetes.cluster import NAMESPACE, Cluster, real_cluster
from tests.kubernetes.store import Tree
from tests.pipelines.called import processes_of

# Reasons in the `DisruptionTarget` condition of a deleted pod. `kubectl delete` sets no condition.
REASONS = {"delete": "", "evict": "EvictionByEvictionAPI", "preempt": "PreemptionByScheduler"}


class JobTarget:
    """The cluster of a run, and the process of its command line."""

    def __init__(
        self, kube: Cluster, launcher: str, workdir: Path, process: subprocess.Popen[bytes]
    ) -> None:
        self.kube, self.launcher = kube, launcher
        self.torn: set[str] = set()
        self._workdir, self._process = workdir, process
        self._outages: list[threading.Timer] = []

    def pod(self, task: str) -> Tree | None:
        """Return a task's pod, or None if it is not running or is being deleted."""
        pod = self.kube.pods().get(task)
        runs = pod and pod["status"]["phase"] == "Running"
        return pod if pod and runs and not pod["metadata"].get("deletionTimestamp") else None

    def cancel_run(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def kill_launcher(self) -> bool:
        """Kill the process of the training step; return whether it existed."""
        for process in processes_of(self._workdir):
            if "train_model" in process.cmdline():
                process.kill()
                return True
        return False

    def suspend(self) -> Callable[[], None] | None:
        with self.kube.store.changed:
            jobs = [job for job in self._jobs() if not job["metadata"].get("deletionTimestamp")]
            if not jobs:
                return None
            uid = jobs[0]["metadata"]["uid"]
            self._set_suspended(uid, True)
        return lambda: self._set_suspended(uid, False)

    def _jobs(self) -> list[Tree]:
        return self.kube.jobs() if self.launcher == "tfjob" else self.kube.jobsets()

    def _set_suspended(self, uid: str, is_suspended: bool) -> None:
        with self.kube.store.changed:
            for job in self._jobs():
                metadata = job["metadata"]
                # A cancelled job stays suspended.
                if metadata["uid"] == uid and names.STOP not in metadata.get("annotations", {}):
                    self.kube.suspend(job, is_suspended)

    def for_a_while(self, seconds: float, end: Callable[[], None]) -> None:
        """Call `end` after some seconds, or when the run ends."""
        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        self._outages.append(timer)

    def cancel(self) -> None:
        for timer in self._outages:
            if timer.is_alive():
                timer.cancel()
                timer.function()


def inject_into_job(fault: Fault, target: JobTarget) -> str:
    """Inject a fault and return a short description of its effect; raises `MissedError`."""
    if fault.task:
        with target.kube.store.changed:
            pod = target.pod(fault.task)
            if pod is None:
                raise MissedError(f"{fault.task} was not there")
            return _into_pod(fault, target.kube, pod)
    return OF_THE_RUN[fault.kind](fault, target)


def _into_pod(fault: Fault, kube: Cluster, pod: Tree) -> str:
    name = pod["metadata"]["name"]
    assert kube.kubelet
    if fault.kind == "kill":
        kube.kubelet.kill(NAMESPACE, name)
    elif fault.kind == "kill task":
        kube.kubelet.kill_task(NAMESPACE, name)
    elif fault.kind == "evict by node":
        kube.kubelet.evict(NAMESPACE, name, "The node was low on resource: memory.")
    elif fault.kind == "delete by force":
        kube.take_away(fault.task, grace=0)
    else:
        kube.take_away(fault.task, REASONS[fault.kind])
    return "done"


def _cancel(_fault: Fault, target: JobTarget) -> str:
    target.cancel_run()
    return "done"


def _kill_launcher(_fault: Fault, target: JobTarget) -> str:
    if not target.kill_launcher():
        raise MissedError("the launcher was not there")
    return "done"


def _api_outage(fault: Fault, target: JobTarget) -> str:
    target.kube.server.go_down()
    target.for_a_while(fault.seconds, target.kube.faults.clear)
    return "done"


def _controller_outage(fault: Fault, target: JobTarget) -> str:
    """Stop the controller and its webhook: jobs are not reconciled, and changes are rejected."""
    kube = target.kube

    def is_down(down: bool) -> None:
        if target.launcher == "jobset":
            kube.install_jobset(replicas=0 if down else 1)
        else:
            kube.operator.down = kube.server.control.is_webhook_silent = down

    is_down(True)
    target.for_a_while(fault.seconds, lambda: is_down(False))
    return "done"


def _suspend(fault: Fault, target: JobTarget) -> str:
    resume = target.suspend()
    if resume is None:
        raise MissedError("the job was not there")
    target.for_a_while(fault.seconds, resume)
    return "done"


OF_THE_RUN: dict[str, Callable[[Fault, JobTarget], str]] = {
    "cancel": _cancel,
    "kill launcher": _kill_launcher,
    "API outage": _api_outage,
    "controller outage": _controller_outage,
    "suspend": _suspend,
}


HARMLESS = ("API outage", "controller outage")


def run_job_plan(plan: JobPlan, folder: Path, say: Say, store: Store) -> Outcome:
    """Run a plan below `folder`, reusing the dataset of other runs there."""
    with real_cluster(folder / f"run-{plan.seed}" / "kubernetes") as kube:
        if plan.launcher == "jobset":
            kube.install_jobset()
        return _JobRun(plan, kube, folder, say, store).to_its_end()


class _JobRun(Run):
    def __init__(self, plan: JobPlan, kube: Cluster, folder: Path, say: Say, store: Store) -> None:
        super().__init__(plan, folder, say, store, {"KUBECONFIG": str(kube.kubeconfig)})
        self._kube, self._launcher = kube, plan.launcher
        self._found.most_failures = plan.most_failures
        self._resumable = (1, 130)

    def _aim(self, process: subprocess.Popen[bytes]) -> JobTarget:
        return JobTarget(self._kube, self._launcher, self._workdir, process)

    def _strike(self, fault: Fault, target: Any) -> str:
        self._found.cancels += fault.kind == "cancel"
        self._found.losses += fault.kind not in HARMLESS
        return inject_into_job(fault, target)

    def _left(self) -> list[str]:
        """Return what is left after the pods of a deleted job had time to save a checkpoint."""
        try:
            self._kube.store.wait(lambda: not self._kube.of_jobs())
        except AssertionError:
            return [f"{each['metadata']['name']} of the cluster" for each in self._kube.of_jobs()]
        assert self._kube.kubelet
        return [*super()._left(), *self._kube.kubelet.alive()]

"""Runs a pipeline that trains as a Kubernetes job on the fake cluster, and injects faults."""

import subprocess
from pathlib import Path
from typing import Any

from tests.chaos.invariants import Outcome
from tests.chaos.job_faults import JobTarget, inject_into_job
from tests.chaos.job_plan import JobPlan
from tests.chaos.plan import Fault
from tests.chaos.run import Run, Say
from tests.chaos.stores import Store
from tests.kubernetes.cluster import Cluster, real_cluster

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

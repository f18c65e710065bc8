"""The engines as the doctor examines them: what differs by engine, and which one is examined.

The launcher has no use for any of it: it submits a job and sees what becomes of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from components.image import DEFAULTS, PodDefaults
from components.jobset import manifest as jobset
from components.kubernetes import choice
from components.kubernetes.api.kinds import JobKind
from components.kubernetes.engine import Engine, document
from components.kubernetes.names import INDEX_LABELS, ROLE_LABELS, Tree
from components.launchers import ENGINES, engine
from components.tfjob import manifest as tfjob
from pipelines.doctor import versions
from pipelines.doctor.examination import Finding
from pipelines.doctor.kubernetes_api import SHOW, Kubernetes, unexpected
from trainer.config.cluster import Launcher
from trainer.config.schema import Config
from trainer.errors import ConfigError, UserError


@dataclass(frozen=True, kw_only=True)
class TaskRole:
    """The pods of one role: their number, and their template."""

    name: str
    count: int
    template: Tree


class ExaminedEngine(ABC):
    """What the doctor knows of an engine.

    Attributes:
        name: the value of `cluster.launcher`.
        kind: of its jobs.
        part: the program that acts on the jobs, with its versions.
        install: the command that installs it.
        word: the program, in a sentence.
        homes: the namespaces where its deployment usually is.
        selector: the label of its deployment, as released.
        marks: parts of the name, or of the image, of a deployment that was installed in another
            way.
        webhooks: parts of the name or of the address of its webhooks.
        sign: what a job has as soon as it is taken up.
        framework: its jobs in the settings of Kueue.
    """

    name: ClassVar[Launcher]
    kind: ClassVar[JobKind]
    part: ClassVar[versions.Part]
    install: ClassVar[str]
    word: ClassVar[str]
    homes: ClassVar[tuple[str, ...]]
    selector: ClassVar[str]
    marks: ClassVar[tuple[str, ...]]
    webhooks: ClassVar[tuple[str, ...]]
    sign: ClassVar[str]
    framework: ClassVar[str]

    @property
    def engine(self) -> Engine:
        """Return the engine itself."""
        return engine(self.name)

    def plan(self, config: Config, defaults: PodDefaults = DEFAULTS) -> PlannedJob:
        """Return the job that a run of `config` would make."""
        return PlannedJob(examined=self, tree=document(self.engine, config, defaults))

    @abstractmethod
    def roles(self, tree: Tree) -> list[TaskRole]:
        """Return the roles of a job."""

    @abstractmethod
    def labels(self, job: str, role: TaskRole) -> dict[str, str]:
        """Return the labels that the controller sets on the first pod of a role."""

    @abstractmethod
    def resumed(self, tree: Tree) -> Tree:
        """Return a job that does not ask to be suspended."""

    @abstractmethod
    def counts(self, tasks: int) -> Mapping[str, int]:
        """Return how many objects, but for pods, a job of so many tasks is, as quotas call them."""

    @abstractmethod
    def is_answered(self, tree: Tree) -> bool:
        """Return whether a job that the API would make was in the hands of the controller."""

    def priority_classes(self, _tree: Tree) -> Sequence[str]:
        """Return the classes of priority that a job names apart from its pods."""
        return ()


class _TFJobs(ExaminedEngine):
    name = tfjob.LAUNCHER
    kind = tfjob.KIND
    part = versions.OPERATOR
    install = (
        "kubectl apply --server-side --kustomize "
        "'github.com/kubeflow/training-operator.git/manifests/overlays/standalone"
        f"?ref=v{versions.OPERATOR.seen[-1]}'"
    )
    word = "operator"
    homes = ("kubeflow",)
    selector = "control-plane=kubeflow-training-operator"
    marks = ("training-operator",)
    webhooks = ("training-operator",)
    sign = "condition"
    # Kueue ships with it switched off.
    framework = "kubeflow.org/tfjob"

    def roles(self, tree: Tree) -> list[TaskRole]:
        return [
            TaskRole(name=name, count=each["replicas"], template=each["template"])
            for name, each in tree["spec"]["tfReplicaSpecs"].items()
        ]

    def labels(self, job: str, role: TaskRole) -> dict[str, str]:
        return {self.kind.label: job, ROLE_LABELS[0]: role.name.lower(), INDEX_LABELS[0]: "0"}

    def resumed(self, tree: Tree) -> Tree:
        policy = {**tree["spec"]["runPolicy"], "suspend": False}
        return {**tree, "spec": {**tree["spec"], "runPolicy": policy}}

    def counts(self, tasks: int) -> Mapping[str, int]:
        # The operator makes a service for every pod.
        return {"services": tasks}

    def is_answered(self, _tree: Tree) -> bool:
        # Its webhook judges and changes nothing.
        return False

    def priority_classes(self, tree: Tree) -> Sequence[str]:
        policy = tree["spec"]["runPolicy"].get("schedulingPolicy", {})
        return [policy["priorityClass"]] if "priorityClass" in policy else []


class _JobSets(ExaminedEngine):
    name = jobset.LAUNCHER
    kind = jobset.KIND
    part = versions.JOBSET
    install = (
        "kubectl apply --server-side --filename https://github.com/kubernetes-sigs/jobset/releases/"
        f"download/v{versions.JOBSET.seen[-1]}/manifests.yaml"
    )
    word = "JobSet controller"
    # The second one is that of Kubeflow Trainer, which brings JobSet.
    homes = ("jobset-system", "kubeflow-system")
    selector = "app.kubernetes.io/name=jobset"
    # Its releases before 0.11 have the image alone in common with it.
    marks = ("jobset-controller", "jobset/jobset")
    webhooks = ("jobset.kb.io", "jobset-webhook")
    sign = "status"
    # Kueue ships with it switched on.
    framework = "jobset.x-k8s.io/jobset"

    def roles(self, tree: Tree) -> list[TaskRole]:
        return [
            TaskRole(
                name=each["name"],
                count=each["replicas"],
                template=each["template"]["spec"]["template"],
            )
            for each in tree["spec"]["replicatedJobs"]
        ]

    def labels(self, job: str, role: TaskRole) -> dict[str, str]:
        child = f"{job}-{role.name}-0"
        return {
            self.kind.label: job,
            ROLE_LABELS[1]: role.name,
            INDEX_LABELS[1]: "0",
            "jobset.sigs.k8s.io/restart-attempt": "0",
            "batch.kubernetes.io/job-name": child,
            "job-name": child,
            "batch.kubernetes.io/job-completion-index": "0",
        }

    def resumed(self, tree: Tree) -> Tree:
        return {**tree, "spec": {**tree["spec"], "suspend": False}}

    def counts(self, tasks: int) -> Mapping[str, int]:
        # One headless service has the names of all pods.
        return {"services": 1, "jobs.batch": tasks}

    def is_answered(self, tree: Tree) -> bool:
        # Its webhook, which is in the controller, adds what no schema does and no launcher writes.
        return "startupPolicy" in tree.get("spec", {})


EXAMINED: Mapping[Launcher, ExaminedEngine] = {"tfjob": _TFJobs(), "jobset": _JobSets()}


@dataclass(frozen=True, kw_only=True)
class PlannedJob:
    """The job that a run would make."""

    examined: ExaminedEngine
    tree: Tree

    @property
    def name(self) -> str:
        """Return its name, which stands for that of a run."""
        return str(self.tree["metadata"]["name"])

    @property
    def roles(self) -> list[TaskRole]:
        """Return its roles."""
        return self.examined.roles(self.tree)


def is_on_kubernetes(config: Config) -> bool:
    """Return whether a run that is started here trains on Kubernetes."""
    launcher = config.cluster.launcher
    return launcher in ENGINES or (launcher == "auto" and choice.is_on_a_cluster())


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The engine to examine, or none, and what there is to say of it."""

    examined: ExaminedEngine | None
    finding: Finding


_HERE = (
    "a run that is started here trains on this machine, since neither a pod nor KUBECONFIG names a "
    "cluster"
)
IS_HERE = Finding(
    "ok", f"{_HERE}; in the pods of a KFP instance auto takes what its cluster has: --kubernetes"
)


def chosen(kubernetes: Kubernetes, config: Config) -> Choice:
    """Return the engine that `auto` takes on this cluster; the API is asked once for each."""
    absent: list[str] = []
    for name in ENGINES:
        examined = EXAMINED[name]
        kinds, resource = f"{examined.kind.kind}s", examined.kind.resource
        try:
            answer = kubernetes.get(f"{resource.path(kubernetes.namespace)}?limit=1")
            if answer.is_forbidden:
                # Kubernetes asks for the permission before it looks whether there is such a kind.
                served = kubernetes.get(f"/apis/{resource.api_version}")
                answer = served if served.is_missing else answer
        except UserError as error:
            return Choice(examined=None, finding=Finding("fail", str(error), SHOW))
        if answer.is_good or answer.is_forbidden:
            found = _accepted(config, examined, absent)
            return Choice(examined=examined, finding=found)
        if not answer.is_missing:
            show = f"kubectl get {resource.plural}.{resource.group}"
            found = unexpected(answer, f"whether the cluster serves {kinds}", show)
            return Choice(examined=None, finding=found)
        absent.append(kinds)
    message = f"the cluster serves neither {' nor '.join(absent)}: no engine is installed"
    return Choice(examined=None, finding=Finding("fail", message, EXAMINED[ENGINES[0]].install))


def _accepted(config: Config, examined: ExaminedEngine, absent: Sequence[str]) -> Finding:
    """Return which engine is taken and why, and what of the configuration is not one of it."""
    launcher = config.cluster.launcher
    but = f", and no {' and no '.join(absent)}" if absent else ""
    message = f"auto takes {examined.name}: the cluster serves {examined.kind.kind}s{but}"
    if launcher != "auto":
        return Finding("ok", f"cluster.launcher is {launcher}; {message}")
    try:
        examined.engine.check(config)
    except ConfigError as error:
        return Finding(
            "fail", f"{message}; {error}", "flotilla doctor --set cluster.launcher=tfjob"
        )
    if not choice.is_on_a_cluster():
        message = f"{message}; {_HERE}"
    return Finding("ok", message)

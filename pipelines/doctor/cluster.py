"""Checks of the cluster that runs the job: its API, namespace and engine, and their versions.

`docs/reference/versions.md` lists the versions with which Flotilla was tested.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus

import urllib3

from flotilla.components.image import DEFAULTS, PodDefaults
from flotilla.components.kubernetes import names
from flotilla.components.kubernetes.adoption import is_foreign
from flotilla.components.kubernetes.client import Api, RefusedError, UnreachableError, connect
from flotilla.components.kubernetes.engine import Engine, document
from flotilla.components.kubernetes.names import Tree
from flotilla.components.kubernetes.pods.template import replicas
from flotilla.components.kubernetes.requirements import describe_lack, needs_sidecars
from flotilla.components.launchers import ENGINES, engine, is_on_a_cluster
from flotilla.pipelines.doctor.examination import Finding
from flotilla.trainer.config.cluster import Launcher
from flotilla.trainer.config.schema import Config
from flotilla.trainer.runtime.errors import ConfigError

_NUMBER = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?")


@dataclass(frozen=True, kw_only=True)
class Part:
    """Software that Flotilla depends on: its oldest supported version and the tested versions."""

    name: str
    oldest: str = ""
    seen: tuple[str, ...]


KFP = Part(name="Kubeflow Pipelines", oldest="2.17", seen=("2.17.0",))
ARGO = Part(name="Argo Workflows", seen=("4.0.5",))
OPERATOR = Part(name="training operator", oldest="1.9", seen=("1.9.3", "1.9.4"))
# Before JobSet 0.9, pods lack a label that the engine needs: the uid of their JobSet.
JOBSET = Part(name="JobSet", oldest="0.9", seen=("0.12.0",))
KUBERNETES = Part(name="Kubernetes", seen=("1.33", "1.34"))
KUBECTL = Part(name="kubectl", oldest="1.27", seen=("1.32",))
PYTHON = Part(name="Python", oldest="3.11", seen=("3.11",))
TENSORFLOW = Part(name="TensorFlow", oldest="2.21", seen=("2.21.0",))
PARTS = (KFP, ARGO, OPERATOR, JOBSET, KUBERNETES, KUBECTL, PYTHON, TENSORFLOW)


def judge_version(part: Part, version: str, message: str, show: str = "") -> Finding:
    """Return the finding for a version of `part`: a warning if the version is too old."""
    number = _NUMBER.match(version)
    if not number:
        return Finding("ok", message)
    if part.oldest and _tuple(version) < _tuple(part.oldest):
        words = f"{message}; Flotilla requires {part.name} {part.oldest} or later"
        return Finding("warn", words, show)
    if any(_tuple(version)[: len(_tuple(each))] == _tuple(each) for each in part.seen):
        return Finding("ok", message)
    seen = ", ".join(part.seen)
    return Finding("ok", f"{message}; Flotilla was tested only with {seen}")


def _tuple(version: str) -> tuple[int, ...]:
    found = _NUMBER.match(version)
    return tuple(int(each) for each in found.groups() if each) if found else ()


TIMEOUT = urllib3.Timeout(connect=3, read=5)
SHOW = "kubectl cluster-info"
NODES = "/api/v1/nodes"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The Kubernetes API that this machine or pod is configured for, with short timeouts.

    Attributes:
        namespace: the namespace of the job.
        is_named: whether the namespace was given explicitly, not taken from the context.
    """

    api: Api
    host: str
    namespace: str
    is_named: bool

    @classmethod
    def connected(cls, namespace: str) -> Cluster:
        """Create a client without sending a request. Raises `UserError` if no API is configured."""
        connection = connect()
        name = namespace or connection.namespace
        return cls(
            api=Api(connection, name, timeout=TIMEOUT),
            host=str(connection.configuration.host),
            namespace=name,
            is_named=bool(namespace),
        )


@dataclass(frozen=True, kw_only=True)
class Role:
    """The pods of one role: their number and their template."""

    name: str
    count: int
    template: Tree

    @property
    def pod(self) -> Tree:
        """The specification of a pod."""
        found: Tree = self.template["spec"]
        return found

    @property
    def containers(self) -> list[Tree]:
        """All containers of a pod."""
        return [*self.pod.get("initContainers", []), *self.pod["containers"]]

    @property
    def resources(self) -> Tree:
        """The resources of the pod's first container."""
        found: Tree = self.pod["containers"][0].get("resources", {})
        return found


@dataclass(frozen=True, kw_only=True)
class PlannedJob:
    """The job that a run would create. Its name is a placeholder."""

    engine: Engine
    tree: Tree
    roles: Sequence[Role]

    @property
    def name(self) -> str:
        """The name of the job."""
        return str(self.tree["metadata"]["name"])


def plan(of: Engine, config: Config, defaults: PodDefaults = DEFAULTS) -> PlannedJob:
    """Return the job that a run of `config` would create."""
    tree = document(of, config, defaults)
    templates = zip(replicas(config).items(), of.templates(tree).values(), strict=True)
    roles = [Role(name=name, count=count, template=each) for (name, count), each in templates]
    return PlannedJob(engine=of, tree=tree, roles=roles)


def answers(cluster: Cluster, config: Config | None = None) -> Finding:
    """Check that the API responds, accepts the caller, and supports the pods of `config`."""
    host, who = cluster.host, "kubectl auth whoami"
    try:
        answer = cluster.api.request("GET", "/version")
    except UnreachableError as error:
        return Finding("fail", f"{host} does not answer {error}", SHOW)
    if answer.status == HTTPStatus.UNAUTHORIZED:
        message = f"{host} does not accept the credentials: log in again"
        return Finding("fail", message, who)
    if answer.status == HTTPStatus.FORBIDDEN:
        return Finding("warn", f"{host} responds, but does not report its version", who)
    try:
        version = str(answer.json()["gitVersion"])
    except (ValueError, KeyError, TypeError):
        return Finding("fail", f"{host} is not a Kubernetes API (HTTP {answer.status})", SHOW)
    if config and needs_sidecars(config) and (lack := describe_lack(version)):
        return Finding("fail", lack, "kubectl version")
    return judge_version(KUBERNETES, version, f"{version} at {host}", SHOW)


def namespace(cluster: Cluster) -> Finding:
    """Check that the namespace of the job exists."""
    name = cluster.namespace
    try:
        cluster.api.read(f"/api/v1/namespaces/{name}")
    except RefusedError as error:
        if not error.is_missing:
            raise
        return Finding("fail", f"there is no namespace {name}", f"kubectl create namespace {name}")
    if not cluster.is_named:
        return Finding("ok", f"{name}, the namespace of the context; --namespace selects another")
    return Finding("ok", name)


@dataclass(frozen=True, kw_only=True)
class Controller:
    """An engine's controller. Its deployment's name or image contains one of the `marks`."""

    part: Part
    install: str
    marks: tuple[str, ...]


CONTROLLERS: Mapping[Launcher, Controller] = {
    "tfjob": Controller(
        part=OPERATOR,
        install=(
            "kubectl apply --server-side --kustomize "
            "'github.com/kubeflow/training-operator.git/manifests/overlays/standalone"
            f"?ref=v{OPERATOR.seen[-1]}'"
        ),
        marks=("training-operator",),
    ),
    "jobset": Controller(
        part=JOBSET,
        install=(
            "kubectl apply --server-side --filename "
            "https://github.com/kubernetes-sigs/jobset/releases/"
            f"download/v{JOBSET.seen[-1]}/manifests.yaml"
        ),
        # Before release 0.11, the deployment had another name, so also search for the image.
        marks=("jobset-controller", "jobset/jobset"),
    ),
}


def check_served(cluster: Cluster, of: Engine) -> Finding:
    """Check that the API serves the job version that the launcher creates."""
    named = f"{of.kind.resource.plural}.{of.kind.resource.api_version}"
    if cluster.api.serves(of.kind.resource):
        return Finding("ok", f"{named} is served")
    message = f"{named} is not served: the {of.kind.controller} is missing or has another version"
    return Finding("fail", message, CONTROLLERS[of.name].install)


def controller(cluster: Cluster, of: Engine) -> Finding:
    """Check that the controller is deployed. The API may serve its job kind even if it is not."""
    known = CONTROLLERS[of.name]
    try:
        every = cluster.api.read("/apis/apps/v1/deployments")["items"]
    except RefusedError as error:
        if not error.is_forbidden:
            raise
        message = "cannot check whether the controller runs: no permission to read deployments"
        return Finding("warn", message, of.kind.show)
    found = [
        each
        for each in every
        if any(
            mark in text
            for text in (each["metadata"]["name"], *_images(each))
            for mark in known.marks
        )
    ]
    ready = [each for each in found if each.get("status", {}).get("readyReplicas")]
    if ready:
        message = f"{_place(ready[0])} is ready"
        return judge_version(known.part, _tag(ready[0], known), message, of.kind.show)
    if found:
        name, home = (found[0]["metadata"][key] for key in ("name", "namespace"))
        message = f"{_place(found[0])} has no ready pod: no controller handles jobs"
        return Finding("fail", message, f"kubectl describe deployment {name} --namespace {home}")
    message = f"the cluster has no deployment of the {of.kind.controller}"
    return Finding("fail", message, known.install)


def _images(deployment: Tree) -> list[str]:
    template = deployment.get("spec", {}).get("template", {}).get("spec", {})
    return [each.get("image", "") for each in template.get("containers", [])]


def _tag(deployment: Tree, known: Controller) -> str:
    named = [each.partition("@")[0] for each in _images(deployment)]
    own = (each for each in named if any(mark in each for mark in known.marks))
    return next(own, "").rpartition(":")[2]


def _place(deployment: Tree) -> str:
    metadata = deployment["metadata"]
    return f"the deployment {metadata['name']} in {metadata['namespace']}"


def is_on_kubernetes(config: Config) -> bool:
    """Return whether a run that is started on this machine trains on Kubernetes."""
    launcher = config.cluster.launcher
    return launcher in ENGINES or (launcher == "auto" and is_on_a_cluster())


_HERE = (
    "a run started here trains on this machine, because this is not a pod and KUBECONFIG is not set"
)
IS_HERE = Finding(
    "ok",
    f"{_HERE}; on a KFP instance, auto selects an engine of its cluster; to check that cluster, "
    "add --kubernetes",
)


def chosen(cluster: Cluster, config: Config) -> tuple[Engine | None, Finding]:
    """Return the engine that `auto` selects on this cluster, or None, and the finding."""
    absent: list[str] = []
    for name in ENGINES:
        one = engine(name)
        try:
            if cluster.api.serves(one.kind.resource):
                return one, _explain_choice(config, one, absent)
        except RefusedError as error:
            if error.is_forbidden:
                return one, _explain_choice(config, one, absent)
            return None, Finding("fail", str(error), SHOW)
        except UnreachableError as error:
            return None, Finding("fail", f"{cluster.host} does not answer {error}", SHOW)
        absent.append(f"{one.kind.kind}s")
    message = f"the cluster serves neither {' nor '.join(absent)}: no engine is installed"
    return None, Finding("fail", message, CONTROLLERS[ENGINES[0]].install)


def _explain_choice(config: Config, one: Engine, absent: Sequence[str]) -> Finding:
    """Report the selected engine with the reason, or the settings that it does not support."""
    launcher = config.cluster.launcher
    but = f", but no {' and no '.join(absent)}" if absent else ""
    message = f"auto selects {one.name}: the cluster serves {one.kind.kind}s{but}"
    if launcher != "auto":
        return Finding("ok", f"cluster.launcher is {launcher}; {message}")
    try:
        one.check(config)
    except ConfigError as error:
        remedy = "flotilla doctor --set cluster.launcher=tfjob"
        return Finding("fail", f"{message}; {error}", remedy)
    return Finding("ok", message if is_on_a_cluster() else f"{message}; {_HERE}")


def check_services(cluster: Cluster, config: Config, one: Engine) -> Finding:
    """Check that no unrelated Service has a name that a job of the model may use."""
    where = cluster.namespace
    found = cluster.api.read(f"/api/v1/namespaces/{where}/services")["items"]
    taken = [
        str(each["metadata"]["name"])
        for each in found
        if names.is_job_name(each["metadata"]["name"], config.name) and is_foreign(one.kind, each)
    ]
    if not taken:
        return Finding("ok", "no Service has the name of a job")
    message = (
        f"the Service {taken[0]} has the name of a job of this model but does not belong to a "
        f"{one.kind.kind}: the tasks of that job could not reach each other"
    )
    return Finding("fail", message, f"kubectl delete service {taken[0]} --namespace {where}")

"""Checks of the cluster of a job: its API, namespace, engine, versions, permissions and admission.

`docs/reference/versions.md` lists the versions with which Flotilla was tested.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from urllib.parse import quote

import urllib3

from flotilla.components.image import DEFAULTS, PodDefaults
from flotilla.components.kubernetes import client, names
from flotilla.components.kubernetes.adoption import is_foreign
from flotilla.components.kubernetes.engine import Engine, document
from flotilla.components.kubernetes.names import PODS, JobKind, Tree
from flotilla.components.kubernetes.pods.template import replicas
from flotilla.components.kubernetes.requirements import (
    FILE,
    LAUNCHER,
    Permission,
    describe_lack,
    find_user,
    format_grant,
    may,
    needs_sidecars,
    required_rules,
)
from flotilla.components.launchers import ENGINES, engine, is_on_a_cluster
from flotilla.pipelines.doctor import Finding
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

    api: client.Api
    host: str
    namespace: str
    is_named: bool

    @classmethod
    def connected(cls, namespace: str) -> Cluster:
        """Create a client without sending a request. Raises `UserError` if no API is configured."""
        connection = client.connect()
        name = namespace or connection.namespace
        return cls(
            api=client.Api(connection, name, timeout=TIMEOUT),
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
    except client.UnreachableError as error:
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
    except client.RefusedError as error:
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
    except client.RefusedError as error:
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
        except client.RefusedError as error:
            if error.is_forbidden:
                return one, _explain_choice(config, one, absent)
            return None, Finding("fail", str(error), SHOW)
        except client.UnreachableError as error:
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


@dataclass(frozen=True)
class Account:
    """A service account."""

    namespace: str
    name: str

    @property
    def user(self) -> str:
        """The user name of the account in the API."""
        return f"system:serviceaccount:{self.namespace}:{self.name}"


def check_user(cluster: Cluster, kind: JobKind) -> Finding:
    """Check that the caller may launch a job."""
    where, user = cluster.namespace, find_user(cluster.api)
    try:
        found = {each: may(cluster.api, each, where) for each in required_rules(LAUNCHER, kind)}
    except client.RefusedError as error:
        message = f"the API does not report what {user} may do: {error}"
        return Finding("fail", message, f"kubectl auth can-i --list --namespace {where}")
    return _judge_permissions(where, user, LAUNCHER, found)


def check_account(cluster: Cluster, account: Account, role: str, kind: JobKind) -> Finding:
    """Check that a service account has the permissions of a role in deploy/base/rbac.yaml."""
    where, wanted = cluster.namespace, required_rules(role, kind)
    groups = ["system:serviceaccounts", f"system:serviceaccounts:{account.namespace}"]
    subject = {"user": account.user, "groups": [*groups, "system:authenticated"]}
    try:
        found = {each: may(cluster.api, each, where, subject) for each in wanted}
    except client.RefusedError as error:
        message = f"cannot check what {account.user} may do ({error}); check each permission"
        show = f"kubectl auth can-i {wanted[0]} --namespace {where} --as {account.user}"
        return Finding("warn", message, show)
    return _judge_permissions(where, account.user, role, found)


def _judge_permissions(
    where: str, user: str, role: str, found: Mapping[Permission, bool]
) -> Finding:
    missing = [permission for permission, allowed in found.items() if not allowed]
    if not missing:
        return Finding("ok", f"{user} has all permissions of {role} ({FILE}) in {where}")
    fatal = any(not permission.is_optional for permission in missing)
    message = f"{user} lacks permissions in {where}: {', '.join(map(str, missing))}"
    return Finding("fail" if fatal else "warn", message, format_grant(where, user, role))


# Default service account of single-user KFP. In multi-user mode, it is `default-editor`.
USUAL = "pipeline-runner"


def parse_account(text: str, namespace: str) -> Account:
    """Return the account given as `[NAMESPACE:]NAME`, or the default account if it is empty."""
    place, _, name = text.rpartition(":")
    return Account(place or namespace, name or USUAL)


def check_name(text: str) -> None:
    """Raise a `ConfigError` unless the text has the form `[NAMESPACE:]NAME`."""
    parts = text.split(":")
    if text and (len(parts) > 2 or not all(part and part == quote(part, "") for part in parts)):  # noqa: PLR2004
        raise ConfigError(f"--service-account {text!r}: use the form NAME or NAMESPACE:NAME")


def check_ui_account(cluster: Cluster, account: Account) -> Finding:
    """Check that the account of runs started from the KFP UI exists, and report its name."""
    message = f"runs started from the KFP UI use {account.user}"
    place = f"/api/v1/namespaces/{account.namespace}/serviceaccounts/{account.name}"
    try:
        cluster.api.read(place)
    except client.RefusedError as error:
        if not error.is_missing:
            raise
        message += ", which does not exist: correct --service-account NAMESPACE:NAME"
        show = f"kubectl get serviceaccounts --namespace {account.namespace}"
        return Finding("fail", message, show)
    return Finding("ok", message)


# Parts of a refusal message, each with the command that shows more. The first match applies.
_REMEDIES = (
    ("PodSecurity", "flotilla doctor --set cluster.kubernetes.pod.security=restricted"),
    ("service account", "kubectl get serviceaccounts --namespace {namespace}"),
    ("quota", "kubectl describe resourcequotas --namespace {namespace}"),
    ("PriorityClass", "kubectl get priorityclasses"),
    (" per ", "kubectl describe limitranges --namespace {namespace}"),
    ("", "kubectl describe namespace {namespace}"),
)


def admits(cluster: Cluster, job: PlannedJob) -> Finding:
    """Dry-run the creation of the job, then of a pod of each role."""
    kind, strict = job.engine.kind, job.engine.is_strict
    create = partial(cluster.api.create, is_tried=True)
    try:
        made = partial(create, kind.resource, job.tree, strict=strict)
        if finding := _try_create(cluster, job, "the job", made):
            return finding
    except client.SilentControllerError as error:
        message = f"the {kind.controller} does not respond, so no job can be created: {error}"
        return Finding("fail", message, kind.show)
    for role in job.roles:
        metadata = {**role.template.get("metadata", {}), "name": f"{job.name}-{role.name}-0"}
        spec = {**role.pod, "restartPolicy": "Never"}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        if finding := _try_create(cluster, job, f"a {role.name} pod", partial(create, PODS, pod)):
            return finding
    return Finding("ok", f"the namespace {cluster.namespace} admits the job and a pod of each role")


def _try_create(
    cluster: Cluster, job: PlannedJob, what: str, create: Callable[[], Tree]
) -> Finding | None:
    """Return a finding if creation would be refused. An existing object is not an error."""
    where, place = cluster.namespace, f"the namespace {cluster.namespace}"
    try:
        create()
    except client.RefusedError as error:
        words = str(error).partition(": ")[2]
        if error.code == HTTPStatus.CONFLICT:
            return None
        if error.is_of_unknown_fields:
            controller = CONTROLLERS[job.engine.name]
            message = (
                f"the {controller.part.name} of this cluster does not know a field of the job: "
                f"{words}; install {controller.part.seen[-1]}, or remove the setting of that field"
            )
            return Finding("fail", message, controller.install)
        if (error.is_forbidden and " cannot " in words) or "does not support dry run" in words:
            show = f"kubectl auth can-i create pods --namespace {where}"
            return Finding("warn", f"cannot determine whether {place} admits {what}: {words}", show)
        remedy = next(remedy for part, remedy in _REMEDIES if part in words)
        return Finding("fail", f"{place} refuses {what}: {words}", remedy.format(namespace=where))
    return None

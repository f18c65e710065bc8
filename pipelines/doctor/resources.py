"""Checks that the cluster has what a job needs: the objects it refers to, quotas and nodes."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from urllib.parse import quote

from kubernetes.utils.quantity import parse_quantity

from flotilla.components.image import IMAGE
from flotilla.components.kubernetes import names
from flotilla.components.kubernetes.client import RefusedError
from flotilla.components.kubernetes.names import Tree
from flotilla.components.kubernetes.requirements import TRAINER, format_grant
from flotilla.pipelines.doctor import Finding
from flotilla.pipelines.doctor.cluster import NODES, Cluster, PlannedJob, Role
from flotilla.trainer.config.schema import Config
from flotilla.trainer.storage import uri

SECRETS, MAPS, CLAIMS = "secrets", "configmaps", "persistentvolumeclaims"
ACCOUNTS, CLASSES, LOGINS = "serviceaccounts", "priorityclasses", "logins of image registries"
QUEUES = "localqueues"
# The title of each kind in the report.
KINDS = {
    SECRETS: "secrets",
    LOGINS: "image pull secrets",
    MAPS: "config maps",
    CLAIMS: "volume claims",
    ACCOUNTS: "service accounts of tasks",
    CLASSES: "priority classes",
    QUEUES: "Kueue queues",
}


# The kind of object that each volume source refers to, and the key with its name.
_VOLUMES = (
    (CLAIMS, "persistentVolumeClaim", "claimName"),
    (SECRETS, "secret", "secretName"),
    (MAPS, "configMap", "name"),
)


@dataclass(frozen=True, order=True)
class Named:
    """An object that a job refers to. If `key` is not empty, the job reads that key."""

    kind: str
    name: str
    key: str = ""


def list_named_objects(job: PlannedJob) -> frozenset[Named]:
    """Return all objects that a job's pods, pod group or queue label refer to."""
    group = job.tree["spec"].get("runPolicy", {}).get("schedulingPolicy", {})
    found = {Named(CLASSES, group["priorityClass"])} if "priorityClass" in group else set()
    if queue := job.tree["metadata"].get("labels", {}).get(names.KUEUE):
        found.add(Named(QUEUES, queue))
    for role in job.roles:
        found.update(_pod_objects(role))
    return frozenset(found)


def _pod_objects(role: Role) -> Iterator[Named]:
    for container in role.containers:
        yield from _container_objects(container)
    for each in role.pod.get("imagePullSecrets", []):
        yield Named(LOGINS, each["name"])
    for kind, key in ((ACCOUNTS, "serviceAccountName"), (CLASSES, "priorityClassName")):
        if key in role.pod:
            yield Named(kind, role.pod[key])
    for volume in role.pod.get("volumes", []):
        for kind, source, key in _VOLUMES:
            reference = volume.get(source)
            # Check the types, because these values may come from the user.
            if isinstance(reference, dict) and isinstance(reference.get(key), str):
                yield Named(kind, reference[key])


def _container_objects(container: Tree) -> Iterator[Named]:
    for each in container.get("envFrom", []):
        for kind, source in ((SECRETS, "secretRef"), (MAPS, "configMapRef")):
            if source in each:
                yield Named(kind, each[source]["name"])
    for each in container.get("env", []):
        if reference := each.get("valueFrom", {}).get("secretKeyRef"):
            yield Named(SECRETS, reference["name"], reference["key"])


def check_objects(cluster: Cluster, kind: str, objects: frozenset[Named]) -> Finding:
    """Check that all objects of one kind exist and have the keys that the job reads."""
    where = cluster.namespace
    by_name: dict[str, set[str]] = {}
    for each in sorted(objects):
        by_name.setdefault(each.name, set()).update({each.key} - {""})
    missing, remedies = [], []
    for name, keys in by_name.items():
        try:
            data = cluster.api.read(f"{_root(where, kind)}/{quote(name)}").get("data")
        except RefusedError as error:
            if not error.is_missing:
                raise
            missing.append(name)
            remedies.append(_remedy(where, kind, name, sorted(keys)))
            continue
        if absent := sorted(keys - set(data if isinstance(data, Mapping) else ())):
            missing.append(f"{name} (without {', '.join(absent)})")
            values = json.dumps({"stringData": dict.fromkeys(absent, "VALUE")})
            patch = f"kubectl patch secret {name} --namespace {where} --patch '{values}'"
            remedies.append(patch)
    if missing:
        message = f"missing in {where}: {', '.join(missing)}"
        return Finding("fail", message, " && ".join(remedies))
    return Finding("ok", ", ".join(by_name))


def show(where: str, kind: str) -> str:
    """Return the command that lists the objects of a kind."""
    *_, plural = _root(where, kind).split("/")
    return f"kubectl get {plural}" + ("" if kind == CLASSES else f" --namespace {where}")


def _root(where: str, kind: str) -> str:
    own = {
        CLASSES: "/apis/scheduling.k8s.io/v1/priorityclasses",
        QUEUES: f"/apis/kueue.x-k8s.io/v1beta1/namespaces/{where}/localqueues",
    }
    return own.get(kind, f"/api/v1/namespaces/{where}/{SECRETS if kind == LOGINS else kind}")


# For each kind, the command that creates a missing object, or lists the existing ones.
_REMEDIES = {
    SECRETS: "kubectl create secret generic {name} --namespace {namespace} {literals}",
    LOGINS: (
        "kubectl create secret docker-registry {name} --namespace {namespace} "
        "--docker-server=HOST --docker-username=USER --docker-password=PASSWORD"
    ),
    MAPS: "kubectl create configmap {name} --namespace {namespace} --from-literal=KEY=VALUE",
    CLAIMS: (
        'echo \'{{"apiVersion":"v1","kind":"PersistentVolumeClaim","metadata":{{"name":"{name}"}},'
        '"spec":{{"accessModes":["ReadWriteMany"],"resources":{{"requests":{{"storage":"50Gi"}}}}}}'
        "}}' | kubectl create --namespace {namespace} --filename -"
    ),
    ACCOUNTS: "kubectl create serviceaccount {name} --namespace {namespace}",
    CLASSES: "kubectl create priorityclass {name} --value=1000",
    # The queue also appears to be missing if Kueue is not installed, so only list the queues.
    QUEUES: "kubectl get localqueues --namespace {namespace}",
}


def _remedy(namespace: str, kind: str, name: str, keys: list[str]) -> str:
    if kind == ACCOUNTS and name == TRAINER:
        return format_grant(namespace, f"system:serviceaccount:{namespace}:{name}", TRAINER)
    literals = " ".join(f"--from-literal={key}=VALUE" for key in keys or ["KEY"])
    return _REMEDIES[kind].format(name=name, namespace=namespace, literals=literals)


# A complete pair of keys. The third key, a session token, is optional.
_PAIR = frozenset(uri.BOTO_KEYS[:2])


def check_secret(cluster: Cluster, config: Config) -> Finding:
    """Warn, but do not fail, if the secret has no complete key pair: pods may use a role."""
    where, lacking = cluster.namespace, "does not have both keys for this store"
    pairs = [_PAIR]
    root = config.storage.root
    if uri.speaks_s3(root) and uri.find_endpoint(uri.locate(root)).kfp_secret:
        pairs.append(frozenset(uri.KFP_KEYS))
    try:
        data = cluster.api.read(f"/api/v1/namespaces/{where}/secrets/{uri.KFP_SECRET}").get("data")
    except RefusedError as error:
        if not error.is_missing:
            raise
        data, lacking = None, "does not exist"
    keys = set(data) if isinstance(data, Mapping) else set()
    if any(pair <= keys for pair in pairs):
        return Finding("ok", uri.KFP_SECRET)
    message = (
        f"the secret {uri.KFP_SECRET} {lacking}: the pods can use the store only through a role of "
        "their service account"
    )
    return Finding("warn", message, f"kubectl get secret {uri.KFP_SECRET} --namespace {where}")


# An image name that begins with a registry.
_HOST = re.compile(r"(localhost|[^/]*[.:][^/]*)/")
_BUILD = "docker build --tag HOST/NAME:TAG . && docker push HOST/NAME:TAG"
_GIVE = "flotilla doctor --image HOST/NAME:TAG"


def image_names(job: PlannedJob) -> set[str]:
    """Return the images of a job. A container without an image adds an empty string."""
    return {container.get("image", "") for role in job.roles for container in role.containers}


def judge_images(images: Iterable[str]) -> Finding:
    """Check that every image name contains a registry, so that all nodes can pull it.

    An empty string means that no image is configured.
    """
    names = sorted(images)
    if "" in names:
        message = (
            "no image is given: pass the image of the uploaded pipeline with --image, or set "
            f"cluster.kubernetes.pod.image; the default image, {IMAGE}, is not in a registry"
        )
        return Finding("warn", message, _GIVE)
    local = [image for image in names if not _HOST.match(image)]
    if local:
        message = (
            "the image name contains no registry, so a node that does not have the image pulls it "
            f"from Docker Hub: {', '.join(local)}"
        )
        return Finding("warn", message, f"{_BUILD} && {_GIVE}")
    return Finding("ok", ", ".join(names))


def amount(text: object) -> Decimal:
    """Return the number that a quantity such as `500m` or `2Gi` stands for."""
    return Decimal(parse_quantity(str(text)))


def format_quantity(number: Decimal) -> str:
    """Format a number as a Kubernetes quantity, such as `3`, `500m` or `2Gi`."""
    if number != number.to_integral_value():
        return f"{int((number * 1000).to_integral_value(rounding='ROUND_CEILING'))}m"
    whole = int(number)
    for unit, size in (("Gi", 2**30), ("Mi", 2**20), ("Ki", 2**10)):
        if whole and whole % size == 0:
            return f"{whole // size}{unit}"
    return str(whole)


def room(cluster: Cluster, job: PlannedJob, *, has_step: bool = True) -> Finding:
    """Check that the requests of all pods fit into the rest of every unscoped `ResourceQuota`.

    `has_step` tells whether the step that creates the job runs in this namespace, so that its pod
    also counts.
    """
    where = cluster.namespace
    quotas = cluster.api.read(f"/api/v1/namespaces/{where}/resourcequotas")["items"]
    if not quotas:
        return Finding("ok", f"the namespace {where} has no quota")
    scoped = [each["metadata"]["name"] for each in quotas if _is_scoped(each)]
    plain = [each for each in quotas if not _is_scoped(each)]
    for quota in plain:
        if finding := _exceeded(where, quota, job, int(has_step)):
            return finding
    if scoped:
        message = f"the quotas {', '.join(scoped)} apply only to some pods; this check ignores them"
        return Finding("warn", message, f"kubectl describe resourcequotas --namespace {where}")
    names = ", ".join(each["metadata"]["name"] for each in plain)
    return Finding("ok", f"there is room for the job in {names}")


def _is_scoped(quota: Tree) -> bool:
    return bool(quota["spec"].get("scopes") or quota["spec"].get("scopeSelector"))


def _exceeded(where: str, quota: Tree, job: PlannedJob, steps: int) -> Finding | None:
    name, objects = quota["metadata"]["name"], _objects(job, steps)
    hard = dict(quota.get("status", {}).get("hard") or quota["spec"].get("hard", {}))
    used = quota.get("status", {}).get("used", {})
    asked = {key: _count_requested(key, job, objects) for key in hard}
    needed = {key: amount(used.get(key, 0)) + asked[key] for key in hard if asked[key]}
    over = {key: total for key, total in needed.items() if total > amount(hard[key])}
    if not over:
        return None
    pods = ("pods", "count/pods") if steps else ()
    message = "; ".join(
        f"{key}: the job {'and its step request' if key in pods else 'requests'} "
        f"{format_quantity(asked[key])}, and {used.get(key, 0)} of {hard[key]} are already used"
        for key in over
    )
    patch = json.dumps(
        {"spec": {"hard": {key: format_quantity(total) for key, total in over.items()}}}
    )
    remedy = f"kubectl patch resourcequota {name} --namespace {where} --patch {shlex.quote(patch)}"
    return Finding("fail", f"the quota {name} is too small: {message}", remedy)


def _objects(job: PlannedJob, steps: int) -> dict[str, int]:
    """Return the number of objects that the job and its step create, keyed by quota resource."""
    kind, tasks = job.engine.kind, sum(each.count for each in job.roles)
    # Count a lease, in which the launcher stores its heartbeat.
    made = {"pods": tasks + steps, "leases.coordination.k8s.io": 1}
    made[f"{kind.resource.plural}.{kind.resource.group}"] = 1
    # Child Jobs share one headless service. The training operator creates a service for every pod.
    made |= {"services": 1, "jobs.batch": tasks} if kind.has_child_jobs else {"services": tasks}
    # Add the older names of two quotas, which have no prefix `count/`.
    short = {key: made[key] for key in ("pods", "services")}
    return {**{f"count/{key}": count for key, count in made.items()}, **short}


def _count_requested(key: str, job: PlannedJob, objects: Mapping[str, int]) -> Decimal:
    if key in objects:
        return Decimal(objects[key])
    resource, total = key.removeprefix("limits.").removeprefix("requests."), Decimal(0)
    for role in job.roles:
        for each in role.containers:
            asked = each.get("resources", {}).get("limits", {})
            if not key.startswith("limits."):
                # Without a request, Kubernetes uses the limit as the request.
                asked = {**asked, **each.get("resources", {}).get("requests", {})}
            total += role.count * amount(asked.get(resource, 0))
    return total


def devices(job: PlannedJob) -> list[str]:
    """Return the resources of the job that only some nodes have, such as GPUs."""
    limits = [role.resources.get("limits", {}) for role in job.roles]
    return sorted({name for each in limits for name in each if "/" in name})


def check_devices(cluster: Cluster, job: PlannedJob, resource: str) -> Finding:
    """Check that suitable nodes have enough of a resource, whether or not it is in use."""
    path = ".status.allocatable." + resource.replace(".", "\\.")
    show = f"kubectl get nodes --output 'custom-columns=NAME:.metadata.name,HAS:{path}'"
    nodes = cluster.api.read(NODES)["items"]
    if not any(_count(node, resource) for node in nodes):
        others = sorted(
            {
                name
                for node in nodes
                for name in node.get("status", {}).get("allocatable", {})
                if "/" in name and _count(node, name)
            }
        )
        known = f"the nodes have {', '.join(others)}" if others else "the nodes have no devices"
        message = f"no node has {resource}; {known}; a node that an autoscaler adds may have it"
        if len(others) == 1:
            show = f"flotilla doctor --set cluster.kubernetes.gpu_resource={others[0]}"
        return Finding("fail", message, show)
    total = 0
    for role in job.roles:
        each = int(role.resources.get("limits", {}).get(resource, 0))
        if not each:
            continue
        fitting = [_count(node, resource) for node in nodes if _takes(node, role)]
        places = sum(has // each for has in fitting)
        if places < role.count:
            message = (
                f"{role.count} {role.name} pods request {each} {resource} each; the {len(fitting)} "
                f"nodes that accept them have room for {places} (one node has at most "
                f"{max(fitting, default=0)})"
            )
            return Finding("fail", message, show)
        total += each * role.count
    has = sum(_count(node, resource) for node in nodes)
    if total > has:
        message = f"the job requests {total} {resource}, but the nodes have {has}"
        return Finding("fail", message, show)
    message = f"the job requests {total} of {has} {resource}; other pods may use some of them"
    return Finding("ok", message)


def _takes(node: Tree, role: Role) -> bool:
    labels = node["metadata"].get("labels", {})
    taints = node.get("spec", {}).get("taints") or ()
    return not any(
        taint.get("effect") in ("NoSchedule", "NoExecute") and not _is_tolerated(taint, role)
        for taint in taints
    ) and all(labels.get(k) == value for k, value in role.pod.get("nodeSelector", {}).items())


def _is_tolerated(taint: Tree, role: Role) -> bool:
    """Return whether a pod tolerates a taint, possibly through `ExtendedResourceToleration`."""
    if taint["key"] in role.resources.get("limits", {}):
        return True
    return any(
        each.get("effect") in (None, "", taint["effect"])
        and each.get("key") in (None, "", taint["key"])
        and (each.get("operator") == "Exists" or each.get("value") == taint.get("value"))
        for each in role.pod.get("tolerations", [])
    )


def _count(node: Tree, resource: str) -> int:
    """Return the amount of a resource that a node offers. A cordoned node offers 0."""
    if node.get("spec", {}).get("unschedulable"):
        return 0
    return int(amount(node.get("status", {}).get("allocatable", {}).get(resource, 0)))

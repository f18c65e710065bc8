"""Checks that the objects a job refers to exist, such as secrets, claims, queues and images."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import quote

from flotilla.components.image import IMAGE
from flotilla.components.kubernetes import names
from flotilla.components.kubernetes.api.client import RefusedError
from flotilla.components.kubernetes.api.rbac import TRAINER, format_grant
from flotilla.components.kubernetes.names import Tree
from flotilla.pipelines.doctor.cluster import Cluster, PlannedJob
from flotilla.pipelines.doctor.examination import Finding

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
        found.update(_pod_objects(role.pod))
    return frozenset(found)


def _pod_objects(pod: Tree) -> Iterator[Named]:
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        yield from _container_objects(container)
    for each in pod.get("imagePullSecrets", []):
        yield Named(LOGINS, each["name"])
    if "serviceAccountName" in pod:
        yield Named(ACCOUNTS, pod["serviceAccountName"])
    if "priorityClassName" in pod:
        yield Named(CLASSES, pod["priorityClassName"])
    for volume in pod.get("volumes", []):
        yield from _volume_objects(volume)


def _container_objects(container: Tree) -> Iterator[Named]:
    for each in container.get("envFrom", []):
        if "secretRef" in each:
            yield Named(SECRETS, each["secretRef"]["name"])
        if "configMapRef" in each:
            yield Named(MAPS, each["configMapRef"]["name"])
    for each in container.get("env", []):
        reference = each.get("valueFrom", {}).get("secretKeyRef")
        if reference:
            yield Named(SECRETS, reference["name"], reference["key"])


def _volume_objects(volume: Tree) -> Iterator[Named]:
    # Check the types, because these values may come from the user.
    for kind, source, name in (
        (CLAIMS, "persistentVolumeClaim", "claimName"),
        (SECRETS, "secret", "secretName"),
        (MAPS, "configMap", "name"),
    ):
        reference = volume.get(source)
        if isinstance(reference, dict) and isinstance(reference.get(name), str):
            yield Named(kind, reference[name])


def present(cluster: Cluster, kind: str, objects: frozenset[Named]) -> Finding:
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
    if kind == CLASSES:
        return "/apis/scheduling.k8s.io/v1/priorityclasses"
    if kind == QUEUES:
        return f"/apis/kueue.x-k8s.io/v1beta1/namespaces/{where}/localqueues"
    return f"/api/v1/namespaces/{where}/{SECRETS if kind == LOGINS else kind}"


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


_BUILD = "docker build --tag HOST/NAME:TAG . && docker push HOST/NAME:TAG"
_GIVE = "flotilla doctor --image HOST/NAME:TAG"


def image_names(job: PlannedJob) -> set[str]:
    """Return the images of a job. A container without an image adds an empty string."""
    every = [[*each.pod.get("initContainers", []), *each.pod["containers"]] for each in job.roles]
    return {container.get("image", "") for containers in every for container in containers}


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
    local = [image for image in names if not _has_host(image)]
    if local:
        message = (
            "the image name contains no registry, so a node that does not have the image pulls it "
            f"from Docker Hub: {', '.join(local)}"
        )
        return Finding("warn", message, f"{_BUILD} && {_GIVE}")
    return Finding("ok", ", ".join(names))


def _has_host(image: str) -> bool:
    host, slash, _ = image.partition("/")
    return bool(slash) and ("." in host or ":" in host or host == "localhost")

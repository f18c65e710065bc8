"""Who takes up the job: the training operator, and Kueue where the job waits for its queue.

That the API serves TFJobs says nothing of it: the kind stays when its operator is removed.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from urllib.parse import quote

from components.kubernetes.names import Tree
from pipelines.doctor import versions
from pipelines.doctor.examination import Finding
from pipelines.doctor.kubernetes_api import (
    GROUP,
    OPERATOR,
    PLURAL,
    VERSION,
    Kubernetes,
    unexpected,
)
from trainer.config.kubernetes import JobConfig

_LABEL = "control-plane=kubeflow-training-operator"
_SHOW = f"kubectl get deployments --all-namespaces --selector {_LABEL}"
_DEPLOYMENTS = "/apis/apps/v1/deployments"
# Where it usually is; a namespace may be readable where the whole cluster is not.
_HOME = "/apis/apps/v1/namespaces/kubeflow/deployments"
# An operator takes up a job within seconds.
_TAKEN_UP = timedelta(minutes=1)
# What it has done longer ago says nothing of today.
_RECENT = timedelta(days=1)


def operator(kubernetes: Kubernetes) -> Finding:
    """Look for the training operator: its deployment, or what it has done to other jobs."""
    found, whole = _deployments(kubernetes)
    ready = [each for each in found if each.get("status", {}).get("readyReplicas")]
    if ready:
        message = f"{_place(ready[0])} is ready"
        return versions.judged(versions.OPERATOR, _tag(ready[0]), message, _SHOW)
    if found:
        name, namespace = (found[0]["metadata"][key] for key in ("name", "namespace"))
        message = f"{_place(found[0])} has no ready pod: nobody takes up a job"
        return Finding(
            "fail", message, f"kubectl describe deployment {name} --namespace {namespace}"
        )
    jobs = kubernetes.get(f"/apis/{GROUP}/{VERSION}/namespaces/{kubernetes.namespace}/{PLURAL}")
    now = datetime.now(UTC)
    for job in jobs.items:
        reacted = max(_reactions(job), default=None)
        if reacted and now - reacted < _RECENT:
            return Finding("ok", f"it has taken up the job {job['metadata']['name']} at {reacted}")
    if whole:
        return Finding("fail", "no deployment of the cluster is that of an operator", OPERATOR)
    for job in jobs.items:
        made = _time(job["metadata"].get("creationTimestamp"))
        if made and now - made > _TAKEN_UP and not job.get("status", {}).get("conditions"):
            message = (
                f"the job {job['metadata']['name']} of {made} has no condition: no operator runs, "
                "or it cannot make the pods"
            )
            return Finding("warn", message, _SHOW)
    message = (
        "whether one runs could not be seen: its deployment may not be read, and "
        f"{kubernetes.namespace} has no TFJob of the last day"
    )
    return Finding("warn", message, _SHOW)


def _deployments(kubernetes: Kubernetes) -> tuple[list[Tree], bool]:
    """Return the deployments of operators, and whether those of the whole cluster were seen."""
    everywhere = kubernetes.get(f"{_DEPLOYMENTS}?labelSelector={quote(_LABEL)}")
    if not everywhere.is_good:
        return kubernetes.get(f"{_HOME}?labelSelector={quote(_LABEL)}").items, False
    if everywhere.items:
        return everywhere.items, True
    # One that was installed in another way has other labels.
    every = kubernetes.get(_DEPLOYMENTS)
    return [each for each in every.items if _is_operator(each)], every.is_good


def _is_operator(deployment: Tree) -> bool:
    words = [deployment["metadata"]["name"], *_images(deployment)]
    return any("training-operator" in text for text in words)


def _images(deployment: Tree) -> list[str]:
    template = deployment.get("spec", {}).get("template", {}).get("spec", {})
    return [each.get("image", "") for each in template.get("containers", [])]


def _tag(deployment: Tree) -> str:
    """Return the tag of the operator's image, which is its version in a release."""
    images = (each for each in _images(deployment) if "training-operator" in each)
    return next(images, "").rpartition(":")[2]


def _place(deployment: Tree) -> str:
    metadata = deployment["metadata"]
    return f"the deployment {metadata['name']} in {metadata['namespace']}"


def _reactions(job: Tree) -> Iterator[datetime]:
    for each in job.get("status", {}).get("conditions") or []:
        found = _time(each.get("lastUpdateTime") or each.get("lastTransitionTime"))
        if found:
            yield found


def _time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None


_KUEUE, _QUEUE = "kueue.x-k8s.io", "kueue.x-k8s.io/queue-name"
_SETTINGS = "kubectl edit configmap kueue-manager-config --namespace kueue-system"
_FRAMEWORK = "kubeflow.org/tfjob"


def queue(kubernetes: Kubernetes, settings: JobConfig, manifest: Tree) -> Finding:
    """Check that Kueue is there, has the queue, and looks after TFJobs.

    Its webhook suspends every job with a queue that it looks after; a job that is tried shows it.
    """
    group = kubernetes.get(f"/apis/{_KUEUE}")
    if not group.is_good and not group.is_missing:
        return unexpected(
            group, "whether Kueue is installed", f"kubectl api-versions | grep {_KUEUE}"
        )
    if group.is_missing:
        return _without_kueue(settings)
    name = settings.queue_name
    if not name:
        message = "the job is suspended and names no queue: Kueue lets it wait for ever"
        setting = "flotilla doctor --set cluster.kubernetes.job.queue_name=QUEUE"
        return Finding("fail", message, setting)
    version = group.tree.get("preferredVersion", {}).get("version", "v1beta1")
    where = kubernetes.namespace
    answer = kubernetes.get(f"/apis/{_KUEUE}/{version}/namespaces/{where}/localqueues/{name}")
    show = f"kubectl get localqueues --namespace {where}"
    if answer.is_missing:
        return Finding("fail", f"there is no local queue {name} in {where}", show)
    return _of_tfjobs(kubernetes, settings, manifest)


def _without_kueue(settings: JobConfig) -> Finding:
    if settings.suspend:
        message = (
            "Kueue is not installed, and the job is suspended: it waits until someone resumes it"
        )
        return Finding(
            "fail", message, "flotilla doctor --set cluster.kubernetes.job.suspend=false"
        )
    message = f"Kueue is not installed: nobody reads the queue {settings.queue_name}"
    return Finding("warn", message, "flotilla doctor --set cluster.kubernetes.job.queue_name=")


def _of_tfjobs(kubernetes: Kubernetes, settings: JobConfig, manifest: Tree) -> Finding:
    policy = {**manifest["spec"]["runPolicy"], "suspend": False}
    job = {**manifest, "spec": {**manifest["spec"], "runPolicy": policy}}
    tried = kubernetes.try_to_create(PLURAL, job)
    if tried.is_good:
        looks_after = bool(tried.tree["spec"]["runPolicy"].get("suspend"))
    else:
        frameworks = _frameworks(kubernetes)
        if frameworks is None:
            message = (
                "whether Kueue looks after TFJobs could not be seen: a job may not be tried, and "
                "its settings may not be read"
            )
            return Finding("warn", message, _SETTINGS.replace(" edit ", " get "))
        looks_after = _FRAMEWORK in frameworks
    if looks_after:
        return Finding("ok", f"the job waits in {settings.queue_name}")
    message = (
        f"Kueue does not look after TFJobs ({_FRAMEWORK} is not among its frameworks): the job "
    )
    if settings.suspend:
        return Finding("fail", f"{message}stays suspended for ever", _SETTINGS)
    return Finding("warn", f"{message}does not wait for its quota", _SETTINGS)


def _frameworks(kubernetes: Kubernetes) -> str | None:
    """Return the lines of Kueue's settings that name frameworks; None where they are not seen."""
    path = "/api/v1/namespaces/kueue-system/configmaps/kueue-manager-config"
    answer = kubernetes.get(path)
    if not answer.is_good:
        return None
    text = str((answer.tree.get("data") or {}).get("controller_manager_config.yaml", ""))
    return "\n".join(line for line in text.splitlines() if not line.strip().startswith("#"))

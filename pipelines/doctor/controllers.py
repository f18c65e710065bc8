"""Who takes up the job: the controller of its kind, and Kueue where the job waits for its queue.

That the API serves a kind says nothing of it: the kind stays when its controller is removed.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from urllib.parse import quote

from components.kubernetes.names import Tree
from pipelines.doctor import versions
from pipelines.doctor.engines import ExaminedEngine, PlannedJob
from pipelines.doctor.examination import Finding
from pipelines.doctor.kubernetes_api import Kubernetes, unexpected
from trainer.config.kubernetes import JobConfig

_APPS = "/apis/apps/v1"
# A controller takes up a job within seconds.
_TAKEN_UP = timedelta(minutes=1)
# What it has done longer ago says nothing of today.
_RECENT = timedelta(days=1)


def served(kubernetes: Kubernetes, examined: ExaminedEngine) -> Finding:
    """Check that the version of the jobs that the launcher writes is served."""
    resource = examined.kind.resource
    group, api_version = resource.group, resource.api_version
    named = f"{resource.plural}.{api_version}"
    answer = kubernetes.get(f"/apis/{api_version}")
    if answer.is_good:
        if resource.plural in [each.get("name") for each in answer.tree.get("resources", [])]:
            return Finding("ok", f"{named} is served")
        return Finding(
            "fail", f"{api_version} is served without {resource.plural}", examined.install
        )
    if not answer.is_missing:
        return unexpected(answer, api_version, f"kubectl api-resources --api-group {group}")
    others = kubernetes.get(f"/apis/{group}").tree.get("versions", [])
    found = ", ".join(each.get("version", "") for each in others)
    message = f"{named} is not served: the {examined.kind.controller} is not installed"
    if found:
        message = f"{named} is not served, only {group}/{found}"
    return Finding("fail", message, examined.install)


def controller(kubernetes: Kubernetes, job: PlannedJob) -> Finding:
    """Look for the controller: its deployment, its webhook, or what it has done to other jobs."""
    examined = job.examined
    show = examined.kind.show
    found, whole = _deployments(kubernetes, examined)
    ready = [each for each in found if each.get("status", {}).get("readyReplicas")]
    if ready:
        message = f"{_place(ready[0])} is ready"
        return versions.judged(examined.part, _tag(ready[0], examined), message, show)
    if found:
        name, namespace = (found[0]["metadata"][key] for key in ("name", "namespace"))
        message = f"{_place(found[0])} has no ready pod: nobody takes up a job"
        return Finding(
            "fail", message, f"kubectl describe deployment {name} --namespace {namespace}"
        )
    if _answers(kubernetes, job):
        return Finding("ok", "its webhook answers; its version is not seen")
    return _judged_by_jobs(kubernetes, examined, whole=whole)


def _answers(kubernetes: Kubernetes, job: PlannedJob) -> bool:
    tried = kubernetes.try_to_create(job.examined.kind.resource, job.tree)
    return tried.is_good and job.examined.is_answered(tried.tree)


def _judged_by_jobs(kubernetes: Kubernetes, examined: ExaminedEngine, *, whole: bool) -> Finding:
    """Judge a controller without a deployment by what it has done to the jobs of the namespace."""
    show, kind = examined.kind.show, examined.kind
    jobs = kubernetes.get(kind.resource.path(quote(kubernetes.namespace)))
    now = datetime.now(UTC)
    for job in jobs.items:
        reacted = max(_reactions(job, examined), default=None)
        if reacted and now - reacted < _RECENT:
            return Finding("ok", f"it has taken up the job {job['metadata']['name']} at {reacted}")
    if whole:
        article = "an" if examined.word[0] in "aeiou" else "a"
        message = f"no deployment of the cluster is that of {article} {examined.word}"
        return Finding("fail", message, examined.install)
    for job in jobs.items:
        made = _time(job["metadata"].get("creationTimestamp"))
        if made and now - made > _TAKEN_UP and not examined.engine.is_taken_up(job):
            message = (
                f"the job {job['metadata']['name']} of {made} has no {examined.sign}: no "
                f"{examined.word} runs, or it cannot make the pods"
            )
            return Finding("warn", message, show)
    message = (
        "whether one runs could not be seen: its deployment may not be read, and "
        f"{kubernetes.namespace} has no {kind.kind} of the last day"
    )
    return Finding("warn", message, show)


def _deployments(kubernetes: Kubernetes, examined: ExaminedEngine) -> tuple[list[Tree], bool]:
    """Return the deployments of controllers, and whether those of the whole cluster were seen."""
    labelled = f"?labelSelector={quote(examined.selector)}"
    everywhere = kubernetes.get(f"{_APPS}/deployments{labelled}")
    if everywhere.is_good and everywhere.items:
        return everywhere.items, True
    # One that was installed in another way has other labels.
    every = kubernetes.get(f"{_APPS}/deployments")
    if every.is_good:
        return [each for each in every.items if _is_controller(each, examined)], True
    # A namespace may be readable where the whole cluster is not.
    for home in examined.homes:
        there = kubernetes.get(f"{_APPS}/namespaces/{home}/deployments")
        found = [each for each in there.items if _is_controller(each, examined)]
        if found:
            return found, False
    return [], False


def _is_controller(deployment: Tree, examined: ExaminedEngine) -> bool:
    words = [deployment["metadata"]["name"], *_images(deployment)]
    return any(mark in text for text in words for mark in examined.marks)


def _images(deployment: Tree) -> list[str]:
    template = deployment.get("spec", {}).get("template", {}).get("spec", {})
    return [each.get("image", "") for each in template.get("containers", [])]


def _tag(deployment: Tree, examined: ExaminedEngine) -> str:
    """Return the tag of the controller's image, which is its version in a release."""
    named = [each.partition("@")[0] for each in _images(deployment)]
    own = (each for each in named if any(mark in each for mark in examined.marks))
    return next(own, "").rpartition(":")[2]


def _place(deployment: Tree) -> str:
    metadata = deployment["metadata"]
    return f"the deployment {metadata['name']} in {metadata['namespace']}"


def _reactions(job: Tree, examined: ExaminedEngine) -> Iterator[datetime]:
    """Yield when the controller has reacted to a job, at the earliest."""
    times = [
        each.get("lastUpdateTime") or each.get("lastTransitionTime")
        for each in job.get("status", {}).get("conditions") or []
    ]
    if examined.engine.is_taken_up(job):
        times.append(job["metadata"].get("creationTimestamp"))
    yield from filter(None, map(_time, times))


def _time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None


_KUEUE, _QUEUE = "kueue.x-k8s.io", "kueue.x-k8s.io/queue-name"
_SETTINGS = "kubectl edit configmap kueue-manager-config --namespace kueue-system"


def queue(kubernetes: Kubernetes, settings: JobConfig, job: PlannedJob) -> Finding:
    """Check that Kueue is there, has the queue, and looks after jobs of this kind.

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
    return _of_kind(kubernetes, settings, job)


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


def _of_kind(kubernetes: Kubernetes, settings: JobConfig, job: PlannedJob) -> Finding:
    examined = job.examined
    kinds, framework = f"{examined.kind.kind}s", examined.framework
    tried = kubernetes.try_to_create(examined.kind.resource, examined.resumed(job.tree))
    if tried.is_good:
        looks_after = examined.engine.is_suspended(tried.tree)
    else:
        frameworks = _frameworks(kubernetes)
        if frameworks is None:
            message = (
                f"whether Kueue looks after {kinds} could not be seen: a job may not be tried, and "
                "its settings may not be read"
            )
            return Finding("warn", message, _SETTINGS.replace(" edit ", " get "))
        looks_after = framework in frameworks
    if looks_after:
        return Finding("ok", f"the job waits in {settings.queue_name}")
    message = (
        f"Kueue does not look after {kinds} ({framework} is not among its frameworks): the job "
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

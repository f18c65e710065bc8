"""Attempts of the launcher that run a JobSet on the stand-in of a cluster."""

import signal

from flotilla.trainer import events
from tests.components.kubernetes.attempts import Attempt, job_of, settings, step
from tests.kubernetes.cluster import NAMESPACE

MESSAGE = "interrupted at global step 7; checkpoint gs://b/step-7"
KINDS = ("jobsets", "jobs", "pods", "leases", "services")


def prepare(kube, path, monkeypatch):
    """Install JobSet, and let the test end deleted pods; return a function that reads events."""
    kube.install_jobset()
    kube.store.graceful.add("pods")
    monkeypatch.setenv(events.VARIABLE, str(path))
    return lambda kind: [each for each in events.read(path) if isinstance(each, kind)]


def tree_of(max_restarts=3, workers=1, job=None, **deadlines):
    tree = settings(max_restarts, **deadlines)
    tree["cluster"] |= {"launcher": "jobset", "workers": workers}
    tree["cluster"]["kubernetes"]["job"] = job or {}
    return tree


def start(kube, **more):
    attempt = Attempt(job_of(tree_of(**more)))
    kube.wait_watched("jobsets", "pods")
    kube.run_all()
    return attempt


def finish(kube, attempt):
    kube.finish("chief-0", 0)
    kube.store.wait(lambda: not kube.jobsets())
    kube.end_deleted()
    attempt.succeed()
    kube.store.wait(lambda: not [kind for kind in KINDS if kube.store.all(kind, NAMESPACE)])


def uids(kube):
    return {task: pod["metadata"]["uid"] for task, pod in kube.pods().items()}


def kill_launcher(kube):
    with step(kube, tree_of()) as process:
        kube.wait_renewed()
        kube.run_all()
        kube.wait_followed("chief-0")
        process.signal(signal.SIGKILL)
        process.end()

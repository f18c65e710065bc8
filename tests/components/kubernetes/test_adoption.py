"""Tests that a retry of the step adopts the existing job or creates a new one."""

import pytest

from flotilla.components.kubernetes.pods.template import Place
from flotilla.components.kubernetes.tfjob import TFJobs
from tests.components.kubernetes.attempts import Attempt, complete, job_of, run_to_end, settings
from tests.kubernetes.cluster import NAMESPACE
from tests.kubernetes.conditions import condition

PLACE = Place(namespace=NAMESPACE)


def orphan(kube, steps=1500):
    """Create the job of an earlier attempt whose launcher has exited."""
    tree = settings()
    tree["training"] = {"steps": steps}
    return kube.store.create("tfjobs", NAMESPACE, TFJobs().manifest(job_of(tree), PLACE))


def start_attempt():
    tree = settings()
    tree["training"] = {"steps": 1500}
    return Attempt(job_of(tree))


def test_an_unfinished_job_of_the_same_manifest_is_adopted(kube, monkeypatch):
    monkeypatch.setenv("KFP_POD_NAME", "step-2")
    monkeypatch.setenv("KFP_POD_UID", "uid-2")
    before = orphan(kube)
    attempt = start_attempt()
    kube.run_all()
    kube.wait_renewed()
    meta = kube.job()["metadata"]
    assert meta["uid"] == before["metadata"]["uid"]
    assert [owner["uid"] for owner in meta["ownerReferences"]] == ["uid-2"]
    complete(kube, attempt)
    assert not [each for each in kube.server.requests if each.startswith("POST /apis/kubeflow")]


@pytest.mark.parametrize("kind", ["Succeeded", "Failed", "another"])
def test_any_other_job_is_deleted_and_created_again(kube, kind):
    before = orphan(kube, steps=7 if kind == "another" else 1500)
    name = before["metadata"]["name"]
    if kind != "another":
        kube.store.change("tfjobs", NAMESPACE, name, lambda tree: condition(tree, kind))
    attempt = start_attempt()
    uid = before["metadata"]["uid"]
    kube.store.wait(lambda: [j for j in kube.jobs() if j["metadata"]["uid"] != uid])
    run_to_end(kube, attempt)


def test_a_job_that_goes_while_it_is_adopted_is_looked_for_again(kube, monkeypatch):
    monkeypatch.setenv("KFP_POD_NAME", "step-2")
    monkeypatch.setenv("KFP_POD_UID", "uid-2")
    orphan(kube)
    kube.faults.add("PATCH .*tfjobs", 404, times=1)
    attempt = start_attempt()
    kube.wait_renewed()
    run_to_end(kube, attempt)
    assert kube.faults.hits == {"PATCH .*tfjobs": 1}


def test_a_job_that_is_being_deleted_is_not_adopted(kube):
    kube.store.graceful.add("tfjobs")
    before = orphan(kube)
    name = before["metadata"]["name"]
    kube.store.delete("tfjobs", NAMESPACE, name)
    attempt = start_attempt()
    kube.store.wait(lambda: sum(f"tfjobs/{name}" in each for each in kube.server.requests) >= 2)
    kube.store.graceful.clear()
    kube.store.remove("tfjobs", NAMESPACE, name)
    kube.store.wait(
        lambda: any(each.startswith("POST /apis/kubeflow") for each in kube.server.requests)
    )
    run_to_end(kube, attempt)


def test_a_job_in_another_namespace_has_no_owner_reference(kube, monkeypatch):
    monkeypatch.setenv("KFP_POD_NAME", "step-1")
    monkeypatch.setenv("KFP_POD_UID", "uid-1")
    tree = settings()
    tree["cluster"]["kubernetes"]["namespace"] = "elsewhere"
    attempt = Attempt(job_of(tree))
    kube.store.wait(lambda: kube.store.all("tfjobs", "elsewhere"))
    (job,) = kube.store.all("tfjobs", "elsewhere")
    # Kubernetes garbage-collects an object whose owner is in another namespace.
    assert "ownerReferences" not in job["metadata"]
    name = job["metadata"]["name"]
    kube.store.change("tfjobs", "elsewhere", name, lambda each: condition(each, "Succeeded"))
    attempt.succeed()

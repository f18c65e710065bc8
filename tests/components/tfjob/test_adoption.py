"""A retry of the step and the job that it finds."""

from __future__ import annotations

import copy

import pytest

from components.tfjob import names
from components.tfjob.manifest import Place, manifest
from tests.components.tfjob.attempts import Attempt, job_of, settings
from tests.kubernetes.cluster import NAMESPACE
from tests.kubernetes.operator import condition

PLACE = Place(namespace=NAMESPACE)


def left(kube, steps=1500):
    """Leave the job of an earlier attempt in the cluster."""
    tree = settings()
    tree["training"] = {"steps": steps}
    return kube.store.create("tfjobs", NAMESPACE, manifest(job_of(tree), PLACE))


def attempt():
    tree = settings()
    tree["training"] = {"steps": 1500}
    return Attempt(job_of(tree))


def test_an_unfinished_job_of_the_same_manifest_is_adopted(kube, monkeypatch):
    monkeypatch.setenv("KFP_POD_NAME", "step-2")
    monkeypatch.setenv("KFP_POD_UID", "uid-2")
    before = left(kube)
    running = attempt()
    kube.run_all()
    kube.store.wait(lambda: names.HEARTBEAT in kube.job()["metadata"]["annotations"])
    meta = kube.job()["metadata"]
    assert meta["uid"] == before["metadata"]["uid"]
    assert [owner["uid"] for owner in meta["ownerReferences"]] == ["uid-2"]
    kube.finish("chief-0", 0)
    running.done()
    kube.wait_gone()
    assert not [each for each in kube.server.requests if each.startswith("POST")]


@pytest.mark.parametrize("kind", ["Succeeded", "Failed", "another"])
def test_any_other_job_is_waited_out_and_made_anew(kube, kind):
    before = left(kube, steps=7 if kind == "another" else 1500)
    name = before["metadata"]["name"]
    if kind != "another":
        kube.store.change("tfjobs", NAMESPACE, name, lambda tree: condition(tree, kind))
    running = attempt()
    uid = before["metadata"]["uid"]
    kube.store.wait(lambda: [j for j in kube.jobs() if j["metadata"]["uid"] != uid])
    kube.run_all()
    kube.finish("chief-0", 0)
    running.done()
    kube.wait_gone()


def test_a_job_that_is_being_deleted_is_not_adopted(kube):
    kube.store.graceful.add("tfjobs")
    before = left(kube)
    name = before["metadata"]["name"]
    kube.store.delete("tfjobs", NAMESPACE, name)
    running = attempt()
    kube.store.wait(lambda: sum(f"tfjobs/{name}" in each for each in kube.server.requests) >= 2)
    kube.store.graceful.clear()
    kube.store.remove("tfjobs", NAMESPACE, name)
    kube.store.wait(lambda: any(each.startswith("POST") for each in kube.server.requests))
    kube.run_all()
    kube.finish("chief-0", 0)
    running.done()


def test_pods_of_another_namespace_own_no_job(kube, monkeypatch):
    monkeypatch.setenv("KFP_POD_NAME", "step-1")
    monkeypatch.setenv("KFP_POD_UID", "uid-1")
    tree = settings()
    tree["cluster"]["kubernetes"]["namespace"] = "elsewhere"
    running = Attempt(job_of(tree))
    kube.store.wait(lambda: kube.store.all("tfjobs", "elsewhere"))
    (job,) = kube.store.all("tfjobs", "elsewhere")
    # An owner in another namespace does not exist: the job would be collected at once.
    assert "ownerReferences" not in job["metadata"]
    name = copy.copy(job["metadata"]["name"])
    kube.store.change("tfjobs", "elsewhere", name, lambda each: condition(each, "Succeeded"))
    running.done()

"""The namespace that the doctor looks into: that of the instance, and not of the kubeconfig."""

from __future__ import annotations

import pytest

from tests.kubernetes.cluster import NAMESPACE


@pytest.fixture
def team(kube):
    """A namespace of the instance that is not that of the kubeconfig, with all that is needed."""
    kube.store.create("serviceaccounts", "team", {"metadata": {"name": "pipeline-runner"}})
    kube.store.create("secrets", "team", {"metadata": {"name": "keys"}})
    kube.server.control.absent.add(NAMESPACE)
    return kube


def looked_into(kube):
    """Return every namespace that a path or a review has named."""
    paths = [each.partition("/namespaces/")[2].partition("/")[0] for each in kube.server.requests]
    reviews = [spec["resourceAttributes"]["namespace"] for spec in kube.server.control.reviews]
    return {*paths, *reviews} - {""}


@pytest.mark.parametrize("by", ["--namespace", "-n", "KFP_NAMESPACE"])
def test_the_namespace_of_the_instance_is_the_one_that_is_looked_at(team, of_job, monkeypatch, by):
    options = (by, "team") if by.startswith("-") else ()
    monkeypatch.setenv("KFP_NAMESPACE", "other" if options else "team")
    report = of_job("cluster.kubernetes.pod.env_from_secrets=[keys]", options=options)
    assert (report.code, report.failed()) == (0, [])
    assert report["namespace"]["message"] == "team"
    assert looked_into(team) == {"team"}
    said = report["account of the KFP UI"]["message"]
    assert said.endswith("system:serviceaccount:team:pipeline-runner")


def test_that_of_the_context_is_reported_to_be_that(kube, of_job):
    said = f"{NAMESPACE}, to which the context leads; --namespace names another"
    assert of_job()["namespace"]["message"] == said
    assert looked_into(kube) == {NAMESPACE}
    named = of_job(options=("--namespace", NAMESPACE))
    assert named["namespace"]["message"] == NAMESPACE


def test_a_job_of_another_namespace_is_launched_from_that_of_the_steps(team, of_job):
    team.store.create("secrets", "jobs", {"metadata": {"name": "keys"}})
    report = of_job(
        "cluster.kubernetes.namespace=jobs",
        "cluster.kubernetes.pod.env_from_secrets=[keys]",
        options=("--namespace", "team"),
    )
    assert report.failed() == []
    assert report["namespace"]["message"] == "jobs"
    found = report["permissions of that account"]["message"]
    assert found.startswith("system:serviceaccount:team:pipeline-runner may do in jobs all")


@pytest.mark.parametrize("name", ["Team", "a/b", "a b", "-a", "a" * 64, "../nodes"])
def test_what_is_no_namespace(doctor, monkeypatch, name):
    report = doctor(options=(f"--namespace={name}",))
    assert (report.code, report.lines) == (2, [])
    assert f"{name!r} is not the name of a namespace" in report.err
    monkeypatch.setenv("KFP_NAMESPACE", name)
    assert f"{name!r} is not the name of a namespace" in doctor().err

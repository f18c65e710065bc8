"""Which engine the doctor examines where the configuration names none."""

from __future__ import annotations

import pytest
from kubernetes.config import kube_config

from components.jobset.manifest import KIND
from pipelines.doctor import versions
from tests.kubernetes.faults import SILENCE
from tests.pipelines.doctor.conftest import IMAGE


@pytest.fixture
def of_auto(doctor):
    def call(*settings, options=()):
        return doctor("cluster.launcher=auto", IMAGE, *settings, options=options)

    return call


def test_auto_takes_jobset_where_both_are_served(kube, of_auto):
    kube.install_jobset()
    report = of_auto()
    assert (report.code, report.failed()) == (0, [])
    found = report["engine"]
    said = "auto takes jobset: the cluster serves JobSets"
    assert (found["state"], found["message"]) == ("ok", said)
    assert report["JobSet CRD"]["state"] == report["JobSet controller"]["state"] == "ok"
    assert "TFJob CRD" not in report.states()
    assert report["storage"]["state"] == "skipped"


@pytest.mark.usefixtures("kube")
def test_auto_takes_tfjob_where_it_is_alone(of_auto):
    report = of_auto()
    said = "auto takes tfjob: the cluster serves TFJobs, and no JobSets"
    assert (report["engine"]["message"], report.failed()) == (said, [])
    assert report["TFJob CRD"]["state"] == report["training operator"]["state"] == "ok"


def test_a_kind_that_this_user_may_not_list_is_taken_all_the_same(kube, of_auto):
    kube.install_jobset()
    kube.faults.add("GET .*/jobsets", 403)
    assert of_auto()["engine"]["message"].startswith("auto takes jobset: ")


def test_a_cluster_that_serves_neither(kube, of_auto):
    kube.server.control.kinds.clear()
    report = of_auto()
    assert (report.code, report.failed()) == (1, ["engine"])
    found = report["engine"]
    assert found["message"] == (
        "the cluster serves neither JobSets nor TFJobs: no engine is installed"
    )
    assert found["remedy"].startswith("kubectl apply --server-side --filename https://github.com/")
    # There is no job of which more could be said.
    assert {"admission", "quota", "JobSet CRD", "TFJob CRD"}.isdisjoint(report.states())


def test_an_api_that_fails(kube, of_auto):
    kube.faults.add("GET .*/jobsets", 500)
    report = of_auto()
    assert report.failed() == ["engine"]
    assert "cannot read whether the cluster serves JobSets (HTTP 500" in report["engine"]["message"]


def test_an_api_that_is_not_there(kube, of_auto):
    kube.faults.down = True
    report = of_auto()
    assert report.failed() == ["Kubernetes API"]
    assert report["engine"]["message"] == "it needs Kubernetes API"


def test_a_setting_that_the_engine_does_not_have(kube, of_auto):
    kube.install_jobset()
    report = of_auto("cluster.kubernetes.job.scheduling={gang: true}")
    assert report.failed() == ["engine"]
    assert "auto takes jobset: the cluster serves JobSets; " in report["engine"]["message"]
    assert "cluster.kubernetes.job.scheduling: not with" in report["engine"]["message"]
    assert report["engine"]["remedy"] == "flotilla doctor --set cluster.launcher=tfjob"


def test_without_a_cluster_auto_is_this_machine(kube, of_auto, monkeypatch):
    monkeypatch.delenv("KUBECONFIG")
    report = of_auto()
    assert (report.code, kube.server.requests) == (0, [])
    found = report["engine"]
    said = "trains on this machine, since neither a pod nor KUBECONFIG names a cluster; in the pods"
    assert (found["state"], said in found["message"]) == ("ok", True)
    said = "auto is local here; --kubernetes checks it anyway"
    assert report["Kubernetes API"]["message"] == said
    # It is where a run stores what it makes.
    assert report["storage"]["state"] == "ok"


def test_on_demand_auto_is_examined_where_a_run_would_be_local(kube, of_auto, monkeypatch):
    monkeypatch.delenv("KUBECONFIG")
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(kube.kubeconfig))
    report = of_auto(options=("--kubernetes",))
    said = "auto takes tfjob: the cluster serves TFJobs, and no JobSets; a run that is started here"
    assert report["engine"]["message"].startswith(said)
    assert report["TFJob CRD"]["state"] == "ok"


def test_the_launcher_names_the_oldest_version_that_the_doctor_accepts():
    assert f"install {versions.JOBSET.oldest} or newer" in KIND.outdated


def test_a_local_run_has_the_engine_examined_that_auto_takes(kube, doctor):
    kube.install_jobset()
    report = doctor(options=("--kubernetes",))
    assert report["engine"]["message"] == (
        "cluster.launcher is local; auto takes jobset: the cluster serves JobSets"
    )
    assert report["JobSet CRD"]["state"] == "ok"


@pytest.mark.slow
@pytest.mark.usefixtures("own_timeout")
def test_an_api_that_hangs(kube, of_auto):
    kube.faults.add("GET .*/jobsets", SILENCE)
    report = of_auto()
    assert report.failed() == ["engine"]
    assert "timed out" in report["engine"]["message"]
    assert report["loopback"]["state"] == "ok"

"""What a namespace refuses is said before the run, in the words of the API."""

from __future__ import annotations

from tests.kubernetes.admission import ENFORCE
from tests.kubernetes.cluster import NAMESPACE


def test_a_namespace_that_admits_everything(kube, of_job):
    said = f"{NAMESPACE} admits the job and a pod of each role"
    assert of_job()["admission"]["message"] == said
    kube.store.labels[NAMESPACE] = {ENFORCE: "restricted"}
    assert of_job()["admission"]["message"] == f"{said} (Pod Security restricted)"
    assert (kube.jobs(), kube.pods()) == ([], {})


def test_pods_that_pod_security_refuses(kube, of_job):
    kube.store.labels[NAMESPACE] = {ENFORCE: "restricted"}
    report = of_job("cluster.kubernetes.worker.security=image")
    assert report.failed() == ["admission"]
    found = report["admission"]
    assert found["message"].startswith(f"{NAMESPACE} refuses a Worker pod: pods ")
    assert 'violates PodSecurity "restricted:latest": allowPrivilegeEscalation' in found["message"]
    assert found["remedy"] == "flotilla doctor --set cluster.kubernetes.pod.security=restricted"


def test_a_service_account_that_may_not_be_read(kube, of_job):
    robot = "cluster.kubernetes.pod.service_account=robot"
    report = of_job(robot)
    assert report.failed() == ["service accounts of tasks"]
    assert report["admission"]["message"] == "it needs service accounts of tasks"
    kube.faults.add("GET .*/serviceaccounts/robot", 403)
    report = of_job(robot)
    assert report.failed() == ["admission"]
    assert 'serviceaccount "robot" not found' in report["admission"]["message"]
    said = f"kubectl get serviceaccounts --namespace {NAMESPACE}"
    assert report["admission"]["remedy"] == said


def test_a_full_quota(kube, of_job):
    tree = {"metadata": {"name": "team"}, "spec": {"hard": {"count/tfjobs.kubeflow.org": "0"}}}
    kube.store.create("resourcequotas", NAMESPACE, tree)
    found = of_job()["admission"]
    assert found["message"].startswith(f"{NAMESPACE} refuses the job: tfjobs.kubeflow.org ")
    assert found["remedy"] == f"kubectl describe resourcequotas --namespace {NAMESPACE}"


def test_who_may_not_make_pods_learns_the_level(kube, of_job):
    kube.store.labels[NAMESPACE] = {ENFORCE: "baseline"}
    kube.faults.add("POST .*/pods", 403)
    report = of_job()
    found = report["admission"]
    assert (report.code, found["state"]) == (0, "warn")
    assert f"whether {NAMESPACE} admits a PS pod could not be tried: pods is" in found["message"]
    assert found["message"].endswith("; it enforces Pod Security baseline")
    assert found["remedy"] == f"kubectl auth can-i create pods --namespace {NAMESPACE}"


def test_an_operator_whose_webhook_nobody_answers(kube, of_job):
    kube.server.control.is_webhook_silent = True
    report = of_job()
    assert report.failed() == ["admission"]
    assert "the training operator does not answer" in report["admission"]["message"]


def test_without_the_kind_nothing_is_tried(kube, of_job):
    kube.server.control.kinds.clear()
    report = of_job()
    assert report.failed() == ["TFJob CRD"]
    assert report["admission"]["message"] == "it needs TFJob CRD"
    assert report["training operator"]["state"] == "skipped"

"""Tests that requests that a namespace would reject are reported early, with the API's message."""

from tests.kubernetes.admission import ENFORCE
from tests.kubernetes.cluster import NAMESPACE
from tests.kubernetes.jobset_api import with_schema


def test_pods_that_pod_security_refuses(kube, of_job):
    kube.store.labels[NAMESPACE] = {ENFORCE: "restricted"}
    report = of_job("cluster.kubernetes.worker.security=image")
    assert report.failed() == ["admission"]
    found = report["admission"]
    assert found["message"].startswith(f"the namespace {NAMESPACE} refuses a worker pod: pods ")
    assert 'violates PodSecurity "restricted:latest": allowPrivilegeEscalation' in found["message"]
    assert found["remedy"] == "flotilla doctor --set cluster.kubernetes.pod.security=restricted"


def test_a_service_account_that_may_not_be_read(kube, of_job):
    robot = "cluster.kubernetes.pod.service_account=robot"
    report = of_job(robot)
    assert report.failed() == ["service accounts of tasks"]
    said = "a required check did not succeed: service accounts of tasks"
    assert report["admission"]["message"] == said
    kube.faults.add("GET .*/serviceaccounts/robot", 403)
    report = of_job(robot)
    assert report.failed() == ["admission"]
    assert 'serviceaccount "robot" not found' in report["admission"]["message"]
    said = f"kubectl get serviceaccounts --namespace {NAMESPACE}"
    assert report["admission"]["remedy"] == said


def test_a_full_quota_and_an_operator_whose_webhook_nobody_answers(kube, of_job):
    tree = {"metadata": {"name": "team"}, "spec": {"hard": {"count/tfjobs.kubeflow.org": "0"}}}
    kube.store.create("resourcequotas", NAMESPACE, tree)
    found = of_job()["admission"]
    assert found["message"].startswith(f"the namespace {NAMESPACE} refuses the job: tfjobs.")
    assert found["remedy"] == f"kubectl describe resourcequotas --namespace {NAMESPACE}"
    kube.store.remove("resourcequotas", NAMESPACE, "team")
    kube.server.control.is_webhook_silent = True
    report = of_job()
    assert report.failed() == ["admission"]
    assert "the training operator does not respond" in report["admission"]["message"]


def test_a_jobset_whose_controller_is_away(jobset, of_jobset):
    jobset.install_jobset(replicas=0)
    report = of_jobset()
    assert report.failed() == ["JobSet controller", "admission"]
    said = "the JobSet controller does not respond, so no job can be created: "
    assert report["admission"]["message"].startswith(said)
    assert "mjobset.kb.io" in report["admission"]["message"]
    assert report["admission"]["remedy"] == (
        "kubectl get deployments --all-namespaces --selector app.kubernetes.io/name=jobset"
    )


@with_schema
def test_a_kind_that_is_too_old_for_a_field(jobset, of_jobset):
    jobset.install_jobset(lacks=["spec.network.publishNotReadyAddresses"])
    report = of_jobset()
    assert report.failed() == ["admission"]
    found = report["admission"]
    said = "the JobSet of this cluster does not know a field of the job: "
    assert found["message"].startswith(said)
    assert "spec.network.publishNotReadyAddresses" in found["message"]
    assert found["remedy"].endswith("/v0.12.0/manifests.yaml")

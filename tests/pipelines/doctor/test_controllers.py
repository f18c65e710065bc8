"""A job that nobody takes up: the operator is not there, or Kueue does not look after TFJobs."""

from __future__ import annotations

import pytest

from tests.kubernetes.cluster import NAMESPACE
from tests.kubernetes.store import now

QUEUE = ("cluster.kubernetes.job.queue_name=gpus", "cluster.kubernetes.job.suspend=true")
NO_SIGN = f"{NAMESPACE} has no TFJob of the last day"


def with_job(kube, made, *conditions):
    spec = {"runPolicy": {"suspend": True}, "tfReplicaSpecs": {}}
    kube.store.create("tfjobs", NAMESPACE, {"metadata": {"name": "old"}, "spec": spec})

    def change(tree):
        tree["metadata"]["creationTimestamp"] = made
        tree["status"] = {"conditions": [{"type": "Created", **each} for each in conditions]}

    kube.store.change("tfjobs", NAMESPACE, "old", change)


@pytest.mark.usefixtures("kube")
def test_the_operator_is_seen_by_its_deployment(of_job):
    found = of_job()["training operator"]
    said = "the deployment training-operator in kubeflow is ready"
    assert (found["state"], found["message"]) == ("ok", said)


def test_an_operator_without_a_pod(kube, of_job):
    kube.install_operator(replicas=0)
    report = of_job()
    found = report["training operator"]
    assert report.failed() == ["training operator"]
    assert found["message"].endswith("kubeflow has no ready pod: nobody takes up a job")
    assert found["remedy"] == "kubectl describe deployment training-operator --namespace kubeflow"


def test_a_kind_whose_operator_is_gone(kube, of_job):
    kube.store.remove("deployments", "kubeflow", "training-operator")
    report = of_job()
    assert report["TFJob CRD"]["state"] == "ok"
    assert report.failed() == ["training operator"]
    found = report["training operator"]
    assert found["message"] == "no deployment of the cluster is that of an operator"
    assert found["remedy"].startswith("kubectl apply --server-side --kustomize")


def test_an_operator_that_was_installed_in_another_way(kube, of_job):
    kube.store.remove("deployments", "kubeflow", "training-operator")
    container = {"image": "registry.example.com/kubeflow/training-operator:1"}
    tree = {
        "metadata": {"name": "ml-jobs"},
        "spec": {"template": {"spec": {"containers": [container]}}},
        "status": {"readyReplicas": 1},
    }
    kube.store.create("deployments", "ml", tree)
    said = "the deployment ml-jobs in ml is ready"
    assert of_job()["training operator"]["message"] == said


def test_where_only_its_own_namespace_may_be_read(kube, of_job):
    kube.faults.add("GET /apis/apps/v1/deployments", 403)
    assert of_job()["training operator"]["state"] == "ok"


def test_where_no_deployment_may_be_read_other_jobs_show_it(kube, of_job):
    kube.operator.down = True
    kube.faults.add("/deployments", 403)
    found = of_job()["training operator"]
    assert (found["state"], NO_SIGN in found["message"]) == ("warn", True)
    assert found["remedy"].startswith("kubectl get deployments --all-namespaces --selector")
    with_job(kube, "2020-01-01T00:00:00Z")
    found = of_job()["training operator"]
    assert found["state"] == "warn"
    assert found["message"].startswith("the job old of 2020-01-01 00:00:00+00:00 has no condition")
    with_job_of = {"lastUpdateTime": now(), "lastTransitionTime": "2020-01-01T00:00:00Z"}
    kube.store.remove("tfjobs", NAMESPACE, "old")
    with_job(kube, "2020-01-01T00:00:00Z", with_job_of)
    found = of_job()["training operator"]
    assert (found["state"], found["message"][:28]) == ("ok", "it has taken up the job old ")
    kube.store.remove("tfjobs", NAMESPACE, "old")
    with_job(kube, "2020-01-01T00:00:00Z", {"lastTransitionTime": "2020-01-01T00:00:00Z"})
    assert NO_SIGN in of_job()["training operator"]["message"]


@pytest.fixture
def kueue(kube):
    """Kueue with its integration of TFJobs, and a queue."""
    kube.server.control.install_kueue("batch/job", "kubeflow.org/tfjob")
    kube.store.create("localqueues", NAMESPACE, {"metadata": {"name": "gpus"}})
    return kube


@pytest.mark.usefixtures("kueue")
def test_a_queue_of_kueue(of_job):
    assert of_job(*QUEUE)["Kueue"]["message"] == "the job waits in gpus"
    assert "Kueue" not in of_job().states()


def test_without_kueue(kube, of_job):
    report = of_job(*QUEUE)
    assert report.failed() == ["Kueue"]
    assert "it waits until someone resumes it" in report["Kueue"]["message"]
    found = of_job(QUEUE[0])["Kueue"]
    said = "Kueue is not installed: nobody reads the queue gpus"
    assert (found["state"], found["message"]) == ("warn", said)
    assert kube.store.all("tfjobs", NAMESPACE) == []


def test_an_absent_queue_and_none_at_all(kueue, of_job):
    kueue.store.remove("localqueues", NAMESPACE, "gpus")
    report = of_job(*QUEUE)
    assert report.failed() == ["Kueue"]
    assert report["Kueue"]["message"] == f"there is no local queue gpus in {NAMESPACE}"
    assert "names no queue" in of_job(QUEUE[1])["Kueue"]["message"]


def test_kueue_that_does_not_look_after_tfjobs(kueue, of_job):
    kueue.server.control.frameworks = {"batch/job"}
    report = of_job(*QUEUE)
    assert report.failed() == ["Kueue"]
    assert report["Kueue"]["message"].endswith("frameworks): the job stays suspended for ever")
    assert report["Kueue"]["remedy"].startswith("kubectl edit configmap kueue-manager-config")
    found = of_job(QUEUE[0])["Kueue"]
    assert (found["state"], "does not wait for its quota" in found["message"]) == ("warn", True)


def test_its_settings_where_a_job_may_not_be_tried(kube, of_job):
    kube.server.control.install_kueue("batch/job")
    kube.store.create("localqueues", NAMESPACE, {"metadata": {"name": "gpus"}})
    kube.faults.add("POST .*dryRun", 403)
    # The commented line of the settings names TFJobs.
    assert of_job(*QUEUE)["Kueue"]["state"] == "fail"
    kube.faults.add("GET .*/configmaps/", 403)
    found = of_job(*QUEUE)["Kueue"]
    assert (found["state"], "could not be seen" in found["message"]) == ("warn", True)

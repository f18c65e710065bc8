"""Only the pods of the same job reach its tasks, where the launcher may make network policies."""

from __future__ import annotations

import logging

from components.kubernetes import names
from components.kubernetes.owned_objects import isolate, network_policy
from components.kubernetes.pods.template import Place
from components.tfjob.engine import TFJobs
from components.tfjob.manifest import KIND
from tests.components.kubernetes.attempts import Attempt, job_of, settings
from tests.kubernetes.cluster import NAMESPACE
from tests.kubernetes.control import USER

RIGHT = "create networkpolicies"


def policies(kube):
    return kube.store.all("networkpolicies", NAMESPACE)


def is_isolated(pod):
    return names.NETWORK in pod["metadata"]["labels"]


def test_a_job_has_a_policy_that_admits_its_own_pods_and_goes_with_it(kube):
    attempt = Attempt(job_of(settings()))
    pods = kube.all_pods()
    [policy] = kube.store.wait(lambda: policies(kube))
    assert all(map(is_isolated, pods.values()))
    job = kube.job()["metadata"]
    assert policy["metadata"]["name"] == f"{job['name']}-{job['uid'][:8]}"
    assert policy["metadata"]["labels"][names.RUN] == job["labels"][names.RUN]
    assert policy["metadata"]["labels"][f"{names.APP}part-of"] == "flotilla"
    same = {"podSelector": {"matchLabels": {KIND.label: job["name"]}}}
    assert policy["spec"] == {**same, "policyTypes": ["Ingress"], "ingress": [{"from": [same]}]}
    kube.run_all()
    kube.finish("chief-0", 0)
    attempt.succeed()
    kube.wait_until_deleted()
    assert not policies(kube)


def test_without_the_permission_it_goes_on_and_says_so_once(kube, caplog):
    caplog.set_level(logging.WARNING)
    kube.server.control.deny(USER, RIGHT)
    attempt = Attempt(job_of(settings()))
    assert not any(map(is_isolated, kube.all_pods().values()))
    kube.run_all()
    kube.finish("chief-0", 0)
    attempt.succeed()
    assert not [each for each in kube.server.requests if "networkpolicies" in each]
    said = [each for each in caplog.messages if "create networkpolicies.networking.k8s.io" in each]
    assert len(said) == 1


def test_a_policy_that_is_refused_leaves_no_open_job(kube):
    kube.faults.add("POST .*networkpolicies", 403)
    message = Attempt(job_of(settings())).failure()
    assert "the network policy of the job" in message
    assert 'cannot create resource "networkpolicies"' in message
    kube.wait_until_deleted()


def test_a_retry_that_may_make_policies_adopts_the_job_of_one_that_may_not(kube):
    job = TFJobs().manifest(job_of(settings()), Place(namespace=NAMESPACE))
    kube.store.create("tfjobs", NAMESPACE, job)
    attempt = Attempt(job_of(settings()))
    kube.run_all()
    kube.wait_renewed()
    kube.finish("chief-0", 0)
    attempt.succeed()
    assert not [each for each in kube.server.requests if each.startswith("POST /apis/kubeflow")]


def test_a_job_of_another_launcher_gets_no_policy():
    template = {"metadata": {"labels": {}}, "spec": {}}
    job = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "TFJob",
        "metadata": {"name": "job", "uid": "0123456789", "labels": {"team": "a"}},
        "spec": {"tfReplicaSpecs": {"Worker": {"template": template}}},
    }
    assert network_policy(KIND, job, [template]) is None
    isolate([template])
    policy = network_policy(KIND, job, [template])
    assert policy is not None
    assert policy["metadata"]["name"] == "job-01234567"
    assert policy["metadata"]["labels"] == {}

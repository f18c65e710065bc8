"""A namespace refuses pods as a real API server does, with the words of its event on the job."""

from __future__ import annotations

import pytest
from kubernetes import client

from tests.kubernetes.cluster import NAMESPACE, tfjob
from tests.kubernetes.test_api_server import ARGS


def quota(kube, hard, **status):
    tree = {"metadata": {"name": "team"}, "spec": {"hard": hard}, "status": status}
    kube.store.create("resourcequotas", NAMESPACE, tree)


def events(kube):
    kube.store.wait(lambda: kube.store.all("events"))
    job = kube.job()["metadata"]
    found = kube.store.all("events", NAMESPACE, fields=f"involvedObject.uid={job['uid']}")
    return [(each["reason"], each["message"]) for each in found]


def test_an_absent_service_account_leaves_a_job_without_pods_and_conditions(kube, api):
    job = tfjob(roles={"Chief": 1, "Worker": 1})
    pod = job["spec"]["tfReplicaSpecs"]["Chief"]["template"]["spec"]
    pod["serviceAccountName"] = "robot"
    client.CustomObjectsApi(api).create_namespaced_custom_object(*ARGS, job)
    assert events(kube) == [
        (
            "FailedCreatePod",
            'Error creating: pods "job-chief-0" is forbidden: error looking up service account '
            'models/robot: serviceaccount "robot" not found',
        )
    ]
    assert (kube.job().get("status"), kube.pods()) == (None, {})
    kube.store.create("serviceaccounts", NAMESPACE, {"metadata": {"name": "robot"}})
    assert set(kube.all_pods()) == {"chief-0", "worker-0"}


def test_a_full_quota_refuses_what_is_beyond_it(kube, api):
    quota(kube, {"pods": "2"}, used={"pods": "1"})
    client.CustomObjectsApi(api).create_namespaced_custom_object(*ARGS, tfjob())
    assert events(kube) == [
        (
            "FailedCreatePod",
            'Error creating: pods "job-ps-0" is forbidden: exceeded quota: team, requested: '
            "pods=1, used: pods=2, limited: pods=2",
        )
    ]
    assert set(kube.pods()) == {"chief-0"}


@pytest.mark.parametrize(
    ("hard", "words"),
    [
        ({"requests.cpu": "1"}, "failed quota: team: must specify requests.cpu for: tensorflow"),
        ({"limits.memory": "1"}, "failed quota: team: must specify limits.memory for: tensorflow"),
        ({"requests.nvidia.com/gpu": "0"}, ""),
    ],
)
def test_a_dry_run_says_what_would_be_refused_and_leaves_nothing(kube, api, hard, words):
    quota(kube, hard)
    version = kube.store.version()
    core = client.CoreV1Api(api)
    pod = {"metadata": {"name": "x"}, "spec": {"containers": [{"name": "tensorflow"}]}}
    if words:
        with pytest.raises(client.ApiException, match=words) as caught:
            core.create_namespaced_pod(NAMESPACE, pod, dry_run="All")
        assert caught.value.status == 403
    else:
        assert core.create_namespaced_pod(NAMESPACE, pod, dry_run="All").metadata.uid
    assert kube.store.version() == version

"""Tests that the job's events are used to explain pods that the operator cannot create."""

import pytest

from flotilla.components.kubernetes import kubernetes_events, supervisor
from flotilla.components.kubernetes.kubernetes_events import is_final
from tests.components.kubernetes.attempts import Attempt, job_of, settings, watching_attempt
from tests.kubernetes import pods
from tests.kubernetes.cluster import NAMESPACE


@pytest.fixture(autouse=True)
def _often(monkeypatch):
    monkeypatch.setattr(supervisor, "CHECK_SECONDS", 0.2)
    monkeypatch.setattr(kubernetes_events, "LOOK_SECONDS", 0.2)


def quota(kube, count):
    tree = {"metadata": {"name": "team"}, "spec": {"hard": {"pods": str(count)}}}
    return kube.store.create("resourcequotas", NAMESPACE, tree)


def events_are_read(kube):
    return [each for each in kube.server.requests if "/events?" in each]


def with_account(name, **deadlines):
    tree = settings(**deadlines)
    tree["cluster"]["kubernetes"]["pod"] = {"service_account": name}
    return job_of(tree)


def test_an_absent_service_account_fails_the_step_at_once(kube):
    message = Attempt(with_account("robot")).failure()
    job = message.split()[7].rstrip(":")
    assert message == (
        f'Kubernetes rejects the pods of the job {job}: Error creating: pods "{job}-ps-0" is '
        f"forbidden: error looking up service account {NAMESPACE}/robot: serviceaccount "
        '"robot" not found'
    )
    kube.wait_until_deleted()


def test_a_full_quota_is_said_and_waited_for(kube, caplog):
    quota(kube, 1)
    attempt = watching_attempt(kube, operator=1)
    kube.store.wait(lambda: len(events_are_read(kube)) > 2)
    assert attempt.is_alive()
    [warning] = [each for each in caplog.messages if "cannot create all pods" in each]
    assert "exceeded quota: team, requested: pods=1, used: pods=1, limited: pods=1" in warning
    kube.store.delete("resourcequotas", NAMESPACE, "team")
    kube.run_all()
    kube.finish("chief-0", 0)
    attempt.succeed()


def test_a_quota_that_stays_full_ends_the_job_with_its_words(kube):
    quota(kube, 1)
    message = watching_attempt(kube, queueing=2).failure()
    assert message.startswith(
        "2 of 3 pods were not created within 2 s (cluster.kubernetes.deadlines."
    )
    assert "last events: FailedCreatePod: Error creating: pods" in message
    kube.wait_until_deleted()


def test_a_job_that_trains_goes_on_without_a_pod_that_is_refused(kube):
    kube.store.create("serviceaccounts", NAMESPACE, {"metadata": {"name": "robot"}})
    attempt = Attempt(with_account("robot"))
    kube.wait_watched()
    kube.run_all()
    kube.store.wait(lambda: sum("/log?" in each for each in kube.server.requests) >= 3)
    kube.store.delete("serviceaccounts", NAMESPACE, "robot")
    pods.finished(kube.store, kube.pod("worker-0"), 137)
    kube.store.wait(lambda: events_are_read(kube))
    kube.finish("chief-0", 0)
    attempt.succeed()


def test_without_permission_for_events_a_quota_is_waited_for(kube):
    kube.faults.add("GET .*/events", 403)
    quota(kube, 1)
    message = watching_attempt(kube, queueing=2).failure()
    assert message.startswith("2 of 3 pods were not created within 2 s")
    assert "the launcher lacks permission to list events" in message


def test_events_of_an_earlier_job_of_this_name_are_not_read(kube):
    assert "rejects the pods" in Attempt(with_account("robot")).failure()
    kube.store.create("serviceaccounts", NAMESPACE, {"metadata": {"name": "robot"}})
    assert kube.store.all("events", NAMESPACE)
    quota(kube, 1)
    message = Attempt(with_account("robot", queueing=2)).failure()
    assert "exceeded quota" in message
    assert "service account" not in message


@pytest.mark.parametrize(
    ("message", "final"),
    [
        ('pods "x" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot', True),
        ('pods "x" is forbidden: error looking up service account a/b: serviceaccount "b"', True),
        ('pods "x" is forbidden: no PriorityClass with name high was found', True),
        ('pods "x" is forbidden: failed quota: q: must specify requests.cpu for: a', True),
        ('pods "x" is forbidden: maximum cpu usage per Pod is 1, but limit is 2', True),
        ('admission webhook "policy.example.com" denied the request: no', True),
        ('Pod "x" is invalid: spec.tolerations[0].operator: Unsupported value: "A"', True),
        ('pods "x" is forbidden: exceeded quota: q, requested: pods=1, used: pods=4', False),
        ('object is being deleted: pods "x-worker-0" already exists', False),
        ('Internal error occurred: failed calling webhook "a.b": connection refused', False),
        ("etcdserver: request timed out", False),
    ],
)
def test_which_refusals_are_final(message, final):
    assert is_final(f"Error creating: {message}") == final

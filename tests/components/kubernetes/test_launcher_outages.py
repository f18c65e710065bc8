"""An API that is unreachable, busy or refuses, and watches that expire: retries, or one message."""

from __future__ import annotations

import pytest

from components.kubernetes import launcher, supervisor
from components.kubernetes.api import watch
from components.kubernetes.launcher import delete_jobs
from components.tfjob.engine import TFJobs
from tests.components.kubernetes.attempts import Attempt, job_of, settings, watching_attempt
from tests.kubernetes.cluster import NAMESPACE
from trainer.config.schema import Config


@pytest.mark.slow
def test_an_outage_of_the_api_loses_no_line(kube, capfd):
    attempt = watching_attempt(kube)
    kube.run_all()
    kube.write_log("chief-0", "before")
    kube.server.go_down()
    kube.write_log("chief-0", "meanwhile")
    kube.finish("chief-0", 0)
    kube.store.wait(lambda: kube.faults.hits.get("down", 0) >= 6)
    kube.faults.clear()
    attempt.succeed()
    kube.wait_until_deleted()
    out = capfd.readouterr().out.splitlines()
    assert [line for line in out if "chief-0" in line] == [
        "[chief-0] before",
        "[chief-0] meanwhile",
    ]


@pytest.mark.slow
def test_an_unreachable_api_fails_after_its_deadline(kube, monkeypatch):
    monkeypatch.setattr(launcher, "REMOVAL_SECONDS", 1)
    attempt = watching_attempt(kube, unreachable=2)
    kube.run_all()
    kube.server.go_down()
    message = attempt.failure()
    assert "has not answered for 2 s (cluster.kubernetes.deadlines.unreachable)" in message


@pytest.mark.parametrize(
    "status", [429, *(pytest.param(code, marks=pytest.mark.slow) for code in (500, 503)), 0]
)
def test_a_busy_api_is_retried(kube, status):
    kube.faults.add("(POST|GET|DELETE) .*tfjobs", status, times=3, headers={"Retry-After": "1"})
    attempt = watching_attempt(kube)
    kube.run_all()
    kube.finish("chief-0", 0)
    attempt.succeed()
    kube.wait_until_deleted()


def test_a_lost_answer_creates_no_second_job(kube):
    kube.faults.add("POST .*tfjobs", 500, late=True, times=1)
    attempt = watching_attempt(kube)
    kube.run_all()
    kube.finish("chief-0", 0)
    attempt.succeed()
    assert (
        len([each for each in kube.server.requests if each.startswith("POST /apis/kubeflow")]) == 2
    )
    kube.wait_until_deleted()


def test_an_expired_watch_lists_again(kube, monkeypatch):
    monkeypatch.setattr(watch, "FIRST_WAIT", 0.05)
    attempt = watching_attempt(kube)
    kube.run_all()
    kube.store.wait(lambda: sum("watch=" in each for each in kube.server.requests) >= 2)
    with kube.store.changed:
        # The events of the outage have expired: only the list shows their result.
        kube.server.drop_streams()
        kube.finish("worker-0", 0)
        kube.finish("chief-0", 0)
        kube.store.expire()
    attempt.succeed()
    kube.wait_until_deleted()


def test_without_permission_for_events_everything_else_works(kube):
    kube.faults.add("GET .*/events", 403)
    attempt = watching_attempt(kube, max_restarts=0)
    kube.run_all()
    kube.finish("worker-0", 137)
    message = attempt.failure()
    assert "its events may not be read with these permissions" in message
    kube.wait_until_deleted()


def test_without_permission_to_watch_the_message_names_the_remedy(kube):
    kube.faults.add("GET .*pods.*watch=", 403)
    assert "deploy/ holds the permissions" in Attempt(job_of(settings())).failure()
    kube.wait_until_deleted()


@pytest.mark.slow
def test_an_expired_token_is_retried(kube):
    kube.faults.add("GET .*(pods|tfjobs)", 401, times=4)
    attempt = watching_attempt(kube)
    kube.run_all()
    kube.finish("chief-0", 0)
    attempt.succeed()
    kube.wait_until_deleted()


def test_pods_that_no_watch_has_seen_are_not_waited_for(kube, monkeypatch):
    monkeypatch.setattr(watch, "FIRST_WAIT", 300)
    monkeypatch.setattr(supervisor, "CHECK_SECONDS", 0.2)
    # Their watch begins after the job: what was deleted meanwhile it never reports.
    kube.faults.add(r"GET .*/pods\?", 503, times=1)
    attempt = Attempt(job_of(settings()))
    kube.store.wait(lambda: kube.faults.hits)
    kube.run_all()
    kube.finish("chief-0", 0)
    attempt.succeed()
    kube.wait_until_deleted()


def test_a_refused_heartbeat_is_retried(kube):
    attempt = watching_attempt(kube, heartbeat=1)
    kube.run_all()
    # The first one has to be accepted.
    kube.wait_renewed()
    kube.faults.add("PATCH .*leases", 403, times=2)
    kube.store.wait(lambda: kube.faults.hits.get("PATCH .*leases") == 2)
    [before] = kube.leases()
    kube.store.wait(lambda: kube.leases() != [before])
    assert kube.faults.hits == {"PATCH .*leases": 2}
    kube.finish("chief-0", 0)
    attempt.succeed()


def test_without_the_kind_the_message_names_what_to_install(kube):
    kube.server.control.kinds.clear()
    message = Attempt(job_of(settings())).failure()
    assert "tfjobs: Not Found (HTTP 404); this cluster does not serve TFJobs" in message
    assert "its CRD tfjobs.kubeflow.org, is not installed" in message
    assert "permission" not in message
    # Where there is no kind, a run has left no job.
    assert delete_jobs(TFJobs(), Config().cluster.kubernetes, "run-1") == []


def test_without_the_namespace_the_message_names_it(kube):
    kube.server.control.absent.add(NAMESPACE)
    message = Attempt(job_of(settings())).failure()
    assert f'namespaces "{NAMESPACE}" not found (HTTP 404); correct the namespace' in message


def test_a_job_that_admission_refuses_is_not_a_missing_permission(kube):
    hard = {"count/tfjobs.kubeflow.org": "0"}
    quota = {"metadata": {"name": "team"}, "spec": {"hard": hard}}
    kube.store.create("resourcequotas", NAMESPACE, quota)
    message = Attempt(job_of(settings())).failure()
    assert "exceeded quota: team, requested: count/tfjobs.kubeflow.org=1" in message
    assert "permission" not in message


@pytest.mark.slow
def test_an_operator_that_does_not_answer_its_webhook_is_named(kube):
    kube.server.control.is_webhook_silent = True
    message = Attempt(job_of(settings(operator=1))).failure()
    assert message.startswith("the training operator has not reacted for 1 s (cluster.kubernetes.")
    assert 'no endpoints available for service "training-operator"; is it running? kubectl' in (
        message
    )
    kube.server.control.is_webhook_silent = False
    attempt = watching_attempt(kube)
    kube.run_all()
    kube.finish("chief-0", 0)
    attempt.succeed()


def test_without_permission_for_jobs_the_message_names_the_remedy(kube):
    kube.faults.add("POST .*tfjobs", 403)
    assert "deploy/ holds the permissions" in Attempt(job_of(settings())).failure()

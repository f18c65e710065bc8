"""No job is left an orphan: signals, adoption, the exit step, the owner reference, each alone."""

from __future__ import annotations

import signal

import pytest

from components.kubernetes.heartbeat import Heartbeat
from components.kubernetes.launcher import delete_jobs
from components.kubernetes.pods.template import Place
from components.tfjob.engine import TFJobs
from tests.components.kubernetes.attempts import Attempt, job_of, settings, step, without_beats
from tests.kubernetes import pods
from tests.kubernetes.cluster import NAMESPACE
from trainer.config.schema import Config
from trainer.errors import INTERRUPTED, UserError

pytestmark = pytest.mark.cluster
KUBERNETES = Config().cluster.kubernetes


def test_cancelled_while_queueing_the_first_request_is_the_delete(kube):
    with step(kube, settings()) as process:
        kube.wait_watched()
        kube.all_pods()
        before = len(kube.server.requests)
        process.signal()
        code, _, message = process.end()
    assert (code, message) == (INTERRUPTED, "interrupted before training began")
    assert next(without_beats(kube.server.requests[before:])).startswith("DELETE ")
    kube.wait_until_deleted()


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_cancelled_the_launcher_waits_for_the_last_checkpoint(kube, number):
    kube.store.graceful.add("pods")
    with step(kube, settings()) as process:
        kube.wait_watched()
        kube.run_all()
        kube.store.wait(lambda: any("chief-0/log" in each for each in kube.server.requests))
        process.signal(number)
        kube.store.wait(lambda: not kube.jobs())
        kube.write_log("chief-0", "saving")
        kube.finish("chief-0", 130, "interrupted at global step 7; checkpoint gs://b/step-7")
        for pod in kube.pods().values():
            kube.store.remove("pods", NAMESPACE, pod["metadata"]["name"])
        code, out, message = process.end()
    assert (code, message) == (130, "interrupted at global step 7; checkpoint gs://b/step-7")
    assert "[chief-0] saving" in out


def test_a_second_signal_does_not_wait(kube):
    kube.store.graceful.add("pods")
    with step(kube, settings()) as process:
        kube.wait_watched()
        kube.run_all()
        process.signal()
        kube.store.wait(lambda: not kube.jobs())
        process.signal()
        code, _, message = process.end()
    assert (code, message) == (130, "interrupted twice; the last published checkpoint is intact")


def test_cancelled_while_the_api_is_unreachable_the_delete_is_retried(kube):
    with step(kube, settings()) as process:
        kube.wait_watched()
        kube.run_all()
        kube.faults.add("DELETE", 503, times=3)
        process.signal()
        code, _, _ = process.end()
    assert code == INTERRUPTED
    kube.wait_until_deleted()


def test_the_retry_of_a_killed_step_adopts_its_job(kube):
    with step(kube, settings()) as process:
        kube.wait_watched()
        kube.run_all()
        uid, heartbeat = kube.job()["metadata"]["uid"], kube.wait_renewed()
        process.signal(signal.SIGKILL)
        assert process.end()[0] == -signal.SIGKILL
    assert kube.job()["metadata"]["uid"] == uid
    retry = Attempt(job_of(settings()))
    kube.wait_renewed(but=heartbeat)
    kube.finish("chief-0", 0)
    retry.succeed()
    kube.wait_until_deleted()


def test_the_exit_step_deletes_only_the_jobs_of_its_run(kube):
    with step(kube, settings()) as process:
        kube.all_pods()
        process.signal(signal.SIGKILL)
        process.end()
    other = Attempt(job_of(settings(), root="gs://b/run-2"))
    kube.store.wait(lambda: len(kube.store.all("pods", NAMESPACE)) == 6)
    assert len(delete_jobs(TFJobs(), KUBERNETES, "run-1")) == 1
    assert delete_jobs(TFJobs(), KUBERNETES, "run-1") == []
    assert [job["metadata"]["labels"]["flotilla/run"] for job in kube.jobs()] == ["run-2"]
    # Not all of them: a worker that ends before training is over has failed.
    pods.finished(kube.store, kube.pod("chief-0"), 0)
    other.succeed()
    kube.wait_until_deleted()


def test_one_job_that_may_not_be_deleted_leaves_no_other_one(kube):
    made = TFJobs().manifest(job_of(settings()), Place(namespace=NAMESPACE))
    for name in ("first", "second"):
        kube.store.create(
            "tfjobs", NAMESPACE, {**made, "metadata": {**made["metadata"], "name": name}}
        )
    kube.faults.add("DELETE .*tfjobs/first", 403)
    with pytest.raises(UserError, match="cannot delete the jobs with the label"):
        delete_jobs(TFJobs(), KUBERNETES, "run-1")
    assert [job["metadata"]["name"] for job in kube.jobs()] == ["first"]


def test_a_job_that_is_deleted_before_it_is_watched_ends_the_step(kube, monkeypatch):
    hold = Heartbeat.hold

    def hold_and_lose(heartbeat, job, *limits):
        hold(heartbeat, job, *limits)
        kube.store.remove("tfjobs", NAMESPACE, job["metadata"]["name"])

    monkeypatch.setattr(Heartbeat, "hold", hold_and_lose)
    assert "was deleted by someone else" in Attempt(job_of(settings())).failure()
    kube.wait_until_deleted()


def test_the_deletion_of_the_steps_pod_deletes_the_job(kube, monkeypatch):
    pod = kube.store.create("pods", NAMESPACE, {"metadata": {"name": "step"}, "status": {}})
    monkeypatch.setenv("KFP_POD_NAME", "step")
    monkeypatch.setenv("KFP_POD_UID", pod["metadata"]["uid"])
    attempt = Attempt(job_of(settings()))
    kube.wait_watched()
    kube.store.remove("pods", NAMESPACE, "step")
    assert "was deleted by someone else" in attempt.failure()
    kube.wait_until_deleted()


def test_a_job_that_is_deleted_before_its_first_heartbeat_is_said_to_be(kube):
    kube.faults.add("PATCH .*leases", 404)
    message = Attempt(job_of(settings())).failure()
    assert "was deleted by someone else, which ends the run; Retry in the KFP UI" in message
    assert "namespace" not in message

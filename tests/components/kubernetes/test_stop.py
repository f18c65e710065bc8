"""Tests how a cancelled job is stopped: by a request to one task, or else by deleting the job."""

import signal
import threading

import pytest

from flotilla.components.kubernetes import engine, names
from flotilla.components.kubernetes.client import Api, connect
from flotilla.components.kubernetes.launcher import delete_jobs
from flotilla.components.kubernetes.tfjob import TFJobs
from flotilla.trainer.config.schema import Config
from tests.components.kubernetes.attempts import (
    TWICE,
    Attempt,
    job_of,
    run_to_end,
    running_step,
    settings,
    step,
)
from tests.kubernetes.cluster import NAMESPACE

pytestmark = pytest.mark.cluster
MESSAGE = "interrupted at global step 7; checkpoint gs://b/step-7"


def asked_to_stop(kube):
    kube.store.wait(kube.stop_is_asked)


@pytest.fixture
def training(kube):
    """Start a step whose job is running and whose pods end with a grace period."""
    kube.store.graceful.add("pods")
    with running_step(kube) as process:
        kube.wait_followed("chief-0")
        yield process


def save(kube):
    """End the chief as its guard does, with a last checkpoint and a failing exit code."""
    kube.finish("chief-0", 1, MESSAGE)


def test_the_chief_saves_before_the_job_is_deleted(kube, training):
    before = len(kube.server.requests)
    training.signal()
    asked_to_stop(kube)
    # The signal handler must request the stop before it does anything else.
    writes = [r for r in kube.server.requests[before:] if not r.startswith("GET")]
    assert writes[0].startswith("PATCH")
    assert kube.jobs()
    kube.write_log("chief-0", names.STOPPING)
    save(kube)
    kube.store.wait(lambda: not kube.jobs())
    kube.end_deleted()
    assert training.end()[::2] == (130, MESSAGE)
    kube.wait_until_deleted()


def test_a_chief_that_takes_its_time_is_waited_for(kube, monkeypatch):
    job = running_job(kube)
    api = Api(connect(), NAMESPACE)
    monkeypatch.setattr(engine, "ANSWER_SECONDS", 0.0)
    kube.write_log("chief-0", names.STOPPING)
    looked = threading.Event()
    polls = []

    def pause(_seconds):
        polls.append(kube.store.version())
        if len(polls) > 3:
            looked.set()
        return False

    waiting = threading.Thread(target=TFJobs().stop(job).wait, args=(api, pause), daemon=True)
    waiting.start()
    assert looked.wait(60)
    assert waiting.is_alive()
    save(kube)
    waiting.join(60)
    assert not waiting.is_alive()


def test_without_an_answer_the_job_is_not_waited_for(kube, monkeypatch):
    job = running_job(kube)
    monkeypatch.setattr(engine, "ANSWER_SECONDS", 0.0)
    polls = []
    TFJobs().stop(job).wait(Api(connect(), NAMESPACE), polls.append)
    assert len(polls) == 1
    assert kube.jobs()


def running_job(kube):
    with step(kube, settings()) as process:
        kube.all_pods()
        kube.wait_renewed()
        process.signal(signal.SIGKILL)
        process.end()
    kube.run_all()
    return kube.job()


def test_where_a_stop_is_refused_the_job_is_deleted_at_once(kube, training):
    kube.faults.add("PATCH", 403)
    training.signal()
    kube.store.wait(lambda: not kube.jobs())
    kube.end_deleted({"chief-0": 130})
    assert training.end()[0] == 130
    kube.wait_until_deleted()


def test_a_second_signal_deletes_the_job_at_once(kube, training):
    training.signal()
    asked_to_stop(kube)
    kube.write_log("chief-0", names.STOPPING)
    training.signal()
    kube.store.wait(lambda: not kube.jobs())
    assert training.end()[::2] == TWICE


def test_the_exit_step_lets_the_chief_save(kube):
    running_job(kube)
    ended = threading.Thread(
        target=delete_jobs, args=(TFJobs(), Config().cluster.kubernetes, "run-1"), daemon=True
    )
    ended.start()
    asked_to_stop(kube)
    save(kube)
    ended.join(60)
    assert not ended.is_alive()
    kube.wait_until_deleted()


def test_a_job_that_is_being_stopped_is_not_adopted(kube):
    job = running_job(kube)
    asked = {"metadata": {"annotations": {names.STOP: job["metadata"]["uid"]}}}
    kube.store.patch("leases", NAMESPACE, job["metadata"]["name"], asked)
    retry = Attempt(job_of(settings()))
    looks = "component%3Dchief"
    kube.store.wait(lambda: sum(looks in each for each in kube.server.requests) >= 2)
    assert kube.job()["metadata"]["uid"] == job["metadata"]["uid"]
    save(kube)
    kube.store.wait(
        lambda: [each for each in kube.jobs() if each["metadata"]["uid"] != job["metadata"]["uid"]]
    )
    run_to_end(kube, retry)


def test_a_job_that_was_adopted_a_moment_ago_is_stopped_and_not_deleted(kube):
    job = running_job(kube)
    earlier = kube.wait_renewed()
    # The launcher that adopts the job is cancelled before it sees any pods.
    kube.faults.add(r"GET .*/pods\?(?!.*component)", 503)
    before = len(kube.server.requests)
    with step(kube, settings()) as process:
        kube.wait_renewed(but=earlier)
        process.signal()
        asked_to_stop(kube)
        kube.faults.clear()
        assert kube.job()["metadata"]["uid"] == job["metadata"]["uid"]
        assert not [r for r in kube.server.requests[before:] if r.startswith("DELETE")]
        kube.write_log("chief-0", names.STOPPING)
        save(kube)
        assert process.end()[::2] == (130, MESSAGE)
    kube.wait_until_deleted()

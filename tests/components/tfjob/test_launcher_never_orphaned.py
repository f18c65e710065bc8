"""Each line of defence alone: signals, the retry, the exit step, the owner."""

from __future__ import annotations

import signal

import pytest

from components.tfjob.launcher import delete_jobs
from tests.components.tfjob.attempts import Attempt, job_of, settings, step
from tests.kubernetes import pods
from tests.kubernetes.cluster import NAMESPACE
from trainer.config.schema import Config
from trainer.errors import INTERRUPTED

pytestmark = pytest.mark.cluster
KUBERNETES = Config().cluster.kubernetes


def test_cancelled_while_queueing_the_first_act_is_the_delete(kube):
    with step(kube, settings()) as process:
        kube.wait_watched()
        kube.all_pods()
        before = len(kube.server.requests)
        process.ask()
        code, _, said = process.end()
    assert (code, said) == (INTERRUPTED, "interrupted before training began")
    assert kube.server.requests[before].startswith("DELETE ")
    kube.wait_gone()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_cancelled_while_saving_the_last_checkpoint_is_waited_for(kube, number):
    kube.store.graceful.add("pods")
    with step(kube, settings()) as process:
        kube.wait_watched()
        kube.run_all()
        kube.store.wait(lambda: any("chief-0/log" in each for each in kube.server.requests))
        process.ask(number)
        kube.store.wait(lambda: not kube.jobs())
        kube.say("chief-0", "saving")
        kube.finish("chief-0", 130, "interrupted at global step 7; checkpoint gs://b/step-7")
        for pod in kube.pods().values():
            kube.store.remove("pods", NAMESPACE, pod["metadata"]["name"])
        code, out, said = process.end()
    assert (code, said) == (130, "interrupted at global step 7; checkpoint gs://b/step-7")
    assert "[chief-0] saving" in out


def test_a_second_signal_does_not_wait(kube):
    kube.store.graceful.add("pods")
    with step(kube, settings()) as process:
        kube.wait_watched()
        kube.run_all()
        process.ask()
        kube.store.wait(lambda: not kube.jobs())
        process.ask()
        code, _, said = process.end()
    assert (code, said) == (130, "interrupted twice; the checkpoint before it is whole")


def test_cancelled_while_the_api_is_away_it_is_deleted_when_it_is_back(kube):
    with step(kube, settings()) as process:
        kube.wait_watched()
        kube.run_all()
        kube.faults.add("DELETE", 503, times=3)
        process.ask()
        code, _, _ = process.end()
    assert code == INTERRUPTED
    kube.wait_gone()


def test_a_step_that_was_killed_is_retried_and_adopts(kube):
    with step(kube, settings()) as process:
        kube.wait_watched()
        kube.run_all()
        uid = kube.job()["metadata"]["uid"]
        process.ask(signal.SIGKILL)
        assert process.end()[0] == -signal.SIGKILL
    assert kube.job()["metadata"]["uid"] == uid
    retry = Attempt(job_of(settings()))
    kube.store.wait(lambda: [r for r in kube.server.requests if r.startswith("PATCH")])
    kube.finish("chief-0", 0)
    retry.done()
    kube.wait_gone()


def test_the_exit_step_deletes_the_runs_own_jobs_alone(kube):
    with step(kube, settings()) as process:
        kube.all_pods()
        process.ask(signal.SIGKILL)
        process.end()
    other = Attempt(job_of(settings(), root="gs://b/run-2"))
    kube.store.wait(lambda: len(kube.store.all("pods", NAMESPACE)) == 6)
    assert len(delete_jobs(KUBERNETES, "run-1")) == 1
    assert delete_jobs(KUBERNETES, "run-1") == []
    assert [job["metadata"]["labels"]["flotilla/run"] for job in kube.jobs()] == ["run-2"]
    for pod in kube.store.all("pods", NAMESPACE):
        pods.finished(kube.store, pod, 0)
    other.done()
    kube.wait_gone()


def test_the_end_of_the_steps_pod_is_the_end_of_the_job(kube, monkeypatch):
    pod = kube.store.create("pods", NAMESPACE, {"metadata": {"name": "step"}, "status": {}})
    monkeypatch.setenv("KFP_POD_NAME", "step")
    monkeypatch.setenv("KFP_POD_UID", pod["metadata"]["uid"])
    running = Attempt(job_of(settings()))
    kube.wait_watched()
    kube.store.remove("pods", NAMESPACE, "step")
    assert "was deleted by someone else" in running.failed()
    kube.wait_gone()

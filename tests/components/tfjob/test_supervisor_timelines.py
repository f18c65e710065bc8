"""What becomes of a job, and what the launcher makes of it: the right end, and no job left."""

from __future__ import annotations

import json

import pytest

from components.tfjob import names
from tests.components.tfjob.attempts import Attempt, begun, job_of, settings
from tests.kubernetes import pods
from tests.kubernetes.cluster import NAMESPACE
from tests.kubernetes.operator import condition
from trainer import events


@pytest.fixture(autouse=True)
def happened(tmp_path, monkeypatch):
    path = tmp_path / "events.jsonl"
    monkeypatch.setenv(events.VARIABLE, str(path))
    return lambda name: [each for each in events.read(path) if each["event"] == name]


def wait_followed(kube, task, times):
    kube.store.wait(lambda: sum(f"{task}/log" in each for each in kube.server.requests) >= times)


def progress(step):
    fields = {
        "event": "progress",
        "time": 1.0,
        "global_step": step,
        "steps": 10,
        "loss": 0.5,
        "steps_per_second": 2.0,
        "seconds_left": 1.0,
    }
    return f"2026-01-01 00:00:00,000 INFO {json.dumps(fields)}"


def test_a_job_that_trains_ends_well_with_all_logs_and_the_chiefs_progress(kube, capfd, happened):
    running = begun(kube)
    kube.run_all()
    kube.say("worker-0", "ready", "{not json", progress(99))
    kube.say("chief-0", '{"event": "step_end", "step": "train_model"}', '{"event": "progress"}')
    kube.say("chief-0", progress(5), progress(10))
    kube.finish("worker-0", 0)
    kube.finish("chief-0", 0)
    running.done()
    kube.wait_gone()
    out = capfd.readouterr().out.splitlines()
    for line in ("[worker-0] ready", "[worker-0] {not json", f"[chief-0] {progress(5)}"):
        assert out.count(line) == 1
    assert [each["global_step"] for each in happened("progress")] == [5, 10]
    # What a model prints is no event of a step.
    assert not happened("step_end")


def test_pending_for_ever_says_what_the_scheduler_says(kube):
    running = begun(kube, queueing=2)
    for pod in kube.all_pods().values():
        pods.unschedulable(
            kube.store, pod, "0/3 nodes are available: 3 Insufficient nvidia.com/gpu"
        )
    said = running.failed()
    assert said.startswith("chief-0, ps-0, worker-0 has no node after 2 s (cluster.kubernetes.")
    assert "deadlines.queueing): 0/3 nodes are available: 3 Insufficient nvidia.com/gpu" in said
    kube.wait_gone()


def test_a_suspended_job_waits_in_its_queue(kube):
    tree = settings(queueing=1)
    tree["cluster"]["kubernetes"]["job"] = {"suspend": True, "queue_name": "gpus"}
    assert "the job has no node after 1 s" in Attempt(job_of(tree)).failed()
    kube.wait_gone()


def test_an_image_that_cannot_be_pulled_is_named(kube):
    running = begun(kube, starting=2)
    for pod in kube.all_pods().values():
        pods.waiting(kube.store, pod, "ImagePullBackOff", 'Back-off pulling image "nowhere"')
        kube.event(pod["metadata"]["name"], "Failed", "not found")
    said = running.failed()
    assert 'deadlines.starting): ImagePullBackOff: Back-off pulling image "nowhere"' in said
    kube.wait_gone()


def test_an_evicted_worker_comes_back_and_is_counted(kube, happened):
    running = begun(kube)
    worker = kube.run_all()["worker-0"]
    wait_followed(kube, "worker-0", times=1)
    pods.evicted(kube.store, worker, "The node was low on resource: memory")
    pods.running(kube.store, kube.pod("worker-0", but=worker["metadata"]["uid"]))
    wait_followed(kube, "worker-0", times=2)
    kube.finish("chief-0", 0)
    running.done()
    kube.wait_gone()
    (restart,) = happened("restart")
    assert restart["task"] == "worker-0"
    assert restart["cause"] == "evicted: The node was low on resource: memory"


def test_a_lost_parameter_server_and_the_chief_that_begins_again_are_one_incident(kube, happened):
    running = begun(kube, max_restarts=1)
    tasks = kube.run_all()
    kube.finish("ps-0", 137, reason="Error")
    pods.running(kube.store, kube.pod("ps-0", but=tasks["ps-0"]["metadata"]["uid"]))
    wait_followed(kube, "chief-0", times=1)
    kube.finish("chief-0", 138)
    pods.running(kube.store, kube.pod("chief-0", but=tasks["chief-0"]["metadata"]["uid"]))
    wait_followed(kube, "chief-0", times=2)
    kube.finish("chief-0", 0)
    running.done()
    assert [(e["task"], e["restarts"]) for e in happened("restart")] == [
        ("ps-0", 1),
        ("chief-0", 1),
    ]
    kube.wait_gone()


def test_a_chief_without_memory_is_named_when_the_restarts_are_used_up(kube):
    running = begun(kube, max_restarts=1)
    first = kube.run_all()["chief-0"]["metadata"]["uid"]
    wait_followed(kube, "chief-0", times=1)
    kube.finish("chief-0", 137, reason="OOMKilled")
    pods.running(kube.store, kube.pod("chief-0", but=first))
    wait_followed(kube, "chief-0", times=2)
    kube.say("chief-0", "allocating", "more")
    name = kube.pod("chief-0")["metadata"]["name"]
    kube.event(name, "Killing", "memory")
    kube.finish("chief-0", 137, reason="OOMKilled")
    assert running.failed() == (
        "cluster.max_restarts (1) are used up: chief-0 ended with out of memory (OOMKilled, exit "
        f"code 137) (pod {name}); last events: Killing: memory; its last lines: allocating | more"
    )
    kube.wait_gone()


def test_what_a_task_says_last_is_the_report(kube):
    running = begun(kube)
    kube.run_all()
    name = kube.pod("chief-0")["metadata"]["name"]
    kube.finish("chief-0", 1, "the loss is nan")
    assert running.failed() == f"the loss is nan (chief-0, pod {name})"
    kube.wait_gone()


def test_a_segfault_is_told_by_its_signal(kube):
    running = begun(kube, max_restarts=0)
    kube.run_all()
    kube.finish("worker-0", 139)
    assert "worker-0 ended with exit code 139 (signal SIGSEGV)" in running.failed()
    kube.wait_gone()


def test_a_failed_job_is_never_a_green_step(kube):
    running = begun(kube)
    job = kube.job()["metadata"]["name"]
    kube.run_all()
    kube.store.change(
        "tfjobs", NAMESPACE, job, lambda tree: condition(tree, "Failed", "X", "no backoff left")
    )
    assert f"the job {job} failed: no backoff left" in running.failed()
    kube.wait_gone()


def test_a_job_that_was_active_too_long_says_so(kube):
    tree = settings()
    tree["cluster"]["kubernetes"]["job"] = {"active_deadline_seconds": 1}
    assert "was active too long" in Attempt(job_of(tree)).failed()
    kube.wait_gone()


def test_a_job_deleted_by_someone_is_told_as_such(kube):
    running = begun(kube, max_restarts=0)
    job = kube.job()["metadata"]["name"]
    kube.run_all()
    kube.store.delete("tfjobs", NAMESPACE, job)
    assert running.failed() == (
        f"the job {job} was deleted by someone else; run the step again to go on"
    )
    kube.wait_gone()


def test_training_that_stands_still_is_ended(kube):
    running = begun(kube, stalling=2)
    kube.run_all()
    kube.say("chief-0", progress(1), progress(1))
    assert "no progress for 2 s (cluster.kubernetes.deadlines.stalling)" in running.failed()
    kube.wait_gone()


def test_training_that_takes_too_long_is_ended(kube):
    running = begun(kube, running=2)
    kube.run_all()
    assert "not done after 2 s (cluster.kubernetes.deadlines.running)" in running.failed()
    kube.wait_gone()


def test_two_runs_at_once_share_nothing(kube):
    first = Attempt(job_of(settings(), root="gs://b/run-1"))
    second = Attempt(job_of(settings(), root="gs://b/run-2"))
    kube.store.wait(lambda: len(kube.store.all("pods", NAMESPACE)) == 6)
    jobs = {each["metadata"]["name"]: each for each in kube.jobs()}
    assert len(jobs) == 2
    runs = {each["metadata"]["labels"][names.RUN] for each in jobs.values()}
    assert runs == {"run-1", "run-2"}
    for pod in kube.store.all("pods", NAMESPACE):
        pods.running(kube.store, pod)
    for pod in kube.store.all("pods", NAMESPACE):
        if "chief" in pod["metadata"]["name"]:
            pods.finished(kube.store, pod, 0)
    first.done()
    second.done()
    kube.wait_gone()


def test_a_chiefless_job_is_led_by_worker_0(kube, happened):
    tree = settings()
    tree["cluster"]["kubernetes"]["chiefless"] = True
    running = Attempt(job_of(tree))
    assert set(kube.run_all()) == {"ps-0", "worker-0"}
    kube.say("worker-0", progress(3))
    kube.finish("worker-0", 0)
    running.done()
    assert [each["global_step"] for each in happened("progress")] == [3]
    kube.wait_gone()

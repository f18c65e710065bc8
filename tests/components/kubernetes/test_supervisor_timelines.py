"""Tests that each timeline of a job ends with the right result and leaves no job behind."""

import json

import pytest

from flotilla.components.kubernetes import names
from flotilla.trainer import storage
from flotilla.trainer.cluster import launcher
from flotilla.trainer.events import Progress, Restart, StepEnd, UserCodeFailed, to_tree
from flotilla.trainer.runtime.errors import FAILED, TRY_AGAIN, TransientError, UserError
from tests.components.kubernetes.attempts import (
    Attempt,
    complete,
    job_of,
    running_attempt,
    settings,
    wait_read,
    watching_attempt,
)
from tests.kubernetes import pods
from tests.kubernetes.cluster import NAMESPACE

pytestmark = pytest.mark.usefixtures("run_events")


def progress(step):
    return Progress(global_step=step, steps=10, loss=0.5, steps_per_second=2.0, seconds_left=1.0)


def test_a_job_succeeds_with_all_logs_and_the_chiefs_progress(kube, capfd, run_events, monkeypatch):
    monkeypatch.setattr(launcher, "is_over", lambda _job: True)
    attempt = running_attempt(kube)
    kube.write_log("worker-0", "ready", "{not json")
    kube.write_event("worker-0", progress(99))
    kube.write_log(
        "chief-0", '{"event": "step_end", "step": "train_model"}', '{"event": "progress"}'
    )
    # A model may print text from its data that looks like an event.
    kube.write_log("chief-0", f"2026-01-01 00:00:00,000 INFO {json.dumps(to_tree(progress(7)))}")
    fifth, _ = kube.write_event("chief-0", progress(5)), kube.write_event("chief-0", progress(10))
    kube.finish("worker-0", 0)
    complete(kube, attempt)
    out = capfd.readouterr().out.splitlines()
    for line in ("[worker-0] ready", "[worker-0] {not json", f"[chief-0] {fifth}"):
        assert out.count(line) == 1
    assert [each.global_step for each in run_events(Progress)] == [5, 10]
    assert not run_events(StepEnd)


def test_a_worker_that_ends_with_0_during_training_fails_the_job(kube, tmp_path):
    attempt = Attempt(job_of(settings(), storage.uri_of(tmp_path / "run-1")))
    kube.wait_watched()
    kube.run_all()
    name = kube.pod("worker-0")["metadata"]["name"]
    kube.finish("worker-0", 0)
    assert attempt.failure().startswith(
        f"worker-0 (pod {name}) ended with exit code 0 before training was complete: "
    )
    kube.wait_until_deleted()


def test_an_evicted_worker_is_restarted_and_counted(kube, run_events):
    attempt = watching_attempt(kube)
    worker = kube.run_all()["worker-0"]
    kube.wait_followed("worker-0")
    pods.evicted(kube.store, worker, "The node was low on resource: memory")
    wait_read("worker-0")
    pods.running(kube.store, kube.pod("worker-0", but=worker["metadata"]["uid"]))
    kube.wait_followed("worker-0")
    complete(kube, attempt)
    (restart,) = run_events(Restart)
    assert restart.task == "worker-0"
    assert restart.cause == "evicted: The node was low on resource: memory"


def test_a_lost_parameter_server_and_the_restart_of_the_chief_are_one_incident(kube, run_events):
    attempt = watching_attempt(kube, max_restarts=1)
    tasks = kube.run_all()
    kube.finish("ps-0", 137, reason="Error")
    pods.running(kube.store, kube.pod("ps-0", but=tasks["ps-0"]["metadata"]["uid"]))
    kube.wait_followed("chief-0")
    kube.finish("chief-0", 138)
    wait_read("chief-0")
    pods.running(kube.store, kube.pod("chief-0", but=tasks["chief-0"]["metadata"]["uid"]))
    kube.wait_followed("chief-0")
    complete(kube, attempt)
    restarts = [(each.task, each.restarts) for each in run_events(Restart)]
    assert restarts == [("ps-0", 1), ("chief-0", 1)]
    kube.wait_until_deleted()


def test_a_chief_out_of_memory_is_reported_past_the_limit_of_restarts(kube):
    attempt = watching_attempt(kube, max_restarts=1)
    first = kube.run_all()["chief-0"]["metadata"]["uid"]
    kube.wait_followed("chief-0")
    kube.finish("chief-0", 137, reason="OOMKilled")
    wait_read("chief-0")
    pods.running(kube.store, kube.pod("chief-0", but=first))
    kube.wait_followed("chief-0")
    kube.write_log("chief-0", "allocating", "more")
    name = kube.pod("chief-0")["metadata"]["name"]
    kube.event(name, "Killing", "memory")
    kube.finish("chief-0", 137, reason="OOMKilled")
    assert attempt.failure() == (
        "cluster.max_restarts (1) is exceeded: chief-0 ended with out of memory (OOMKilled, exit "
        f"code 137) (pod {name}); last events: Killing: memory; last log lines: allocating | more"
    )
    kube.wait_until_deleted()


@pytest.mark.parametrize(("code", "kind"), [(TRY_AGAIN, TransientError), (FAILED, UserError)])
def test_the_termination_message_is_the_report_and_the_code_says_what_may_help(kube, code, kind):
    attempt = running_attempt(kube)
    name = kube.pod("chief-0")["metadata"]["name"]
    words = "cannot write gs://b/step-7: the store is out"
    kube.finish("chief-0", code, words)
    assert attempt.failure() == f"{words} (chief-0, pod {name})"
    assert type(attempt.error) is kind
    kube.wait_until_deleted()


def test_the_traceback_of_the_users_code_comes_with_the_error(kube):
    attempt = running_attempt(kube)
    failed = UserCodeFailed(error="bad shape (blocks.py:14)", traceback="Traceback ...")
    kube.write_event("chief-0", failed)
    kube.finish("chief-0", 1, "bad shape (blocks.py:14)")
    assert attempt.failure().startswith("bad shape (blocks.py:14) (chief-0, pod ")
    assert attempt.error.traceback == "Traceback ..."
    kube.wait_until_deleted()


def test_a_leader_that_is_done_ends_the_job_without_the_operator(kube):
    attempt = running_attempt(kube)
    kube.operator.down = True
    complete(kube, attempt)


def test_a_step_that_fails_ends_after_its_pods(kube):
    kube.store.graceful.add("pods")
    attempt = running_attempt(kube)
    kube.finish("chief-0", 1, "the loss is nan")
    kube.store.wait(lambda: all(_is_ending(each) for each in kube.pods().values()))
    attempt.join(1)
    assert attempt.is_alive()
    for name in (each["metadata"]["name"] for each in kube.pods().values()):
        kube.store.remove("pods", NAMESPACE, name)
    assert "the loss is nan" in attempt.failure()
    kube.wait_until_deleted()


def _is_ending(pod):
    return bool(pod["metadata"].get("deletionTimestamp"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("deadline", "words"), [("stalling", "made no progress for"), ("running", "not finish within")]
)
def test_training_without_progress_or_an_end_is_ended(kube, deadline, words):
    attempt = running_attempt(kube, **{deadline: 2})
    for _ in range(2):
        kube.write_event("chief-0", progress(1))
    assert f"{words} 2 s (cluster.kubernetes.deadlines.{deadline})" in attempt.failure()
    kube.wait_until_deleted()


@pytest.mark.slow
def test_two_runs_at_the_same_time_are_separate(kube):
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
    first.succeed()
    second.succeed()
    kube.wait_until_deleted()


def test_a_chiefless_job_is_led_by_worker_0(kube, run_events):
    tree = settings()
    tree["cluster"]["kubernetes"]["chiefless"] = True
    attempt = Attempt(job_of(tree))
    assert set(kube.run_all()) == {"ps-0", "worker-0"}
    kube.write_event("worker-0", progress(3))
    kube.finish("worker-0", 0)
    attempt.succeed()
    assert [each.global_step for each in run_events(Progress)] == [3]
    kube.wait_until_deleted()

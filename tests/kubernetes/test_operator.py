"""Tests that the fake operator manages a TFJob like the real one, as listed in `README.md`."""

import pytest

from tests.kubernetes import pods
from tests.kubernetes.cluster import NAMESPACE, tfjob
from tests.kubernetes.conditions import condition, is_true

STATUSES = ("Created", "Running", "Restarting", "Failed")


@pytest.fixture(autouse=True)
def graceful(kube):
    kube.store.graceful.add("pods")
    return kube


def create(kube, **more):
    kube.store.create("tfjobs", NAMESPACE, tfjob(**more))


def start(kube, **more):
    create(kube, **more)
    kube.run_all()
    kube.store.wait(lambda: is_true(kube.job(), "Running"))


def ended(kube, kind):
    kube.store.wait(lambda: is_true(kube.job(), kind))
    return next(each for each in kube.job()["status"]["conditions"] if each["type"] == kind)


@pytest.mark.parametrize(
    ("task", "role"), [("worker-1", "Worker"), ("ps-0", "PS"), ("chief-0", "Chief")]
)
def test_a_running_pod_that_is_being_deleted_fails_the_job(kube, task, role):
    start(kube)
    kube.take_away(task)
    failed = ended(kube, "Failed")
    assert failed["reason"] == "TFJobFailed"
    assert failed["message"] == (
        f"TFJob {NAMESPACE}/job has failed because 1 {role} replica(s) failed."
    )
    status = kube.job()["status"]
    assert status["replicaStatuses"][role]["failed"] == 1
    assert status["completionTime"]
    assert {each["type"]: each["status"] for each in status["conditions"]}["Running"] == "False"


def test_a_pod_that_has_not_started_is_replaced_when_it_is_deleted(kube):
    create(kube)
    before = kube.all_pods()["worker-1"]
    kube.take_away("worker-1")
    kube.pod("worker-1", but=before["metadata"]["uid"])
    kube.run_all()
    kube.store.wait(lambda: is_true(kube.job(), "Running"))
    assert not is_true(kube.job(), "Failed")


def test_a_pod_deleted_by_force_is_replaced_at_another_address(kube):
    start(kube)
    before = kube.take_away("worker-1", grace=0)
    after = kube.pod("worker-1", but=before["metadata"]["uid"])
    assert pods.running(kube.store, after)["status"]["podIP"] != before["status"]["podIP"]
    assert not is_true(kube.job(), "Failed")


def test_a_restart_shields_the_job_until_it_runs_again(kube):
    start(kube)
    with kube.store.changed:
        kube.take_away("worker-1")
        kube.finish("ps-0", 137)
    kube.store.wait(lambda: is_true(kube.job(), "Restarting"))
    assert not is_true(kube.job(), "Running")
    assert not is_true(kube.job(), "Failed")
    kube.end_deleted()
    kube.run_all()
    kube.store.wait(lambda: is_true(kube.job(), "Running"))
    kinds = [each["type"] for each in kube.job()["status"]["conditions"]]
    assert kinds == ["Created", "Running"]


@pytest.mark.parametrize("policy", ["ExitCode", "OnFailure", "Always"])
def test_a_failed_pod_is_replaced(kube, policy):
    start(kube, restart=policy)
    before = kube.pod("worker-1")
    pods.evicted(kube.store, before, "the node was low on memory")
    kube.pod("worker-1", but=before["metadata"]["uid"])
    assert not is_true(kube.job(), "Failed")


@pytest.mark.parametrize(("policy", "code"), [("ExitCode", 127), ("Never", 137)])
def test_a_pod_that_may_not_be_replaced_fails_the_job(kube, policy, code):
    start(kube, restart=policy, cleanPodPolicy="Running")
    kube.finish("ps-0", code)
    assert "PS" in ended(kube, "Failed")["message"]
    others = ("chief-0", "worker-0", "worker-1")
    kube.store.wait(lambda: all(_is_ending(kube, task) for task in others))
    assert not _is_ending(kube, "ps-0")


def test_a_code_from_128_up_is_a_restart(kube):
    start(kube)
    before = kube.finish("worker-1", 128)
    kube.pod("worker-1", but=before["metadata"]["uid"])
    kube.store.wait(lambda: _was(kube, "Restarting"))
    assert not is_true(kube.job(), "Failed")


@pytest.mark.parametrize(
    ("roles", "leader"), [(None, "chief-0"), ({"PS": 1, "Worker": 2}, "worker-0")]
)
def test_the_leader_ends_the_job(kube, roles, leader):
    start(kube, roles=roles, cleanPodPolicy="Running")
    kube.finish(leader, 0)
    ended(kube, "Succeeded")
    others = kube.pods().keys() - {leader}
    kube.store.wait(lambda: all(_is_ending(kube, task) for task in others))
    assert not _is_ending(kube, leader)


@pytest.mark.slow
def test_the_active_deadline_counts_from_the_start_and_the_ttl_from_the_end(kube):
    create(kube, activeDeadlineSeconds=1, ttlSecondsAfterFinished=2)
    failed = ended(kube, "Failed")
    assert (failed["reason"], failed["message"]) == (
        "TFJobFailed",
        "Job job has failed because it was active longer than specified deadline",
    )
    status = kube.job()["status"]
    assert status["startTime"] < status["completionTime"]
    kube.store.wait(lambda: not kube.jobs())


def test_a_suspended_job_has_no_pods_until_it_is_resumed(kube):
    create(kube, suspend=True)
    ended(kube, "Suspended")
    assert not kube.pods()
    kube.store.patch("tfjobs", NAMESPACE, "job", {"spec": {"runPolicy": {"suspend": False}}})
    kube.all_pods()
    kube.store.wait(lambda: not is_true(kube.job(), "Suspended"))


def test_an_operator_that_is_down_does_nothing(kube):
    kube.operator.down = True
    create(kube)
    with kube.store.changed:
        kube.store.changed.wait(0.5)
    assert "status" not in kube.job()
    assert not kube.pods()
    kube.operator.down = False
    kube.run_all()
    kube.operator.down = True
    before = kube.take_away("worker-1")
    kube.end_deleted()
    kube.operator.down = False
    # A failure that the operator has not observed does not make the job fail.
    kube.pod("worker-1", but=before["metadata"]["uid"])
    assert not is_true(kube.job(), "Failed")


def test_a_failed_job_keeps_its_conditions():
    job = {}
    for kind in STATUSES:
        condition(job, kind)
    condition(job, "Running")
    kinds = [(each["type"], each["status"]) for each in job["status"]["conditions"]]
    assert kinds == [("Created", "True"), ("Restarting", "True"), ("Failed", "True")]


def _is_ending(kube, task):
    return task not in kube.pods() or "deletionTimestamp" in kube.pods()[task]["metadata"]


def _was(kube, kind):
    return any(k == "tfjobs" and is_true(tree, kind) for _, _, k, tree in kube.store.history)

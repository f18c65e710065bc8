"""Tests that the launcher recreates a job that the operator failed because a pod was deleted."""

import signal

import pytest

from flotilla.components.kubernetes import names
from flotilla.components.kubernetes.pods.template import Place
from flotilla.components.kubernetes.tfjob import TFJobs
from flotilla.trainer.events import CheckpointPublished, Restart
from flotilla.trainer.runtime.errors import INTERRUPTED
from tests.components.kubernetes.attempts import Attempt, job_of, running_step, settings
from tests.kubernetes import pods
from tests.kubernetes.cluster import NAMESPACE
from tests.kubernetes.conditions import condition, is_true


@pytest.fixture(autouse=True)
def restarts(kube, run_events):
    """Let the test end deleted pods; return a function that reads the restarts of the run."""
    kube.store.graceful.add("pods")
    return lambda: run_events(Restart)


def complete(kube, attempt):
    kube.finish("chief-0", 0)
    kube.store.wait(lambda: not kube.jobs())
    kube.end_deleted()
    attempt.succeed()


def start(kube, workers=2, **more):
    tree = settings(**more)
    tree["cluster"]["workers"] = workers
    attempt = Attempt(job_of(tree))
    kube.wait_watched()
    kube.run_all()
    return attempt


def uid(kube):
    jobs = kube.jobs()
    return jobs[0]["metadata"]["uid"] if jobs else ""


def made_again(kube, before):
    """End the pods of the deleted job, and run the pods of the next job."""
    kube.store.wait(lambda: not kube.jobs())
    kube.end_deleted()
    kube.store.wait(lambda: uid(kube) not in ("", before))
    kube.run_all()


def failure(kube, attempt):
    kube.store.wait(lambda: not kube.jobs())
    kube.end_deleted()
    return attempt.failure()


def published(kube, global_step):
    """Write the chief's log line about a published checkpoint; wait until the launcher reads it."""
    event = CheckpointPublished(uri=f"gs://b/step-{global_step}", global_step=global_step)
    kube.write_event("chief-0", event)
    kube.wait_followed("chief-0")


@pytest.mark.parametrize(
    ("task", "reason", "how"),
    [
        ("worker-1", "EvictionByEvictionAPI", "evicted (EvictionByEvictionAPI)"),
        ("worker-1", "SomethingNew", "deleted (SomethingNew)"),
        ("worker-1", "DeletionByTaintManager", "deleted because of a taint on its node (Deletion"),
        ("ps-0", "PreemptionByScheduler", "preempted (PreemptionByScheduler)"),
        ("chief-0", "", "deleted"),
    ],
)
def test_a_job_that_has_lost_a_pod_is_made_again(kube, restarts, task, reason, how):
    attempt = start(kube)
    first = kube.job()
    kube.take_away(task, reason)
    kube.store.wait(lambda: not kube.jobs())
    # The pods are still in their grace period, so no second job may train next to them.
    assert kube.pods()
    made_again(kube, first["metadata"]["uid"])
    second = kube.job()
    assert second["spec"] == first["spec"]
    for key in ("name", "labels"):
        assert second["metadata"][key] == first["metadata"][key]
    annotations = [job["metadata"]["annotations"] for job in (first, second)]
    assert annotations[0][names.MANIFEST] == annotations[1][names.MANIFEST]

    def owners():
        return [lease["metadata"]["ownerReferences"][0]["uid"] for lease in kube.leases()]

    kube.store.wait(lambda: owners() == [second["metadata"]["uid"]])
    complete(kube, attempt)
    (restart,) = restarts()
    assert restart.task == task
    assert restart.cause.startswith(f"loss of its pod: {how}")
    kube.wait_until_deleted()


def test_an_evicted_pod_whose_task_ended_with_a_low_code_is_a_loss(kube, restarts):
    attempt = start(kube)
    before = uid(kube)
    with kube.store.changed:
        # The kubelet ended the task with SIGTERM, and the operator counts its exit code as a
        # failure.
        worker = kube.finish("worker-1", 1)
        pods.evicted(kube.store, worker, "The node was low on resource: memory.", code=1)
    made_again(kube, before)
    complete(kube, attempt)
    assert [each.task for each in restarts()] == ["worker-1"]


def test_losses_without_a_new_checkpoint_exceed_the_limit(kube, restarts):
    attempt = start(kube, max_restarts=1)
    before = uid(kube)
    kube.take_away("worker-1")
    made_again(kube, before)
    kube.wait_followed("chief-0")
    name = kube.take_away("ps-0", "PreemptionByScheduler")["metadata"]["name"]
    assert failure(kube, attempt) == (
        f"cluster.max_restarts (1) is exceeded: ps-0 lost its pod {name}: preempted "
        "(PreemptionByScheduler); pods lost since the newest checkpoint: 1 of ps-0, 1 of worker-1"
    )
    assert len(restarts()) == 1
    kube.wait_until_deleted()


def test_a_new_checkpoint_restores_what_losses_have_drawn(kube, restarts):
    attempt = start(kube, max_restarts=1)
    for number in range(1, 5):
        before = uid(kube)
        published(kube, 10 * number)
        kube.take_away("worker-1")
        made_again(kube, before)
    complete(kube, attempt)
    assert [each.restarts for each in restarts()] == [1, 2, 3, 4]


def test_a_task_that_fails_in_the_same_second_fails_the_run(kube, restarts):
    attempt = start(kube)
    with kube.store.changed:
        kube.take_away("worker-1")
        kube.finish("worker-0", 1, "the loss is nan")
    message = failure(kube, attempt)
    assert message.startswith("the loss is nan (worker-0, pod ")
    assert not restarts()
    kube.wait_until_deleted()


def test_what_a_task_ends_with_after_the_deletion_does_not_matter(kube, restarts):
    attempt = start(kube)
    before = uid(kube)
    kube.take_away("worker-1")
    kube.store.wait(lambda: not kube.jobs())
    kube.end_deleted({"chief-0": 130, "worker-0": 138, "ps-0": 143, "worker-1": 143})
    kube.store.wait(lambda: uid(kube) not in ("", before))
    kube.run_all()
    complete(kube, attempt)
    assert len(restarts()) == 1


def test_a_pod_that_is_gone_when_the_failure_is_seen_is_a_loss(kube, restarts):
    attempt = start(kube)
    before = uid(kube)
    kube.server.go_down()
    kube.take_away("worker-1")
    kube.store.wait(lambda: is_true(kube.job(), "Failed"))
    kube.end_deleted()
    kube.faults.clear()
    made_again(kube, before)
    complete(kube, attempt)
    assert len(restarts()) == 1


def test_an_exceeded_deadline_is_no_loss(kube):
    tree = settings()
    # A long deadline is needed, because a short one may pass before all pods exist.
    tree["cluster"]["kubernetes"]["job"] = {"active_deadline_seconds": 600}
    attempt = Attempt(job_of(tree))
    kube.run_all()

    def began_long_ago(job):
        job["status"]["startTime"] = "2020-01-01T00:00:00Z"

    job = kube.job()["metadata"]["name"]
    kube.store.change("tfjobs", NAMESPACE, job, began_long_ago)
    assert failure(kube, attempt) == (
        f"the job {job} did not finish within 600 s "
        "(cluster.kubernetes.job.active_deadline_seconds): "
        f"Job {job} has failed because it was active longer than specified deadline"
    )
    kube.wait_until_deleted()


def test_a_job_that_someone_deletes_is_not_made_again(kube, restarts):
    attempt = start(kube)
    job = kube.job()["metadata"]["name"]
    kube.store.delete("tfjobs", NAMESPACE, job)
    assert failure(kube, attempt) == (
        f"another user or program deleted the job {job}, which ended the run; to continue from its "
        "newest checkpoint, use Retry in the KFP UI or `flotilla run --resume`"
    )
    assert not restarts()
    kube.wait_until_deleted()


@pytest.mark.slow
def test_the_api_may_be_unreachable_while_the_job_is_made_again(kube, restarts):
    attempt = start(kube)
    before = uid(kube)
    kube.faults.add("(POST|DELETE) .*tfjobs", 503, times=4)
    kube.faults.add("POST .*tfjobs", 500, late=True, times=1)
    kube.take_away("worker-1")
    made_again(kube, before)
    # The response to the creation was lost, so the launcher must adopt the job.
    kube.wait_renewed()
    complete(kube, attempt)
    assert len(restarts()) == 1
    kube.wait_until_deleted()


def test_no_job_is_created_next_to_the_pods_of_an_earlier_one(kube):
    tree = TFJobs().manifest(job_of(settings()), Place(namespace=NAMESPACE))
    before = kube.store.create("tfjobs", NAMESPACE, tree)["metadata"]["uid"]
    kube.run_all()
    kube.store.delete("tfjobs", NAMESPACE, tree["metadata"]["name"])
    retry = Attempt(job_of(settings()))
    listed = "GET /api/v1/namespaces/models/pods?labelSelector"
    kube.store.wait(lambda: sum(each.startswith(listed) for each in kube.server.requests) >= 2)
    assert not kube.jobs()
    made_again(kube, before)
    complete(kube, retry)


@pytest.mark.cluster
def test_cancelled_while_the_job_is_made_again_no_job_follows(kube):
    with running_step(kube) as process:
        kube.wait_followed("chief-0")
        kube.take_away("worker-0")
        kube.store.wait(lambda: not kube.jobs())
        process.signal()
        kube.finish("chief-0", 130, "interrupted at global step 7; checkpoint gs://b/step-7")
        kube.end_deleted({"chief-0": 130})
        assert process.end()[::2] == (
            INTERRUPTED,
            "interrupted at global step 7; checkpoint gs://b/step-7",
        )
    kube.wait_until_deleted()


@pytest.mark.cluster
def test_killed_while_the_job_is_made_again_the_retry_goes_on(kube):
    with running_step(kube) as process:
        before = uid(kube)
        kube.take_away("worker-0")
        kube.store.wait(lambda: not kube.jobs())
        process.signal(signal.SIGKILL)
        process.end()
    retry = Attempt(job_of(settings()))
    made_again(kube, before)
    complete(kube, retry)
    kube.wait_until_deleted()


def test_a_failure_without_a_lost_pod_fails_the_run(kube):
    attempt = start(kube)
    job = kube.job()["metadata"]["name"]
    kube.store.change(
        "tfjobs", NAMESPACE, job, lambda tree: condition(tree, "Failed", "X", "no backoff left")
    )
    assert f"the job {job} failed: no backoff left" in failure(kube, attempt)
    kube.wait_until_deleted()

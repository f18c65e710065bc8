"""Tests that the reason why a job cannot start is reported in one line as soon as it is known."""

import logging
import math

import pytest

from flotilla.components.kubernetes import supervisor
from flotilla.components.kubernetes.limits import Deadlines, is_final
from flotilla.components.kubernetes.names import INDEX_LABELS, ROLE_LABELS
from flotilla.components.kubernetes.tfjob import TFJobs
from flotilla.trainer import events
from flotilla.trainer.config.cluster import DeadlinesConfig
from flotilla.trainer.events import WorkProgress, progress
from tests.components.kubernetes.attempts import (
    Attempt,
    complete,
    heard,
    job_of,
    run_to_end,
    settings,
    watching_attempt,
)
from tests.kubernetes import pods
from tests.kubernetes.cluster import NAMESPACE

JOB = {"metadata": {"uid": "1"}, "spec": {"runPolicy": {}}}
SUSPENDED = {**JOB, "spec": {"runPolicy": {"suspend": True}}}
PULL = 'Back-off pulling image "nowhere": ErrImagePull: not found'


@pytest.fixture(autouse=True)
def _often(monkeypatch):
    monkeypatch.setattr(supervisor, "CHECK_SECONDS", 0.2)
    monkeypatch.setattr("flotilla.components.kubernetes.limits.LOOK_SECONDS", 0.2)


def suspended(**deadlines):
    tree = settings(**deadlines)
    tree["cluster"]["kubernetes"]["job"] = {"suspend": True, "queue_name": "gpus"}
    return job_of(tree)


class Clock:
    at = 0.0

    def deadlines(self, *roles, **limits):
        """Return the deadlines of a job with one task of each role, by this clock."""
        config = DeadlinesConfig(**limits)
        return Deadlines(TFJobs(), config, dict.fromkeys(roles, 1), lambda: self.at)


@pytest.fixture
def clock():
    return Clock()


def pod_with(task, status, node="n"):
    role, _, index = task.partition("-")
    labels = {ROLE_LABELS[0]: role, INDEX_LABELS[0]: index}
    spec = {"nodeName": node} if node else {}
    return {"metadata": {"uid": task, "labels": labels}, "spec": spec, "status": status}


def of_state(task, **state):
    return pod_with(task, {"containerStatuses": [{"name": "tensorflow", "state": state}]})


def test_an_operator_that_is_not_running_is_named_at_once(kube):
    kube.operator.down = True
    attempt = Attempt(job_of(settings(operator=1, queueing=3600)))
    message = attempt.failure()
    assert message.startswith(
        "the training operator has not reacted for 1 s (cluster.kubernetes.deadlines.operator): "
        "the job has neither a status nor a pod; check whether it is "
        "running: kubectl get deployments"
    )
    kube.wait_until_deleted()


@pytest.mark.slow
def test_an_outage_of_the_api_is_not_one_of_the_operator(kube):
    attempt = Attempt(job_of(settings(operator=2)))
    kube.store.wait(
        lambda: any(each.startswith("POST /apis/kubeflow") for each in kube.server.requests)
    )
    kube.server.go_down()
    before = kube.faults.hits.get("down", 0)
    # The deadline passes during the API outage and is reported only afterwards.
    attempt.join(3)
    assert attempt.is_alive()
    kube.store.wait(lambda: kube.faults.hits["down"] > before)
    kube.faults.clear()
    run_to_end(kube, attempt)


def test_a_suspended_job_waits_for_admission_and_not_for_the_operator(kube, caplog):
    caplog.set_level(logging.INFO)
    message = Attempt(suspended(operator=2, queueing=3)).failure()
    assert message.startswith(
        "the job was not admitted within 3 s (cluster.kubernetes.deadlines.queueing): Kueue "
        "suspends the job until its queue has capacity; see: kubectl get workloads"
    )
    assert caplog.messages.count("the job is suspended until its queue admits it") == 1
    kube.wait_until_deleted()


def test_a_suspended_job_without_the_operator_waits_for_that(kube):
    kube.operator.down = True
    message = Attempt(suspended(operator=1, queueing=3)).failure()
    assert message.startswith("the training operator has not reacted for 1 s")


def test_pending_pods_are_reported_with_the_schedulers_message(kube, caplog):
    attempt = watching_attempt(kube, queueing=2)
    words = "0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector."
    for pod in kube.all_pods().values():
        pods.unschedulable(kube.store, pod, words)
    message = attempt.failure()
    assert message.startswith("chief-0, ps-0, worker-0 could not be scheduled within 2 s (cluster.")
    assert f"deadlines.queueing): {words}" in message
    # An autoscaler may still add a suitable node, so the message is reported at once, but the job
    # fails only at its deadline.
    assert f"worker-0 is waiting: {words}" in caplog.messages
    kube.wait_until_deleted()


@pytest.mark.parametrize(
    ("reason", "words", "remedy"),
    [
        ("ImagePullBackOff", PULL, "correct --image or cluster.kubernetes.pod.image, or add"),
        ("CreateContainerConfigError", 'secret "keys" not found', "fix the reported cause"),
        ("CreateContainerError", "no such file", "fix the reported cause"),
    ],
)
def test_a_container_that_fails_to_start_has_a_deadline_of_its_own(kube, reason, words, remedy):
    attempt = watching_attempt(kube, container=1, starting=900)
    tasks = kube.all_pods()
    pods.waiting(kube.store, tasks["worker-0"], reason, words)
    for task in ("chief-0", "ps-0"):
        pods.running(kube.store, tasks[task])
    kube.event(tasks["worker-0"]["metadata"]["name"], "Failed", "not found")
    message = attempt.failure()
    limit = "1 s (cluster.kubernetes.deadlines.container)"
    assert message.startswith(f"worker-0 did not start within {limit}: {reason}: {words}; {remedy}")
    kube.wait_until_deleted()


def test_a_malformed_image_ends_the_job_at_once(kube):
    attempt = watching_attempt(kube)
    words = 'Failed to apply default image tag "A B": invalid reference format'
    pods.waiting(kube.store, kube.all_pods()["chief-0"], "InvalidImageName", words)
    assert f"chief-0 cannot start: InvalidImageName: {words}; correct --image" in attempt.failure()
    kube.wait_until_deleted()


def test_a_registry_that_hiccups_is_waited_for(clock):
    deadlines = clock.deadlines("chief", container=120, starting=900)

    def waiting(reason):
        return of_state("chief-0", waiting={"reason": reason})

    deadlines.observe([waiting("ErrImagePull")])
    assert deadlines.seconds_left() == 120
    clock.at = 100.0
    deadlines.observe([waiting("ContainerCreating")])
    assert deadlines.seconds_left() == 800
    clock.at = 110.0
    deadlines.observe([waiting("ImagePullBackOff")])
    # The kubelet alternates between two reasons, but the pod has failed to start since the first
    # one.
    clock.at = 200.0
    failing = waiting("ErrImagePull")
    deadlines.observe([failing])
    assert (deadlines.seconds_left(), deadlines.find_exceeded([failing])) == (30, "")
    clock.at = 230.0
    words = "chief-0 did not start within 120 s (cluster."
    assert deadlines.find_exceeded([failing]).startswith(words)


def test_the_usual_way_to_a_start_is_no_warning(kube, caplog):
    caplog.set_level(logging.INFO)
    attempt = watching_attempt(kube)
    for reason in ("ContainerCreating", "PodInitializing"):
        for pod in kube.all_pods().values():
            pods.waiting(kube.store, pod, reason)
    run_to_end(kube, attempt)
    waits = [each for each in caplog.records if "is waiting" in each.getMessage()]
    assert {each.levelno for each in waits} == {logging.INFO}


def test_only_a_new_job_begins_the_deadline_of_the_operator_again(clock):
    deadlines = clock.deadlines("chief", "worker", operator=60)
    deadlines.observe_job(JOB)
    clock.at = 40.0
    deadlines.observe_job({**JOB, "status": {}})
    assert deadlines.seconds_left() == 20
    deadlines.observe_job({**JOB, "metadata": {"uid": "2"}})
    assert deadlines.seconds_left() == 60
    deadlines.is_taken_up = True
    assert deadlines.seconds_left() == 3600 - 40


def test_a_job_that_is_suspended_again_queues_again(clock):
    deadlines = clock.deadlines("chief", queueing=100, stalling=10)
    deadlines.observe_job(JOB)
    deadlines.observe([of_state("chief-0", running={})])
    assert (deadlines.has_run, deadlines.seconds_left()) == (True, 10)
    clock.at = 5.0
    deadlines.observe_job(SUSPENDED)
    deadlines.observe([])
    # A job that is suspended again waits for other jobs, so it has no deadline.
    assert (deadlines.has_run, deadlines.seconds_left()) == (False, math.inf)
    clock.at = 1000.0
    assert deadlines.find_exceeded([]) == ""
    deadlines.observe_job(JOB)
    assert deadlines.seconds_left() == 100


def test_a_job_that_is_made_again_queues_again_and_has_run_before(clock):
    deadlines = clock.deadlines("chief", queueing=50, running=100, stalling=0, operator=0)
    pod = of_state("chief-0", running={})
    deadlines.observe([pod])
    assert deadlines.seconds_left() == 100
    clock.at = 60.0
    deadlines.begin_again()
    assert not deadlines.has_run
    assert deadlines.seconds_left() == 50
    clock.at = 70.0
    # A job that is made again before all of its tasks ran queues again, too.
    deadlines.begin_again()
    assert deadlines.seconds_left() == 50
    clock.at = 80.0
    deadlines.observe([pod])
    # The pod ran for 60 s; the 20 s in which the job was recreated do not count.
    assert deadlines.seconds_left() == 40


CHIEF_RUNS = of_state("chief-0", running={})
UNSCHEDULED = {"type": "PodScheduled", "status": "False", "message": "Insufficient cpu."}


@pytest.mark.parametrize(
    ("pods", "running", "words"),
    [
        ([], 0, "the training operator has not accepted the job"),
        ([CHIEF_RUNS], 1, "worker 0/1: 1 not created"),
        (
            [CHIEF_RUNS, pod_with("worker-0", {"conditions": [UNSCHEDULED]}, node="")],
            1,
            "worker 0/1: 1 without a node (Insufficient cpu.)",
        ),
        (
            [
                of_state("chief-0", waiting={"reason": "ContainerCreating"}),
                of_state("worker-0", waiting={"reason": "ImagePullBackOff", "message": "no tag"}),
            ],
            0,
            "chief 0/1: 1 starting (ContainerCreating: Kubernetes is pulling images or mounting "
            "volumes); worker 0/1: 1 starting (ImagePullBackOff: no tag)",
        ),
        (
            [CHIEF_RUNS, of_state("worker-0", waiting={"reason": "ContainerCreating"})],
            1,
            "worker 0/1: 1 starting (ContainerCreating: Kubernetes is pulling images or mounting "
            "volumes)",
        ),
    ],
)
def test_the_reason_why_a_job_does_not_train_yet(clock, pods, running, words):
    deadlines = clock.deadlines("chief", "worker")
    deadlines.observe_job(JOB)
    deadlines.observe(pods)
    assert deadlines.start(pods) == (running, words)


def test_a_job_waits_for_admission_and_then_for_its_first_step(clock):
    deadlines = clock.deadlines("chief", "worker")
    deadlines.observe_job(JOB)
    deadlines.is_taken_up = True
    deadlines.observe_job(SUSPENDED)
    assert deadlines.start([])[1].startswith("Kueue suspends the job until its queue")
    deadlines.observe_job(JOB)
    pods = [CHIEF_RUNS, of_state("worker-0", running={})]
    deadlines.observe(pods)
    said = "all tasks are running, but training has not completed a step yet"
    assert deadlines.start(pods) == (2, said)
    assert not deadlines.is_training
    # A possible cause is a Service of another job with the same name.
    deadlines.unresolved = "these names do not resolve: a-ps-0-0.a"
    assert deadlines.start(pods)[1] == f"{said}; these names do not resolve: a-ps-0-0.a"
    clock.at = 1.0
    deadlines.restart_progress()
    assert deadlines.is_training


@pytest.mark.usefixtures("emitted")
def test_a_job_that_waits_says_for_what_until_it_trains(kube, monkeypatch):
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    seen = []

    def take(event):
        with kube.store.changed:
            seen.append(event)
            kube.store.changed.notify_all()

    def said(text, over=False):
        return any(
            text in each.detail and each.is_over == over
            for each in seen
            if isinstance(each, WorkProgress) and each.what == "starting the job"
        )

    words = "0/3 nodes are available: 3 Insufficient cpu."
    with events.listen(take):
        attempt = watching_attempt(kube)
        for pod in kube.all_pods().values():
            pods.unschedulable(kube.store, pod, words)
        kube.store.wait(lambda: said(words))
        kube.run_all()
        kube.store.wait(
            lambda: said("all tasks are running, but training has not completed a step yet")
        )
        kube.finish("chief-0", 0)
        attempt.succeed()
        assert said("", over=True)


def test_a_job_that_kueue_takes_its_room_from_loses_no_restart(kube, run_events):
    attempt = Attempt(job_of(settings(max_restarts=0)))
    kube.wait_watched()
    kube.run_all()
    kube.store.wait(lambda: sum("/log?" in each for each in kube.server.requests) >= 3)
    with heard(events.Suspension):
        kube.suspend(kube.job(), True)
    kube.store.wait(lambda: not kube.pods())
    kube.suspend(kube.job(), False)
    run_to_end(kube, attempt)
    assert not run_events(events.Restart)
    waits = [(each.is_over, each.was_running) for each in run_events(events.Suspension)]
    assert waits == [(False, True), (True, True)]


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
    run_to_end(kube, attempt)


@pytest.mark.parametrize("may_read", [True, False])
def test_a_quota_that_stays_full_ends_the_job_with_its_words(kube, may_read):
    if not may_read:
        kube.faults.add("GET .*/events", 403)
    quota(kube, 1)
    message = watching_attempt(kube, queueing=2).failure()
    assert message.startswith(
        "2 of 3 pods were not created within 2 s (cluster.kubernetes.deadlines."
    )
    events = "last events: FailedCreatePod: Error creating: pods"
    lack = "the launcher lacks permission to list events"
    assert (events if may_read else lack) in message
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
    complete(kube, attempt)


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

"""Tests the launcher with JobSets: only lost pods are replaced, and cancelling suspends the job."""

import signal
import threading

import pytest

from flotilla.components.kubernetes import client, names
from flotilla.components.kubernetes.client import Api, connect
from flotilla.components.kubernetes.engine import Stop, SuspendingStop
from flotilla.components.kubernetes.heartbeat import Heartbeat
from flotilla.components.kubernetes.jobset import JobSets
from flotilla.components.kubernetes.launcher import delete_jobs
from flotilla.components.kubernetes.pods.template import Place
from flotilla.components.kubernetes.supervisor import Supervisor
from flotilla.trainer.config.schema import Config
from flotilla.trainer.events import Restart, Suspension
from flotilla.trainer.runtime.errors import INTERRUPTED
from tests.components.kubernetes.attempts import (
    Attempt,
    heard,
    job_of,
    running_step,
    settings,
    step,
    without_beats,
)
from tests.kubernetes import pods
from tests.kubernetes.cluster import NAMESPACE
from tests.kubernetes.conditions import condition
from tests.kubernetes.control import USER
from tests.kubernetes.jobset_api import with_schema

MESSAGE = "interrupted at global step 7; checkpoint gs://b/step-7"
pytestmark = pytest.mark.usefixtures("run_events")
KINDS = ("jobsets", "jobs", "pods", "leases", "services")


def tree_of(max_restarts=3, workers=1, job=None, **deadlines):
    tree = settings(max_restarts, **deadlines)
    tree["cluster"] |= {"launcher": "jobset", "workers": workers}
    tree["cluster"]["kubernetes"]["job"] = job or {}
    return tree


def start(kube, **more):
    attempt = Attempt(job_of(tree_of(**more)))
    kube.wait_watched("jobsets", "pods")
    kube.run_all()
    return attempt


def finish(kube, attempt):
    kube.finish("chief-0", 0)
    kube.store.wait(lambda: not kube.jobsets())
    kube.end_deleted()
    attempt.succeed()
    kube.store.wait(lambda: not [kind for kind in KINDS if kube.store.all(kind, NAMESPACE)])


def uids(kube):
    return {task: pod["metadata"]["uid"] for task, pod in kube.pods().items()}


def kill_launcher(kube):
    with step(kube, tree_of()) as process:
        kube.wait_renewed()
        kube.run_all()
        kube.wait_followed("chief-0")
        process.signal(signal.SIGKILL)
        process.end()


def manifest(**more):
    return JobSets().manifest(job_of(tree_of(**more)), Place(namespace=NAMESPACE))


@pytest.fixture
def training(kube):
    with running_step(kube, tree_of(), "jobsets", "pods") as process:
        kube.wait_followed("chief-0")
        yield process


@pytest.fixture(autouse=True)
def _jobset(kube):
    """Install JobSet, and let the test end deleted pods."""
    kube.install_jobset()
    kube.store.graceful.add("pods")


def fail(kube, attempt):
    kube.store.wait(lambda: not kube.jobsets())
    kube.end_deleted()
    message = attempt.failure()
    kube.store.wait(lambda: not [kind for kind in KINDS if kube.store.all(kind, NAMESPACE)])
    return message


def wait_terminating(kube):
    """Wait until every pod is being deleted."""
    kube.store.wait(
        lambda: all(each["metadata"].get("deletionTimestamp") for each in kube.pods().values())
    )


def delete_gracefully(kube, task):
    kube.take_away(task)
    kube.end_deleted()


def evict(kube, task):
    kube.take_away(task, "EvictionByEvictionAPI")
    kube.end_deleted()


def delete_by_force(kube, task):
    kube.take_away(task, grace=0)


def kill(kube, task):
    # The guard is killed too, as by the kernel when memory runs out.
    kube.finish(task, 137)


LOSSES = [delete_gracefully, evict, delete_by_force, kill]


@pytest.mark.parametrize(
    ("task", "lose"),
    [*(("worker-0", lose) for lose in LOSSES), ("ps-0", kill), ("chief-0", delete_gracefully)],
)
def test_a_lost_pod_costs_that_pod_and_comes_back_at_once(kube, run_events, task, lose):
    # Without the launcher's help, the Job controller would wait 1000 s.
    kube.job_controller.backoff_seconds = 1000.0
    attempt = start(kube, workers=2)
    jobset, before = kube.jobset()["metadata"]["uid"], uids(kube)
    lose(kube, task)
    pods.running(kube.store, kube.pod(task, but=before[task]))
    after = uids(kube)
    assert kube.jobset()["metadata"]["uid"] == jobset
    assert {each for each in before if before[each] != after[each]} == {task}
    finish(kube, attempt)
    [restart] = run_events(Restart)
    assert restart.task == task


def test_a_pod_that_is_deleted_with_its_job_counts_once(kube, run_events, monkeypatch):
    kube.job_controller.backoff_seconds = 0.0
    attempt = start(kube, max_restarts=1)
    before, recreated = uids(kube)["worker-0"], []
    bring_back = JobSets.bring_back

    def delete_later(engine, api, pod):
        recreated.append(kube.pod("worker-0", but=before)["metadata"]["uid"])
        pods.running(kube.store, kube.pod("worker-0", but=before))
        return bring_back(engine, api, pod)

    monkeypatch.setattr(JobSets, "bring_back", delete_later)
    monkeypatch.setattr(Supervisor, "_is_back", lambda *_: False)
    kube.finish("worker-0", 137)
    kube.store.wait(
        lambda: [
            p for p in kube.store.all("pods", NAMESPACE) if "deletionTimestamp" in p["metadata"]
        ]
    )
    kube.end_deleted()
    pods.running(kube.store, kube.pod("worker-0", but=recreated[0]))
    finish(kube, attempt)
    assert [each.task for each in run_events(Restart)] == ["worker-0"]


def test_past_the_limit_of_restarts_the_job_ends(kube):
    attempt = start(kube, max_restarts=1)
    for _ in range(2):
        before = uids(kube)["worker-0"]
        kube.write_log("worker-0", "the last line")
        kube.finish("worker-0", 137)
        if kube.jobsets() and _ == 0:
            pods.running(kube.store, kube.pod("worker-0", but=before))
    message = fail(kube, attempt)
    assert message.startswith(
        "cluster.max_restarts (1) is exceeded: worker-0 ended with exit code 137 (signal SIGKILL)"
    )
    assert "the last line" in message


def test_a_final_code_fails_the_job_with_the_words_of_its_task(kube):
    attempt = start(kube)
    kube.finish("worker-0", 2, "data.batch: no such key")
    message = fail(kube, attempt)
    assert message.startswith("data.batch: no such key (worker-0, pod ")


def test_a_worker_that_ends_with_0_while_its_pod_is_deleted_comes_back(kube, run_events):
    attempt = start(kube)
    before = uids(kube)["worker-0"]
    kube.take_away("worker-0")
    kube.end_deleted({"worker-0": 0})
    pods.running(kube.store, kube.pod("worker-0", but=before))
    finish(kube, attempt)
    assert [each.task for each in run_events(Restart)] == ["worker-0"]


def test_where_jobs_may_not_be_deleted_a_lost_pod_comes_back_later(kube, caplog):
    kube.server.control.deny(USER, "delete jobs")
    kube.job_controller.backoff_seconds = 1.0
    attempt = start(kube)
    before = uids(kube)["worker-0"]
    evict(kube, "worker-0")
    pods.running(kube.store, kube.pod("worker-0", but=before))
    finish(kube, attempt)
    assert "Kubernetes delays the restart of worker-0 (back-off)" in caplog.text


def test_a_pod_that_does_not_come_back_is_said_with_its_controller(kube, caplog, monkeypatch):
    monkeypatch.setattr("flotilla.components.kubernetes.supervisor.CHECK_SECONDS", 0.1)
    monkeypatch.setattr("flotilla.components.kubernetes.supervisor.ABSENT_SECONDS", 0.3)
    attempt = start(kube)
    before = uids(kube)["worker-0"]
    kube.install_jobset(replicas=0)
    evict(kube, "worker-0")
    kube.store.wait(lambda: "worker-0 has no new pod after" in caplog.text)
    assert "the JobSet controller is not running, or it cannot create the pod; check" in caplog.text
    kube.install_jobset()
    pods.running(kube.store, kube.pod("worker-0", but=before))
    finish(kube, attempt)


def test_who_takes_over_a_lease_changes_no_owner_of_it(kube, monkeypatch):
    kill_launcher(kube)
    before, patched, patch = kube.wait_renewed(), [], Api.patch

    def note(self, resource, name, tree, **more):
        if resource.plural == "leases":
            patched.append(tree.get("metadata", {}))
        return patch(self, resource, name, tree, **more)

    monkeypatch.setattr(Api, "patch", note)
    retry = Attempt(job_of(tree_of()))
    kube.wait_renewed(but=before)
    finish(kube, retry)
    assert any("labels" in each for each in patched)
    assert not any("ownerReferences" in each for each in patched)


def test_a_restart_that_a_guard_has_made_counts(kube, run_events):
    attempt = start(kube, max_restarts=1)
    cause = "exit code 137 (signal SIGKILL)"
    for number in (1, 2):
        restart = Restart(task="ps-0", cause=cause, restarts=number, code=137)
        kube.write_event("ps-0", restart)
    message = fail(kube, attempt)
    assert message == f"cluster.max_restarts (1) is exceeded: ps-0 ended with {cause}"
    assert [(each.task, each.restarts) for each in run_events(Restart)] == [("ps-0", 1)]


def test_a_job_that_loses_its_room_waits_and_goes_on(kube, run_events):
    attempt = start(kube, max_restarts=0)
    before = uids(kube)
    for task in before:
        kube.wait_followed(task)
    with heard(Suspension):
        kube.suspend(kube.jobset(), True)
    wait_terminating(kube)
    kube.end_deleted({"chief-0": 130})
    kube.store.wait(lambda: not kube.pods())
    kube.suspend(kube.jobset(), False)
    kube.run_all()
    assert not set(uids(kube).values()) & set(before.values())
    finish(kube, attempt)
    assert not run_events(Restart)
    waits = [(each.is_over, each.was_running) for each in run_events(Suspension)]
    assert waits == [(False, True), (True, True)]


class TestCancelled:
    """Tests what a launcher or the exit step does when the run is cancelled."""

    pytestmark = pytest.mark.cluster

    def test_the_job_is_suspended_and_deleted_when_no_pod_runs(self, kube, training):
        before = len(kube.server.requests)
        training.signal()
        kube.store.wait(lambda: kube.jobset()["spec"].get("suspend"))
        asked = without_beats(kube.server.requests[before:])
        writes = [request for request in asked if not request.startswith("GET")]
        # The signal handler must suspend the job before it does anything else.
        assert writes[0].startswith("PATCH /apis/jobset")
        wait_terminating(kube)
        kube.finish("chief-0", 130, MESSAGE)
        assert kube.jobsets()
        kube.end_deleted()
        assert training.end()[::2] == (INTERRUPTED, MESSAGE)
        kube.wait_until_deleted()

    def test_with_the_controller_away_the_guard_is_asked(self, kube, training):
        kube.install_jobset(replicas=0)
        training.signal()
        kube.store.wait(
            lambda: names.STOP in (kube.leases()[0]["metadata"].get("annotations") or {})
        )
        assert not kube.jobset()["spec"].get("suspend")
        kube.write_log("chief-0", names.STOPPING)
        kube.finish("chief-0", 1, MESSAGE)
        kube.store.wait(lambda: not kube.jobsets())
        kube.end_deleted()
        assert training.end()[0] == INTERRUPTED
        kube.wait_until_deleted()

    def test_the_exit_step_suspends_what_a_killed_launcher_has_left(self, kube, training):
        training.signal(signal.SIGKILL)
        training.end()
        ended = threading.Thread(
            target=delete_jobs, args=(JobSets(), Config().cluster.kubernetes, "run-1"), daemon=True
        )
        ended.start()
        kube.store.wait(lambda: kube.jobset()["spec"].get("suspend"))
        wait_terminating(kube)
        kube.end_deleted()
        ended.join(60)
        assert not ended.is_alive()
        kube.wait_until_deleted()


def test_kueue_would_resume_a_job_so_that_its_guard_is_asked():
    job = manifest(job={"queue_name": "gpus"})
    job["metadata"]["uid"] = "1"
    assert type(JobSets().stop(job)) is Stop
    del job["metadata"]["labels"][names.KUEUE]
    assert type(JobSets().stop(job)) is SuspendingStop


def test_the_heartbeat_goes_on_with_the_controller_away(kube):
    attempt = start(kube, heartbeat=1)
    kube.wait_renewed()
    kube.install_jobset(replicas=0)
    [before] = kube.leases()
    kube.store.wait(lambda: kube.leases() != [before])
    kube.install_jobset()
    finish(kube, attempt)


def test_a_retry_adopts_the_job_whatever_pods_of_it_have_failed_before(kube):
    kill_launcher(kube)
    kube.job_controller.backoff_seconds = 0.01
    before = uids(kube)
    evict(kube, "worker-0")
    pods.running(kube.store, kube.pod("worker-0", but=before["worker-0"]))
    jobs, after = kube.child_jobs(), uids(kube)
    retry = Attempt(job_of(tree_of()))
    kube.wait_followed("chief-0")
    kube.wait_followed("worker-0")
    assert {task: job["metadata"]["uid"] for task, job in kube.child_jobs().items()} == {
        task: job["metadata"]["uid"] for task, job in jobs.items()
    }
    assert uids(kube) == after
    finish(kube, retry)


class TestRefused:
    """Tests that a job that cannot be launched is reported in one line and leaves no object."""

    def test_without_jobset_the_message_names_what_to_install(self, kube):
        kube.server.control.kinds.clear()
        message = Attempt(job_of(tree_of())).failure()
        assert "this cluster does not serve JobSets: JobSet, or its CRD jobsets.jobset" in message

    @with_schema
    def test_a_field_that_an_old_version_does_not_know_is_named(self, kube):
        kube.install_jobset("v0.2.0", lacks=["spec.ttlSecondsAfterFinished"])
        message = Attempt(job_of(tree_of())).failure()
        assert 'unknown field "spec.ttlSecondsAfterFinished"' in message
        assert "the JobSet version of this cluster does not know the field" in message
        assert not kube.jobsets()

    def test_a_webhook_that_nobody_answers_is_named(self, kube):
        kube.install_jobset(replicas=0)
        message = Attempt(job_of(tree_of(operator=1))).failure()
        assert message.startswith("the JobSet controller has not reacted for 1 s (cluster.kubern")
        assert "selector app.kubernetes.io/name=jobset" in message

    def test_a_job_of_that_name_which_is_none_of_ours_stays(self, kube):
        job = manifest()
        job["metadata"] |= {"labels": {"team": "a"}, "annotations": {}}
        Api(connect(), NAMESPACE).create(JobSets.kind.resource, job)
        message = Attempt(job_of(tree_of())).failure()
        assert message == (
            f"the JobSet {job['metadata']['name']} does not belong to Flotilla, and "
            "Flotilla did not change it; delete it, or rename the model"
        )
        assert kube.jobsets()

    @pytest.mark.parametrize("may_look", [True, False])
    def test_a_service_of_someone_else_is_found_before_the_job_is_made(self, kube, may_look):
        name = manifest()["metadata"]["name"]
        kube.store.create("services", NAMESPACE, {"metadata": {"name": name}, "spec": {}})
        if not may_look:
            kube.faults.add("GET .*/services/", 403)
            attempt = start(kube)
            kube.store.remove("services", NAMESPACE, name)
            finish(kube, attempt)
            return
        message = Attempt(job_of(tree_of())).failure()
        assert message.startswith(
            f"the Service {name} does not belong to a JobSet, and would prevent"
        )
        assert f"kubectl delete service {name}" in message
        assert not kube.jobsets()

    def test_a_quota_that_stays_full_is_the_reason_though_no_event_is_of_the_jobset(self, kube):
        tree = {"metadata": {"name": "team"}, "spec": {"hard": {"pods": "1"}}}
        kube.store.create("resourcequotas", NAMESPACE, tree)
        message = Attempt(job_of(tree_of(queueing=2))).failure()
        assert message.startswith("2 of 3 pods were not created within 2 s (cluster.kubernetes.")
        assert "FailedCreate: Error creating: pods" in message
        assert "exceeded quota: team, requested: pods=1, used: pods=1, limited: pods=1" in message

    def test_pods_that_are_refused_are_the_reason_in_one_line(self, kube, monkeypatch):
        monkeypatch.setattr("flotilla.components.kubernetes.limits.LOOK_SECONDS", 0.2)
        monkeypatch.setattr("flotilla.components.kubernetes.supervisor.CHECK_SECONDS", 0.2)
        kube.store.labels[NAMESPACE] = {"pod-security.kubernetes.io/enforce": "restricted"}
        tree = tree_of()
        tree["cluster"]["kubernetes"]["pod"] = {"security": "image"}
        message = Attempt(job_of(tree)).failure()
        assert message.startswith("Kubernetes rejects the pods of the job ")
        assert "violates PodSecurity" in message
        kube.wait_until_deleted()

    @pytest.mark.parametrize(
        ("given", "key"),
        [
            ({"job": {"scheduling": {"gang": True}}}, "job.scheduling"),
            ({"job": {"clean_pod_policy": "All"}}, "job.clean_pod_policy"),
            ({"pod": {"restart_policy": "OnFailure"}}, "ps.restart_policy"),
        ],
    )
    def test_what_jobsets_do_not_have_is_refused_by_name(self, given, key):
        tree = tree_of()
        tree["cluster"]["kubernetes"] |= given
        message = Attempt(job_of(tree)).failure()
        assert message.startswith(f"cluster.kubernetes.{key}: ")


def test_a_job_past_its_deadline_names_the_setting(kube):
    # A long deadline is needed, because a short one may pass before all pods exist.
    attempt = start(kube, job={"active_deadline_seconds": 600})

    def began_long_ago(tree):
        tree["status"]["startTime"] = "2020-01-01T00:00:00Z"

    for job in kube.store.all("jobs", NAMESPACE):
        kube.store.change("jobs", NAMESPACE, job["metadata"]["name"], began_long_ago)
    # The Job fails only after its pods have ended, so none of them counts as lost.
    wait_terminating(kube)
    kube.end_deleted()
    message = fail(kube, attempt)
    assert "did not finish within 600 s (cluster.kubernetes.job.active_deadline_" in message


def test_a_failed_job_says_which_child_failed_it(kube):
    attempt = start(kube)
    name = kube.jobset()["metadata"]["name"]
    words = f"jobset failed due to one or more job failures (first failed job: {name}-worker-0)"

    def by(tree):
        condition(tree, "Failed", "FailedJobs", words)

    kube.store.change("jobsets", NAMESPACE, name, by)
    assert words in fail(kube, attempt)


def test_a_pod_that_came_back_during_an_outage_is_left_alone(kube, run_events, monkeypatch):
    monkeypatch.setattr(client, "FIRST_WAIT", 0.05)
    kube.job_controller.backoff_seconds = 0.01
    attempt = start(kube)
    before = uids(kube)["worker-0"]
    kube.wait_followed("worker-0")
    kube.server.go_down()
    kube.take_away("worker-0", grace=0)
    made = kube.pod("worker-0", but=before)
    pods.running(kube.store, made)
    with kube.store.changed:
        kube.store.expire()
    kube.faults.clear()
    kube.store.wait(lambda: run_events(Restart))
    kube.wait_followed("worker-0")
    assert uids(kube)["worker-0"] == made["metadata"]["uid"]
    finish(kube, attempt)
    assert [each.task for each in run_events(Restart)] == ["worker-0"]
    deleted = [each for each in kube.server.requests if each.startswith("DELETE /apis/batch")]
    assert not deleted


def test_a_job_is_adopted_while_its_controller_is_away(kube, monkeypatch):
    kill_launcher(kube)
    monkeypatch.setenv("KFP_POD_NAME", "step-2")
    monkeypatch.setenv("KFP_POD_UID", "uid-2")
    before, uid = kube.wait_renewed(), kube.jobset()["metadata"]["uid"]
    kube.install_jobset(replicas=0)
    retry = Attempt(job_of(tree_of()))
    kube.wait_renewed(but=before)
    assert kube.jobset()["metadata"]["uid"] == uid
    kube.install_jobset()
    finish(kube, retry)


@pytest.mark.parametrize("fault", ["GET .*/leases/", "PATCH .*/leases/"])
def test_a_lease_that_goes_with_an_earlier_job_is_made_anew(kube, fault):
    kill_launcher(kube)
    before = kube.wait_renewed()
    kube.faults.add(fault, 404, times=1)
    retry = Attempt(job_of(tree_of()))
    kube.wait_renewed(but=before)
    assert kube.faults.hits
    finish(kube, retry)


def test_pods_of_a_suspended_job_are_no_loss_where_jobs_may_not_be_listed(kube, run_events):
    kube.server.control.deny(USER, "list jobs", "delete jobs")
    attempt = start(kube, max_restarts=0)
    before = uids(kube)
    kube.wait_followed("worker-0")
    # Make the watch of pods report the deletion before the watch of JobSets reports the suspension.
    kube.faults.add("GET .*jobsets.*watch=", 503)
    kube.server.drop_streams()
    kube.suspend(kube.jobset(), True)
    wait_terminating(kube)
    kube.end_deleted({"chief-0": 130})
    kube.store.wait(lambda: not kube.pods())
    kube.faults.clear()
    kube.suspend(kube.jobset(), False)
    kube.run_all()
    assert not set(uids(kube).values()) & set(before.values())
    finish(kube, attempt)
    assert not run_events(Restart)


class TestCancelledLauncherRaces:
    """Tests that no checkpoint is lost if the run is cancelled while something else happens."""

    pytestmark = pytest.mark.cluster

    def test_while_the_chief_saves_since_the_job_lost_its_room(self, kube, training):
        kube.suspend(kube.jobset(), True)
        wait_terminating(kube)
        training.signal()
        kube.store.wait(lambda: training.process.poll() is not None or kube.stop_is_asked())
        assert kube.jobsets()
        kube.finish("chief-0", 130, MESSAGE)
        kube.end_deleted()
        assert training.end()[::2] == (INTERRUPTED, MESSAGE)
        kube.wait_until_deleted()

    def test_while_a_retry_waits_for_the_chief_of_a_job_that_is_stopped(self, kube):
        kill_launcher(kube)
        name, uid = (kube.jobset()["metadata"][key] for key in ("name", "uid"))
        patch = {"metadata": {"annotations": {names.STOP: uid}}, "spec": {"suspend": True}}
        kube.store.patch("jobsets", NAMESPACE, name, patch)
        wait_terminating(kube)
        before = len(kube.server.requests)
        with step(kube, tree_of()) as retry:
            looks = f"GET /api/v1/namespaces/{NAMESPACE}/pods"

            def asked(since):
                return [r for r in kube.server.requests[since:] if r.startswith(looks)]

            kube.store.wait(lambda: asked(before))
            retry.signal()
            signalled = len(kube.server.requests)
            kube.store.wait(lambda: len(asked(signalled)) > 2)
            assert kube.jobsets()
            kube.end_deleted({"chief-0": 130})
            assert retry.end()[0] == INTERRUPTED
            kube.wait_until_deleted()


def test_a_launcher_whose_job_another_one_has_taken_over_leaves_it(kube):
    first = start(kube, heartbeat=1)
    before, uid = kube.wait_renewed(), kube.jobset()["metadata"]["uid"]
    second = Attempt(job_of(tree_of(heartbeat=1)))
    message = first.failure()
    assert "another launcher" in message
    assert kube.wait_renewed(but=before)
    assert kube.jobset()["metadata"]["uid"] == uid
    finish(kube, second)


def test_a_job_that_is_taken_over_between_a_look_and_a_heartbeat_is_left(kube, monkeypatch):
    other, look = "flotilla-launcher-other", Heartbeat._own_version

    def looked_and_lost(heartbeat):
        version = look(heartbeat)
        (lease,) = kube.leases()
        name = lease["metadata"]["name"]
        kube.store.patch("leases", NAMESPACE, name, {"spec": {"holderIdentity": other}})
        return version

    monkeypatch.setattr(Heartbeat, "_own_version", looked_and_lost)
    assert f"another launcher ({other})" in start(kube, heartbeat=1).failure()
    (lease,) = kube.leases()
    assert lease["spec"]["holderIdentity"] == other

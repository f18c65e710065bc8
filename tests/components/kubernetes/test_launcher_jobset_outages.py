"""Tests the launcher of a JobSet while the API, its controller or another launcher interferes."""

import pytest

from flotilla.components.kubernetes import names
from flotilla.components.kubernetes.api import client
from flotilla.components.kubernetes.heartbeat import Heartbeat
from flotilla.trainer.events import Restart
from flotilla.trainer.runtime.errors import INTERRUPTED
from tests.components.kubernetes.attempts import (
    Attempt,
    job_of,
    step,
)
from tests.components.kubernetes.jobset_attempts import (
    MESSAGE,
    finish,
    kill_launcher,
    prepare,
    start,
    tree_of,
    uids,
)
from tests.kubernetes import pods
from tests.kubernetes.cluster import NAMESPACE
from tests.kubernetes.control import USER


@pytest.fixture(autouse=True)
def run_events(tmp_path, monkeypatch, kube):
    return prepare(kube, tmp_path / "events.jsonl", monkeypatch)


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
    name = kube.jobset()["metadata"]["name"]
    kube.wait_followed("worker-0")
    # Make the watch of pods report the deletion before the watch of JobSets reports the suspension.
    kube.faults.add("GET .*jobsets.*watch=", 503)
    kube.server.drop_streams()
    kube.store.patch("jobsets", NAMESPACE, name, {"spec": {"suspend": True}})
    kube.store.wait(
        lambda: all(p["metadata"].get("deletionTimestamp") for p in kube.pods().values())
    )
    kube.end_deleted({"chief-0": 130})
    kube.store.wait(lambda: not kube.pods())
    kube.faults.clear()
    kube.store.patch("jobsets", NAMESPACE, name, {"spec": {"suspend": False}})
    kube.run_all()
    assert not set(uids(kube).values()) & set(before.values())
    finish(kube, attempt)
    assert not run_events(Restart)


class TestCancelledLauncherRaces:
    """Tests that no checkpoint is lost if the run is cancelled while something else happens."""

    pytestmark = pytest.mark.cluster

    def saving(self, kube):
        kube.store.wait(
            lambda: all(p["metadata"].get("deletionTimestamp") for p in kube.pods().values())
        )

    def test_while_the_chief_saves_since_the_job_lost_its_room(self, kube):
        with step(kube, tree_of()) as process:
            kube.wait_watched("jobsets", "pods")
            kube.run_all()
            kube.wait_followed("chief-0")
            name = kube.jobset()["metadata"]["name"]
            kube.store.patch("jobsets", NAMESPACE, name, {"spec": {"suspend": True}})
            self.saving(kube)
            process.signal()
            kube.store.wait(lambda: process.process.poll() is not None or kube.stop_is_asked())
            assert kube.jobsets()
            kube.finish("chief-0", 130, MESSAGE)
            kube.end_deleted()
            code, _, message = process.end()
            assert (code, message) == (INTERRUPTED, MESSAGE)
            kube.wait_until_deleted()

    def test_while_a_retry_waits_for_the_chief_of_a_job_that_is_stopped(self, kube):
        kill_launcher(kube)
        name, uid = (kube.jobset()["metadata"][key] for key in ("name", "uid"))
        patch = {"metadata": {"annotations": {names.STOP: uid}}, "spec": {"suspend": True}}
        kube.store.patch("jobsets", NAMESPACE, name, patch)
        self.saving(kube)
        before = len(kube.server.requests)
        with step(kube, tree_of()) as retry:
            looks = f"GET /api/v1/namespaces/{NAMESPACE}/pods"
            kube.store.wait(
                lambda: [r for r in kube.server.requests[before:] if r.startswith(looks)]
            )
            retry.signal()
            asked = len(kube.server.requests)
            kube.store.wait(
                lambda: len([r for r in kube.server.requests[asked:] if r.startswith(looks)]) > 2
            )
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

"""The controller of JobSets does what the real one does; see `README.md` for what was seen."""

from __future__ import annotations

import pytest
from kubernetes import client

from tests.kubernetes import pods
from tests.kubernetes.cluster import NAMESPACE, jobset
from tests.kubernetes.conditions import is_true

ARGS = ("jobset.x-k8s.io", "v1alpha2", NAMESPACE, "jobsets")
NEVER_AGAIN = {
    "rules": [
        {
            "action": "Ignore",
            "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
        },
        {
            "action": "FailJob",
            "onExitCodes": {
                "containerName": "tensorflow",
                "operator": "In",
                "values": list(range(1, 128)),
            },
        },
    ]
}
POLICY = {"podFailurePolicy": NEVER_AGAIN, "backoffLimit": 20}


@pytest.fixture
def jobsets(kube, api):
    kube.install_jobset()
    kube.job_controller.backoff_seconds = 0.05
    # The end of a deleted pod is left to the test.
    kube.store.graceful.add("pods")
    return client.CustomObjectsApi(api)


def start(kube, jobsets, tree=None):
    jobsets.create_namespaced_custom_object(*ARGS, tree or jobset(job=POLICY))
    return kube.run_all()


def ended(kube, kind):
    """Wait until a condition is true, and return it."""
    kube.store.wait(lambda: is_true(kube.jobset(), kind))
    return next(each for each in kube.jobset()["status"]["conditions"] if each["type"] == kind)


def counts(kube, role):
    listed = kube.jobset()["status"]["replicatedJobsStatus"]
    return next(each for each in listed if each["name"] == role)


def events(kube, involved):
    uid = involved["metadata"]["uid"]
    found = kube.store.all("events", NAMESPACE, fields=f"involvedObject.uid={uid}")
    return [(each["reason"], each["message"]) for each in found if each["type"] == "Warning"]


def test_a_jobset_has_a_service_and_a_job_and_a_pod_for_each_task(kube, jobsets):
    found = start(kube, jobsets)
    assert set(found) == {"chief-0", "ps-0", "worker-0", "worker-1"}
    [service] = kube.store.all("services", NAMESPACE)
    assert (service["metadata"]["name"], service["spec"]["clusterIP"]) == ("a", "None")
    assert service["spec"]["selector"] == {"jobset.sigs.k8s.io/jobset-name": "a"}
    assert {j["metadata"]["name"] for j in kube.child_jobs().values()} == {
        "a-chief-0", "a-ps-0", "a-worker-0", "a-worker-1",
    }  # fmt: skip
    pod = found["worker-1"]
    name, _, suffix = pod["metadata"]["name"].rpartition("-")
    assert (name, len(suffix)) == ("a-worker-1-0", 5)
    assert (pod["spec"]["hostname"], pod["spec"]["subdomain"]) == ("a-worker-1-0", "a")
    labels = pod["metadata"]["labels"]
    expected = {
        "jobset-name": "a", "jobset-uid": kube.jobset()["metadata"]["uid"],
        "replicatedjob-name": "worker", "replicatedjob-replicas": "2", "job-index": "1",
        "job-global-index": "3", "global-replicas": "4", "restart-attempt": "0",
        "group-name": "default", "group-replicas": "4", "job-group-index": "3",
    }  # fmt: skip
    assert {key: labels[f"jobset.sigs.k8s.io/{key}"] for key in expected} == expected
    assert labels["batch.kubernetes.io/job-completion-index"] == "0"
    assert labels["job-name"] == "a-worker-1"


def test_the_end_of_the_chief_completes_the_jobset(kube, jobsets):
    start(kube, jobsets)
    kube.finish("worker-0", 0)
    kube.store.wait(lambda: counts(kube, "worker")["succeeded"] == 1)
    assert "terminalState" not in kube.jobset()["status"]
    chief = kube.finish("chief-0", 0)
    done = ended(kube, "Completed")
    assert (done["reason"], kube.jobset()["status"]["terminalState"]) == (
        "AllJobsCompleted",
        "Completed",
    )
    # The other Jobs are there until their pods have gone; the pods of those that are done stay.
    kube.store.wait(lambda: kube.pod("ps-0")["metadata"].get("deletionTimestamp"))
    assert kube.child_jobs()["ps-0"]["metadata"]["finalizers"] == ["foregroundDeletion"]
    kube.end_deleted()
    kube.store.wait(lambda: set(kube.child_jobs()) == {"chief-0", "worker-0"})
    assert kube.pods()["chief-0"]["metadata"]["uid"] == chief["metadata"]["uid"]


def test_a_finished_jobset_goes_when_its_time_is_over(kube, jobsets):
    start(kube, jobsets, jobset(roles={"chief": 1}, ttlSecondsAfterFinished=0))
    kube.finish("chief-0", 0)
    kube.wait_until_deleted()
    assert not kube.store.all("services", NAMESPACE)


def test_a_worker_that_is_done_never_comes_back(kube, jobsets):
    start(kube, jobsets)
    kube.finish("worker-0", 0)
    kube.store.wait(lambda: is_true(kube.child_jobs()["worker-0"], "Complete"))
    assert len(kube.pods_of("worker-0")) == 1


def test_an_exit_code_that_is_final_fails_the_jobset_and_takes_the_chief_away(kube, jobsets):
    start(kube, jobsets)
    failed = kube.finish("worker-1", 2)
    condition = ended(kube, "Failed")
    assert (condition["reason"], condition["message"]) == (
        "FailedJobs",
        "jobset failed due to one or more job failures (first failed job: a-worker-1)",
    )
    job = kube.child_jobs()["worker-1"]
    [cause] = [each for each in job["status"]["conditions"] if each["type"] == "Failed"]
    assert (cause["reason"], cause["message"]) == (
        "PodFailurePolicy",
        f"Container tensorflow for pod models/{failed['metadata']['name']} failed with exit code "
        "2 matching FailJob rule at index 1",
    )
    kube.store.wait(lambda: kube.pods()["chief-0"]["metadata"].get("deletionTimestamp"))
    kube.end_deleted()
    kube.store.wait(lambda: set(kube.child_jobs()) == {"worker-1"})
    assert set(kube.pods()) == {"worker-1"}


def test_a_lost_pod_costs_that_pod_only_and_shows_in_counts_alone(kube, jobsets):
    start(kube, jobsets)
    kube.store.wait(lambda: counts(kube, "worker")["ready"] == 2)
    before = kube.finish("worker-0", 138)
    kube.store.wait(lambda: counts(kube, "worker")["ready"] == 1)
    after = kube.pod("worker-0", but=before["metadata"]["uid"])
    pods.running(kube.store, after)
    kube.store.wait(lambda: counts(kube, "worker")["ready"] == 2)
    assert [p["metadata"]["uid"] for p in kube.pods_of("worker-0")] == [
        before["metadata"]["uid"],
        after["metadata"]["uid"],
    ]
    assert kube.jobset()["status"].get("conditions", []) == []
    assert events(kube, kube.jobset()) == []


def test_a_child_job_that_is_deleted_comes_again_at_once_with_fresh_counters(kube, jobsets, api):
    kube.job_controller.backoff_seconds = 1000.0
    start(kube, jobsets)
    lost = kube.finish("worker-0", 138)
    old = kube.store.wait(lambda: kube.child_jobs()["worker-0"]["status"].get("failed"))
    assert old == 1
    client.BatchV1Api(api).delete_namespaced_job(
        "a-worker-0", NAMESPACE, propagation_policy="Background"
    )
    kube.pod("worker-0", but=lost["metadata"]["uid"])
    assert kube.child_jobs()["worker-0"]["status"]["failed"] == 0
    assert kube.jobset()["status"].get("restarts", 0) == 0


def test_suspension_shows_before_the_pods_have_gone_and_counts_no_failure(kube, jobsets):
    before = start(kube, jobsets)
    jobsets.patch_namespaced_custom_object(*ARGS, "a", {"spec": {"suspend": True}})
    condition = ended(kube, "Suspended")
    assert (condition["reason"], condition["message"]) == ("SuspendedJobs", "jobset is suspended")
    kube.store.wait(lambda: kube.pods()["chief-0"]["metadata"].get("deletionTimestamp"))
    assert kube.store.all("services", NAMESPACE)
    kube.end_deleted({"chief-0": 143})
    assert not kube.store.all("pods", NAMESPACE)
    jobsets.patch_namespaced_custom_object(*ARGS, "a", {"spec": {"suspend": False}})
    kube.pod("chief-0", but=before["chief-0"]["metadata"]["uid"])
    kube.run_all()
    kube.store.wait(lambda: not is_true(kube.jobset(), "Suspended"))
    kube.store.wait(lambda: counts(kube, "worker")["ready"] == 2)
    assert [job["status"]["failed"] for job in kube.child_jobs().values()] == [0, 0, 0, 0]


def test_a_jobset_that_is_created_suspended_has_jobs_and_no_pods(kube, jobsets):
    jobsets.create_namespaced_custom_object(*ARGS, jobset(suspend=True))
    assert ended(kube, "Suspended")
    kube.store.wait(lambda: counts(kube, "worker")["suspended"] == 2)
    assert kube.pods() == {}


def test_a_deletion_takes_the_service_at_once_while_pods_have_their_grace(kube, jobsets):
    start(kube, jobsets)
    lease = {
        "metadata": {"name": "beat", "ownerReferences": [{"uid": kube.jobset()["metadata"]["uid"]}]}
    }
    kube.store.create("leases", NAMESPACE, lease)
    jobsets.delete_namespaced_custom_object(*ARGS, "a")
    for kind in ("jobsets", "jobs", "services", "leases"):
        assert not kube.store.all(kind, NAMESPACE)
    assert {p["status"]["phase"] for p in kube.pods().values()} == {"Running"}
    # A new one of that name does not wait for them.
    jobsets.create_namespaced_custom_object(*ARGS, jobset())
    kube.store.wait(lambda: len(kube.pods_of("chief-0")) == 2)
    kube.end_deleted()
    kube.store.wait(lambda: len(kube.pods_of("chief-0")) == 1)


def test_a_foreign_service_of_that_name_is_used(kube, jobsets):
    kube.store.create("services", NAMESPACE, {"metadata": {"name": "a"}, "spec": {}})
    start(kube, jobsets)
    [service] = kube.store.all("services", NAMESPACE)
    assert service["spec"] == {}
    assert events(kube, kube.jobset()) == []


def test_with_a_limit_of_restarts_one_failure_begins_all_again(kube, jobsets):
    tree = jobset(job={"backoffLimit": 0}, failurePolicy={"maxRestarts": 1})
    before = start(kube, jobsets, tree)
    kube.finish("worker-0", 1)
    kube.store.wait(lambda: kube.jobset()["status"].get("restarts") == 1)
    kube.store.wait(lambda: kube.pods()["chief-0"]["metadata"].get("deletionTimestamp"))
    kube.end_deleted()
    again = kube.pod("chief-0", but=before["chief-0"]["metadata"]["uid"])
    assert again["metadata"]["labels"]["jobset.sigs.k8s.io/restart-attempt"] == "1"
    kube.run_all()
    kube.store.wait(lambda: not is_true(kube.jobset(), "Restarting"))
    kube.finish("worker-0", 1)
    assert ended(kube, "Failed")["reason"] == "ReachedMaxRestarts"


def test_a_job_that_is_invalid_leaves_a_jobset_without_it(kube, jobsets):
    tree = jobset(roles={"chief": 1}, job=POLICY, pod={"restartPolicy": "OnFailure"})
    jobsets.create_namespaced_custom_object(*ARGS, tree)
    kube.store.wait(lambda: events(kube, kube.jobset()))
    assert events(kube, kube.jobset()) == [
        (
            "JobCreationFailed",
            'job "a-chief-0" creation failed with error: Job.batch "a-chief-0" is invalid: '
            'spec.template.spec.restartPolicy: Invalid value: "OnFailure": only "Never" is '
            "supported when podFailurePolicy is specified",
        )
    ]
    assert kube.child_jobs() == {}
    assert kube.store.all("services", NAMESPACE)
    [event] = kube.store.all("events", NAMESPACE)
    assert event["lastTimestamp"] is None
    assert event["eventTime"]


def test_what_forbids_a_pod_is_an_event_of_its_job(kube, jobsets):
    tree = jobset(roles={"chief": 1}, pod={"serviceAccountName": "robot"})
    jobsets.create_namespaced_custom_object(*ARGS, tree)
    job = kube.store.wait(lambda: kube.child_jobs().get("chief-0"))
    kube.store.wait(lambda: events(kube, job))
    assert events(kube, job) == [
        (
            "FailedCreate",
            'Error creating: pods "a-chief-0-0-" is forbidden: error looking up service account '
            'models/robot: serviceaccount "robot" not found',
        )
    ]
    assert events(kube, kube.jobset()) == []


def test_without_its_controller_no_pod_comes_back(kube, jobsets):
    start(kube, jobsets)
    kube.install_jobset(replicas=0)
    lost = kube.finish("worker-0", 138)
    job = kube.child_jobs()["worker-0"]
    kube.store.wait(lambda: events(kube, job))
    [(reason, message)] = events(kube, job)
    assert reason == "FailedCreate"
    assert message == (
        "Error creating: Internal error occurred: failed calling webhook "
        '"mpod.kb.io": failed to call webhook: Post "https://jobset-webhook-service.'
        'jobset-system.svc:443/mutate--v1-pod?timeout=10s": no endpoints available for service '
        '"jobset-webhook-service"'
    )
    kube.install_jobset()
    kube.pod("worker-0", but=lost["metadata"]["uid"])

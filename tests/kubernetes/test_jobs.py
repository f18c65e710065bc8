"""Tests that the fake Job controller behaves like the real one; `README.md` lists the evidence."""

import pytest
from kubernetes import client

from tests.kubernetes import pods
from tests.kubernetes.cluster import NAMESPACE
from tests.kubernetes.conditions import is_true
from tests.kubernetes.test_jobsets import NEVER_AGAIN, events


@pytest.fixture
def jobs(kube, api):
    kube.job_controller.backoff_seconds = 0.05
    kube.store.graceful.add("pods")
    return client.BatchV1Api(api)


def job(**spec):
    container = {"name": "tensorflow", "command": ["true"]}
    template = {"spec": {"containers": [container], "restartPolicy": "Never"}}
    defaults = {"completions": 1, "completionMode": "Indexed", "template": template}
    return {"metadata": {"name": "x-0"}, "spec": {**defaults, **spec}}


def start(kube, jobs, **spec):
    jobs.create_namespaced_job(NAMESPACE, job(**spec))
    return begin(kube)


def begin(kube):
    def found():
        listed = kube.store.all("pods", NAMESPACE)
        return [p for p in listed if p["status"]["phase"] == "Pending"]

    kube.store.wait(found)
    return pods.running(kube.store, found()[0])


def current(kube):
    return kube.store.get("jobs", NAMESPACE, "x-0")


def status(kube, field):
    return current(kube)["status"].get(field)


def condition(kube, kind):
    kube.store.wait(lambda: is_true(current(kube), kind))
    found = [each for each in current(kube)["status"]["conditions"] if each["type"] == kind]
    return found[0]["reason"], found[0]["message"]


def delete(kube, pod, grace=None):
    meta = pod["metadata"]
    kube.store.delete("pods", NAMESPACE, meta["name"], meta["uid"], grace)


def end(kube, pod, code):
    """End a pod that is being deleted, as the kubelet does."""
    pods.finished(kube.store, pod, code)
    kube.store.remove("pods", NAMESPACE, pod["metadata"]["name"])


def test_the_back_off_doubles_and_is_not_reset_while_a_pod_runs(kube, jobs):
    controller = kube.job_controller
    controller.backoff_seconds = 10.0
    pod = start(kube, jobs, backoffLimit=20)
    pods.finished(kube.store, pod, 137)
    kube.store.wait(lambda: status(kube, "failed") == 1)
    assert len(kube.store.all("pods", NAMESPACE)) == 1
    [backoff] = controller._backoffs.values()
    waits = []
    for failures in (1, 2, 3, 4, 5, 6, 7, 8):
        backoff.failures = failures
        waits.append(backoff.seconds(10.0, 600.0))
    assert waits == [10, 20, 40, 80, 160, 320, 600, 600]
    backoff.failures = 1
    controller.backoff_seconds = 0.01
    second = begin(kube)
    pods.finished(kube.store, second, 137)
    kube.store.wait(lambda: status(kube, "failed") == 2)
    assert backoff.failures == 2


def test_an_ignored_pod_waits_all_the_same(kube, jobs):
    kube.job_controller.backoff_seconds = 1000.0
    pod = start(kube, jobs, podFailurePolicy=NEVER_AGAIN, backoffLimit=0)
    pods.disrupted(kube.store, pod, "EvictionByEvictionAPI")
    delete(kube, pod)
    kube.store.wait(lambda: status(kube, "terminating") == 1)
    end(kube, pod, 1)
    kube.store.wait(lambda: not kube.store.all("pods", NAMESPACE))
    assert (status(kube, "failed"), is_true(current(kube), "Failed")) == (0, False)
    [backoff] = kube.job_controller._backoffs.values()
    assert backoff.failures == 1
    kube.job_controller.backoff_seconds = 0.01
    begin(kube)


def test_a_pod_on_a_dead_node_is_not_replaced(kube, jobs):
    pod = start(kube, jobs, podFailurePolicy=NEVER_AGAIN)
    assert current(kube)["spec"]["podReplacementPolicy"] == "Failed"
    delete(kube, pod)
    kube.store.wait(lambda: status(kube, "terminating") == 1)
    assert len(kube.store.all("pods", NAMESPACE)) == 1
    end(kube, pod, 143)
    assert begin(kube)["metadata"]["uid"] != pod["metadata"]["uid"]


def test_without_a_policy_a_pod_that_is_being_deleted_is_replaced_at_once(kube, jobs):
    pod = start(kube, jobs)
    delete(kube, pod)
    begin(kube)
    assert len(kube.store.all("pods", NAMESPACE)) == 2
    assert status(kube, "failed") == 1


def test_a_pod_deleted_by_force_is_counted_and_replaced(kube, jobs):
    pod = start(kube, jobs, podFailurePolicy=NEVER_AGAIN)
    delete(kube, pod, grace=0)
    begin(kube)
    assert status(kube, "failed") == 1
    assert len(kube.store.all("pods", NAMESPACE)) == 1


def test_a_deleted_pod_that_ends_with_0_completes_its_job(kube, jobs):
    pod = start(kube, jobs, podFailurePolicy=NEVER_AGAIN)
    delete(kube, pod)
    end(kube, pod, 0)
    assert condition(kube, "Complete")[0] == "CompletionsReached"


def test_a_deleted_pod_that_ends_with_a_final_code_fails_its_job(kube, jobs):
    pod = start(kube, jobs, podFailurePolicy=NEVER_AGAIN)
    delete(kube, pod)
    end(kube, pod, 1)
    assert condition(kube, "Failed")[0] == "PodFailurePolicy"


def test_more_failures_than_the_limit_fail_the_job(kube, jobs):
    pods.finished(kube.store, start(kube, jobs, backoffLimit=1), 137)
    pods.finished(kube.store, begin(kube), 137)
    reason = "BackoffLimitExceeded"
    message = "Job has reached the specified backoff limit"
    assert condition(kube, "Failed") == (reason, message)
    assert events(kube, current(kube)) == [(reason, message)]
    assert [p["status"]["phase"] for p in kube.store.all("pods", NAMESPACE)] == ["Failed"] * 2


def test_a_job_past_its_deadline_has_failed_once_its_pods_have_ended(kube, jobs):
    pod = start(kube, jobs, activeDeadlineSeconds=1)
    reason = "DeadlineExceeded"
    message = "Job was active longer than specified deadline"
    assert condition(kube, "FailureTarget") == (reason, message)
    assert not is_true(current(kube), "Failed")
    end(kube, pod, 143)
    assert condition(kube, "Failed") == (reason, message)


def test_a_job_that_is_suspended_counts_neither_failures_nor_time(kube, jobs):
    pod = start(kube, jobs)
    before = status(kube, "startTime")
    kube.store.patch("jobs", NAMESPACE, "x-0", {"spec": {"suspend": True}})
    assert condition(kube, "Suspended") == ("JobSuspended", "Job suspended")
    end(kube, pod, 143)
    kube.store.wait(lambda: not kube.store.all("pods", NAMESPACE))
    kube.store.patch("jobs", NAMESPACE, "x-0", {"spec": {"suspend": False}})
    begin(kube)
    assert (status(kube, "failed"), is_true(current(kube), "Suspended")) == (0, False)
    assert status(kube, "startTime") >= before


def test_deleting_a_job_leaves_its_pods_there_unless_the_api_is_asked_to(kube, jobs):
    pod = start(kube, jobs)
    jobs.delete_namespaced_job("x-0", NAMESPACE)
    kube.store.wait(lambda: not kube.store.all("jobs", NAMESPACE))
    [orphan] = kube.store.all("pods", NAMESPACE)
    assert (orphan["metadata"]["ownerReferences"], orphan["status"]["phase"]) == ([], "Running")
    jobs.create_namespaced_job(NAMESPACE, job())
    begin(kube)
    jobs.delete_namespaced_job("x-0", NAMESPACE, propagation_policy="Background")
    left = {
        p["metadata"]["uid"]
        for p in kube.store.all("pods", NAMESPACE)
        if not p["metadata"].get("deletionTimestamp")
    }
    assert left == {pod["metadata"]["uid"]}


def test_a_job_that_is_deleted_in_the_foreground_waits_for_its_pods(kube, jobs):
    pod = start(kube, jobs)
    jobs.delete_namespaced_job("x-0", NAMESPACE, propagation_policy="Foreground")
    assert current(kube)["metadata"]["finalizers"] == ["foregroundDeletion"]
    assert kube.store.get("pods", NAMESPACE, pod["metadata"]["name"])["metadata"][
        "deletionTimestamp"
    ]
    end(kube, pod, 143)
    kube.store.wait(lambda: not kube.store.all("jobs", NAMESPACE))
    assert not kube.store.all("pods", NAMESPACE)


def test_several_indexes_have_a_pod_each(kube, jobs):
    jobs.create_namespaced_job(NAMESPACE, job(completions=3, parallelism=2))
    first, second = begin(kube), begin(kube)
    assert [p["spec"]["hostname"] for p in (first, second)] == ["x-0-0", "x-0-1"]
    pods.finished(kube.store, first, 0)
    third = begin(kube)
    assert third["spec"]["hostname"] == "x-0-2"
    for pod in (second, third):
        pods.finished(kube.store, pod, 0)
    condition(kube, "Complete")
    assert status(kube, "completedIndexes") == "0,1,2"


def test_a_quota_that_is_full_refuses_a_pod_by_its_name(kube, jobs):
    quota = {"metadata": {"name": "team"}, "spec": {"hard": {"pods": "0"}}}
    kube.store.create("resourcequotas", NAMESPACE, quota)
    jobs.create_namespaced_job(NAMESPACE, job())
    kube.store.wait(lambda: events(kube, current(kube)))
    [(reason, message)] = events(kube, current(kube))[:1]
    assert reason == "FailedCreate"
    assert message.startswith('Error creating: pods "x-0-0-')
    assert message.endswith(
        "is forbidden: exceeded quota: team, requested: pods=1, used: pods=0, limited: pods=0"
    )
    kube.store.remove("resourcequotas", NAMESPACE, "team")
    begin(kube)


def test_a_pod_that_has_failed_uses_nothing_of_a_quota(kube, jobs):
    quota = {"metadata": {"name": "team"}, "spec": {"hard": {"pods": "1"}}}
    kube.store.create("resourcequotas", NAMESPACE, quota)
    pods.finished(kube.store, start(kube, jobs), 137)
    begin(kube)
    assert len(kube.store.all("pods", NAMESPACE)) == 2


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"completions": None, "parallelism": 1},
            "spec.completions: Required value: when completion mode is Indexed",
        ),
        (
            {"podFailurePolicy": NEVER_AGAIN, "podReplacementPolicy": "TerminatingOrFailed"},
            'spec.podReplacementPolicy: Unsupported value: "TerminatingOrFailed": supported '
            'values: "Failed"',
        ),
    ],
)
def test_an_invalid_job_is_refused(jobs, spec, message):
    tree = job(**spec)
    tree["spec"] = {key: value for key, value in tree["spec"].items() if value is not None}
    with pytest.raises(client.ApiException) as caught:
        jobs.create_namespaced_job(NAMESPACE, tree)
    assert caught.value.status == 422
    assert message in caught.value.body.replace('\\"', '"')

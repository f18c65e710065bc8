"""Tests that the fake JobSet controller behaves like the real one, as listed in `README.md`."""

import json

import pytest
from kubernetes import client

from tests.kubernetes import pods
from tests.kubernetes.cluster import NAMESPACE, jobset
from tests.kubernetes.conditions import is_true
from tests.kubernetes.jobset_api import with_schema

ARGS = ("jobset.x-k8s.io", "v1alpha2", NAMESPACE, "jobsets")
NEVER_AGAIN = {
    "rules": [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
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
    # Deleted pods remain until a test ends them.
    kube.store.graceful.add("pods")
    return client.CustomObjectsApi(api)


def start(kube, jobsets, tree=None):
    jobsets.create_namespaced_custom_object(*ARGS, tree or jobset(job=POLICY))
    return kube.run_all()


def ended(kube, kind):
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
    # The other Jobs exist until their pods are gone; the pods of completed Jobs are kept.
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
    # A new JobSet of the same name does not wait for the old pods.
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


def test_a_full_quota_is_an_event_of_the_job_alone(kube, jobsets):
    quota = {"metadata": {"name": "team"}, "spec": {"hard": {"pods": "0"}}}
    kube.store.create("resourcequotas", NAMESPACE, quota)
    jobsets.create_namespaced_custom_object(*ARGS, jobset(roles={"chief": 1}))
    job = kube.store.wait(lambda: kube.child_jobs().get("chief-0"))
    kube.store.wait(lambda: events(kube, job))
    [(reason, message), *_] = events(kube, job)
    assert reason == "FailedCreate"
    assert "exceeded quota: team, requested: pods=1, used: pods=0, limited: pods=0" in message
    assert events(kube, kube.jobset()) == []
    assert not any(
        each["status"] == "True" for each in kube.jobset()["status"].get("conditions", [])
    )


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


@pytest.fixture
def served(kube, api):
    kube.install_jobset()
    return client.CustomObjectsApi(api)


def create(served, tree, **more):
    return served.create_namespaced_custom_object(*ARGS, tree, **more)


def refused(call, *arguments, **more):
    with pytest.raises(client.ApiException) as caught:
        call(*arguments, **more)
    return caught.value.status, json.loads(caught.value.body)["message"]


def patch(served, body):
    return served.patch_namespaced_custom_object(*ARGS, "a", body)


def test_what_is_not_installed_is_not_served(api):
    served = client.CustomObjectsApi(api)
    for call in (
        lambda: create(served, jobset()),
        lambda: served.list_namespaced_custom_object(*ARGS),
        lambda: served.get_namespaced_custom_object(*ARGS, "a"),
    ):
        with pytest.raises(client.ApiException) as caught:
            call()
        assert (caught.value.status, caught.value.body) == (404, "404 page not found\n")


def test_jobs_and_leases_are_the_servers_own(api):
    assert client.BatchV1Api(api).list_namespaced_job(NAMESPACE).items == []
    leases = client.CoordinationV1Api(api)
    lease = {"metadata": {"name": "beat"}, "spec": {"holderIdentity": "me"}}
    leases.create_namespaced_lease(NAMESPACE, lease)
    leases.patch_namespaced_lease("beat", NAMESPACE, {"spec": {"holderIdentity": "you"}})
    assert leases.read_namespaced_lease("beat", NAMESPACE).spec.holder_identity == "you"
    wrong = ("batch", "v1", NAMESPACE, "leases")
    with pytest.raises(client.ApiException) as caught:
        client.CustomObjectsApi(api).list_namespaced_custom_object(*wrong)
    assert caught.value.status == 404


def test_the_controller_is_a_deployment_with_its_labels(kube):
    kube.install_jobset()
    [found] = kube.store.all(
        "deployments",
        "jobset-system",
        "app.kubernetes.io/name=jobset,control-plane=controller-manager",
    )
    assert found["metadata"]["name"] == "jobset-controller-manager"
    assert found["spec"]["template"]["spec"]["containers"][0]["image"].endswith(":v0.12.0")
    assert found["status"] == {"readyReplicas": 1}


def test_a_jobset_gets_its_defaults(served):
    tree = jobset(pod={"restartPolicy": None}, status={"restarts": 7})
    template = tree["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    del template["restartPolicy"]
    del tree["spec"]["successPolicy"]
    for role in tree["spec"]["replicatedJobs"][1:]:
        role["template"]["spec"]["template"]["spec"]["restartPolicy"] = "Never"
    made = create(served, tree)
    spec = made["spec"]
    assert spec["successPolicy"] == {"operator": "All"}
    assert spec["startupPolicy"] == {"startupPolicyOrder": "AnyOrder"}
    assert spec["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    role = spec["replicatedJobs"][0]
    assert (role["groupName"], role["template"]["spec"]["completionMode"]) == ("default", "Indexed")
    assert role["template"]["spec"]["template"]["spec"]["restartPolicy"] == "OnFailure"
    assert made.get("status", {}).get("restarts", 0) == 0


@with_schema
def test_unknown_fields_are_refused_when_strict_and_dropped_when_not(served):
    tree = jobset(xyz=1)
    tree["spec"]["replicatedJobs"][1]["template"]["spec"]["backOffLimit"] = 3
    assert refused(create, served, tree, field_validation="Strict") == (
        400,
        'JobSet in version "v1alpha2" cannot be handled as a JobSet: strict decoding error: '
        'unknown field "spec.replicatedJobs[1].template.spec.backOffLimit", '
        'unknown field "spec.xyz"',
    )
    spec = create(served, tree)["spec"]
    assert "xyz" not in spec
    assert "backOffLimit" not in spec["replicatedJobs"][1]["template"]["spec"]


@with_schema
def test_an_older_version_lacks_fields(kube, served):
    kube.install_jobset("v0.8.0", lacks=("spec.replicatedJobs.groupName", "spec.network"))
    tree = jobset(network={"enableDNSHostnames": True})
    assert refused(create, served, tree, field_validation="Strict") == (
        400,
        'JobSet in version "v1alpha2" cannot be handled as a JobSet: strict decoding error: '
        'unknown field "spec.network"',
    )


@with_schema
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"suspend": "yes"},
            'spec.suspend: Invalid value: "string": spec.suspend in body must be of type boolean: '
            '"string"',
        ),
        (
            {"successPolicy": {"operator": "Most"}},
            'spec.successPolicy.operator: Unsupported value: "Most": supported values: "All", '
            '"Any"',
        ),
        ({"replicatedJobs": [{"name": "a"}]}, "spec.replicatedJobs[0].template: Required value"),
    ],
)
def test_what_the_schema_does_not_allow_is_invalid(served, more, message):
    name = 'JobSet.jobset.x-k8s.io "a" is invalid: '
    assert refused(create, served, jobset(**more)) == (422, name + message)


@pytest.mark.parametrize(
    ("tree", "path", "value", "message"),
    [
        (
            jobset("a" * 48, {"chief": 1}),
            "name",
            f"{'a' * 48}-chief-0",
            "JobSet name is too long, pod names generated for this JobSet will exceed 63 "
            "characters",
        ),
        (
            jobset("7a", {"chief": 1}, {"completions": None}),
            "name",
            "7a-chief-0",
            "a DNS-1035 label must consist of lower case alphanumeric characters or '-', start "
            "with an alphabetic character, and end with an alphanumeric character (e.g. "
            "'my-name',  or 'abc-123', regex used for validation is "
            "'[a-z]([-a-z0-9]*[a-z0-9])?')",
        ),
    ],
)
def test_names_are_judged_with_those_that_are_made_of_them(served, tree, path, value, message):
    job = tree["spec"]["replicatedJobs"][0]["template"]["spec"]
    job.update({key: each for key, each in job.items() if each is not None})
    for key in [key for key, each in job.items() if each is None]:
        del job[key]
    name = tree["metadata"]["name"]
    assert refused(create, served, tree) == (
        422,
        'admission webhook "vjobset.kb.io" denied the request: JobSet.jobset.x-k8s.io '
        f'"{name}" is invalid: spec.replicatedJobs[0].{path}: Invalid value: "{value}": {message}',
    )


def test_a_name_of_43_letters_has_room_for_an_evaluator(served):
    assert create(served, jobset("a" * 43, {"chief": 1, "evaluator": 1}))


def test_policies_that_name_what_is_absent_are_refused(served):
    tree = jobset(successPolicy={"operator": "All", "targetReplicatedJobs": ["boss"]})
    status, message = refused(create, served, tree)
    assert status == 422
    assert message.endswith(
        "Internal error: invalid replicatedJob name 'boss' does not appear in .spec.ReplicatedJobs"
    )
    tree = jobset(failurePolicy={"rules": [{"name": "again", "action": "RestartJob"}]})
    assert "RestartJob feature gate is disabled" in refused(create, served, tree)[1]


def test_nothing_changes_but_suspension_and_the_time_to_live(served):
    create(served, jobset(roles={"chief": 1}))
    patch(served, {"spec": {"ttlSecondsAfterFinished": 9, "suspend": True}})
    changed = patch(served, {"spec": {"suspend": False}})
    assert changed["spec"]["ttlSecondsAfterFinished"] == 9
    patch(served, {"metadata": {"annotations": {"a": "1"}}})
    roles = changed["spec"]["replicatedJobs"]
    roles[0]["template"]["spec"]["backoffLimit"] = 3
    status, message = refused(patch, served, {"spec": {"replicatedJobs": roles}})
    assert status == 422
    assert message.startswith(
        'admission webhook "vjobset.kb.io" denied the request: JobSet.jobset.x-k8s.io "a" is '
        'invalid: spec.replicatedJobs: Invalid value: [{"'
    )
    assert message.endswith("}]: field is immutable")


@with_schema
def test_policies_are_immutable_by_the_schema(served):
    create(served, jobset(roles={"chief": 1}))
    body = {"spec": {"network": {"publishNotReadyAddresses": False}}}
    assert refused(patch, served, body) == (
        422,
        'JobSet.jobset.x-k8s.io "a" is invalid: spec.network: Invalid value: "object": Value is '
        "immutable",
    )


def test_a_suspended_jobset_takes_what_kueue_writes(served):
    made = create(served, jobset(roles={"chief": 1}, suspend=True))
    roles = made["spec"]["replicatedJobs"]
    pod = roles[0]["template"]["spec"]["template"]
    pod["spec"]["nodeSelector"] = {"pool": "spot"}
    pod["metadata"] = {"labels": {"x": "y"}}
    patched = patch(served, {"spec": {"replicatedJobs": roles}})
    assert patched["spec"]["replicatedJobs"][0]["template"]["spec"]["template"] == pod
    pod["spec"]["containers"][0]["command"] = ["false"]
    assert refused(patch, served, {"spec": {"replicatedJobs": roles}})[0] == 422


def test_without_the_controller_a_jobset_is_read_and_deleted_and_not_written(kube, served):
    create(served, jobset(job=POLICY))
    kube.install_jobset(replicas=0)
    beat = {"metadata": {"annotations": {"beat": "2"}}}
    calls = {
        "mjobset.kb.io": lambda: create(served, jobset("b")),
        "vjobset.kb.io": lambda: patch(served, beat),
    }
    for name, call in calls.items():
        status, message = refused(call)
        assert status == 500
        assert message.startswith(f'Internal error occurred: failed calling webhook "{name}": ')
        assert message.endswith('no endpoints available for service "jobset-webhook-service"')
    assert served.list_namespaced_custom_object(*ARGS)["items"]
    assert served.get_namespaced_custom_object(*ARGS, "a")
    served.delete_namespaced_custom_object(*ARGS, "a")
    assert kube.jobsets() == []


def test_a_quota_of_jobsets_is_named_with_their_group(kube, served):
    hard = {"count/jobsets.jobset.x-k8s.io": "0"}
    kube.store.create(
        "resourcequotas", NAMESPACE, {"metadata": {"name": "team"}, "spec": {"hard": hard}}
    )
    assert refused(create, served, jobset()) == (
        403,
        'jobsets.jobset.x-k8s.io "a" is forbidden: exceeded quota: team, requested: '
        "count/jobsets.jobset.x-k8s.io=1, used: count/jobsets.jobset.x-k8s.io=0, limited: "
        "count/jobsets.jobset.x-k8s.io=0",
    )


def test_permissions_name_the_group(kube, api, served):
    kube.server.control.deny(kube.server.control.user, "delete jobs", "create jobsets")
    assert refused(create, served, jobset())[1] == (
        f'jobsets.jobset.x-k8s.io is forbidden: User "{kube.server.control.user}" cannot create '
        'resource "jobsets" in API group "jobset.x-k8s.io" in the namespace "models"'
    )
    status, message = refused(client.BatchV1Api(api).delete_namespaced_job, "x", NAMESPACE)
    assert (status, 'cannot delete resource "jobs" in API group "batch"' in message) == (403, True)


def test_a_name_may_be_made_up(served):
    tree = jobset(roles={"chief": 1})
    tree["metadata"] = {"generateName": "run-"}
    name = create(served, tree)["metadata"]["name"]
    assert (name[:4], len(name)) == ("run-", 9)

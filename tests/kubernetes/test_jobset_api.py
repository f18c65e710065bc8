"""JobSets in the API: what is served, what the schema and the webhooks refuse, in their words."""

from __future__ import annotations

import json

import pytest
from kubernetes import client

from tests.kubernetes import crd
from tests.kubernetes.cluster import NAMESPACE, jobset
from tests.kubernetes.jobset_api import CRD
from tests.kubernetes.test_jobsets import ARGS, POLICY

ABSENT = "the CRD of JobSet is absent: it is no part of Flotilla"
with_schema = pytest.mark.skipif(not (crd.FOLDER / f"{CRD}.yaml").is_file(), reason=ABSENT)


@pytest.fixture
def jobsets(kube, api):
    kube.install_jobset()
    return client.CustomObjectsApi(api)


def create(jobsets, tree, **more):
    return jobsets.create_namespaced_custom_object(*ARGS, tree, **more)


def refused(call, *arguments, **more):
    """Return the status and the message of a refusal."""
    with pytest.raises(client.ApiException) as caught:
        call(*arguments, **more)
    return caught.value.status, json.loads(caught.value.body)["message"]


def patch(jobsets, body):
    return jobsets.patch_namespaced_custom_object(*ARGS, "a", body)


def test_what_is_not_installed_is_not_served(api):
    jobsets = client.CustomObjectsApi(api)
    for call in (
        lambda: create(jobsets, jobset()),
        lambda: jobsets.list_namespaced_custom_object(*ARGS),
        lambda: jobsets.get_namespaced_custom_object(*ARGS, "a"),
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


def test_a_jobset_gets_its_defaults(jobsets):
    tree = jobset(pod={"restartPolicy": None}, status={"restarts": 7})
    template = tree["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    del template["restartPolicy"]
    del tree["spec"]["successPolicy"]
    for role in tree["spec"]["replicatedJobs"][1:]:
        role["template"]["spec"]["template"]["spec"]["restartPolicy"] = "Never"
    made = create(jobsets, tree)
    spec = made["spec"]
    assert spec["successPolicy"] == {"operator": "All"}
    assert spec["startupPolicy"] == {"startupPolicyOrder": "AnyOrder"}
    assert spec["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    role = spec["replicatedJobs"][0]
    assert (role["groupName"], role["template"]["spec"]["completionMode"]) == ("default", "Indexed")
    assert role["template"]["spec"]["template"]["spec"]["restartPolicy"] == "OnFailure"
    assert made.get("status", {}).get("restarts", 0) == 0


@with_schema
def test_unknown_fields_are_refused_when_strict_and_dropped_when_not(jobsets):
    tree = jobset(xyz=1)
    tree["spec"]["replicatedJobs"][1]["template"]["spec"]["backOffLimit"] = 3
    assert refused(create, jobsets, tree, field_validation="Strict") == (
        400,
        'JobSet in version "v1alpha2" cannot be handled as a JobSet: strict decoding error: '
        'unknown field "spec.replicatedJobs[1].template.spec.backOffLimit", '
        'unknown field "spec.xyz"',
    )
    spec = create(jobsets, tree)["spec"]
    assert "xyz" not in spec
    assert "backOffLimit" not in spec["replicatedJobs"][1]["template"]["spec"]


@with_schema
def test_an_older_version_lacks_fields(kube, jobsets):
    kube.install_jobset("v0.8.0", lacks=("spec.replicatedJobs.groupName", "spec.network"))
    tree = jobset(network={"enableDNSHostnames": True})
    assert refused(create, jobsets, tree, field_validation="Strict") == (
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
def test_what_the_schema_does_not_allow_is_invalid(jobsets, more, message):
    name = 'JobSet.jobset.x-k8s.io "a" is invalid: '
    assert refused(create, jobsets, jobset(**more)) == (422, name + message)


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
def test_names_are_judged_with_those_that_are_made_of_them(jobsets, tree, path, value, message):
    job = tree["spec"]["replicatedJobs"][0]["template"]["spec"]
    job.update({key: each for key, each in job.items() if each is not None})
    for key in [key for key, each in job.items() if each is None]:
        del job[key]
    name = tree["metadata"]["name"]
    assert refused(create, jobsets, tree) == (
        422,
        'admission webhook "vjobset.kb.io" denied the request: JobSet.jobset.x-k8s.io '
        f'"{name}" is invalid: spec.replicatedJobs[0].{path}: Invalid value: "{value}": {message}',
    )


def test_a_name_of_43_letters_has_room_for_an_evaluator(jobsets):
    assert create(jobsets, jobset("a" * 43, {"chief": 1, "evaluator": 1}))


def test_policies_that_name_what_is_absent_are_refused(jobsets):
    tree = jobset(successPolicy={"operator": "All", "targetReplicatedJobs": ["boss"]})
    status, message = refused(create, jobsets, tree)
    assert status == 422
    assert message.endswith(
        "Internal error: invalid replicatedJob name 'boss' does not appear in .spec.ReplicatedJobs"
    )
    tree = jobset(failurePolicy={"rules": [{"name": "again", "action": "RestartJob"}]})
    assert "RestartJob feature gate is disabled" in refused(create, jobsets, tree)[1]


def test_nothing_changes_but_suspension_and_the_time_to_live(jobsets):
    create(jobsets, jobset(roles={"chief": 1}))
    patch(jobsets, {"spec": {"ttlSecondsAfterFinished": 9, "suspend": True}})
    changed = patch(jobsets, {"spec": {"suspend": False}})
    assert changed["spec"]["ttlSecondsAfterFinished"] == 9
    patch(jobsets, {"metadata": {"annotations": {"a": "1"}}})
    roles = changed["spec"]["replicatedJobs"]
    roles[0]["template"]["spec"]["backoffLimit"] = 3
    status, message = refused(patch, jobsets, {"spec": {"replicatedJobs": roles}})
    assert status == 422
    assert message.startswith(
        'admission webhook "vjobset.kb.io" denied the request: JobSet.jobset.x-k8s.io "a" is '
        'invalid: spec.replicatedJobs: Invalid value: [{"'
    )
    assert message.endswith("}]: field is immutable")


@with_schema
def test_policies_are_immutable_by_the_schema(jobsets):
    create(jobsets, jobset(roles={"chief": 1}))
    body = {"spec": {"network": {"publishNotReadyAddresses": False}}}
    assert refused(patch, jobsets, body) == (
        422,
        'JobSet.jobset.x-k8s.io "a" is invalid: spec.network: Invalid value: "object": Value is '
        "immutable",
    )


def test_a_suspended_jobset_takes_what_kueue_writes(jobsets):
    made = create(jobsets, jobset(roles={"chief": 1}, suspend=True))
    roles = made["spec"]["replicatedJobs"]
    pod = roles[0]["template"]["spec"]["template"]
    pod["spec"]["nodeSelector"] = {"pool": "spot"}
    pod["metadata"] = {"labels": {"x": "y"}}
    patched = patch(jobsets, {"spec": {"replicatedJobs": roles}})
    assert patched["spec"]["replicatedJobs"][0]["template"]["spec"]["template"] == pod
    pod["spec"]["containers"][0]["command"] = ["false"]
    assert refused(patch, jobsets, {"spec": {"replicatedJobs": roles}})[0] == 422


def test_without_the_controller_a_jobset_is_read_and_deleted_and_not_written(kube, jobsets):
    create(jobsets, jobset(job=POLICY))
    kube.install_jobset(replicas=0)
    beat = {"metadata": {"annotations": {"beat": "2"}}}
    calls = {
        "mjobset.kb.io": lambda: create(jobsets, jobset("b")),
        "vjobset.kb.io": lambda: patch(jobsets, beat),
    }
    for name, call in calls.items():
        status, message = refused(call)
        assert status == 500
        assert message.startswith(f'Internal error occurred: failed calling webhook "{name}": ')
        assert message.endswith('no endpoints available for service "jobset-webhook-service"')
    assert jobsets.list_namespaced_custom_object(*ARGS)["items"]
    assert jobsets.get_namespaced_custom_object(*ARGS, "a")
    jobsets.delete_namespaced_custom_object(*ARGS, "a")
    assert kube.jobsets() == []


def test_a_quota_of_jobsets_is_named_with_their_group(kube, jobsets):
    hard = {"count/jobsets.jobset.x-k8s.io": "0"}
    kube.store.create(
        "resourcequotas", NAMESPACE, {"metadata": {"name": "team"}, "spec": {"hard": hard}}
    )
    assert refused(create, jobsets, jobset()) == (
        403,
        'jobsets.jobset.x-k8s.io "a" is forbidden: exceeded quota: team, requested: '
        "count/jobsets.jobset.x-k8s.io=1, used: count/jobsets.jobset.x-k8s.io=0, limited: "
        "count/jobsets.jobset.x-k8s.io=0",
    )


def test_permissions_name_the_group(kube, api, jobsets):
    kube.server.control.deny(kube.server.control.user, "delete jobs", "create jobsets")
    assert refused(create, jobsets, jobset())[1] == (
        f'jobsets.jobset.x-k8s.io is forbidden: User "{kube.server.control.user}" cannot create '
        'resource "jobsets" in API group "jobset.x-k8s.io" in the namespace "models"'
    )
    status, message = refused(client.BatchV1Api(api).delete_namespaced_job, "x", NAMESPACE)
    assert (status, 'cannot delete resource "jobs" in API group "batch"' in message) == (403, True)


def test_a_name_may_be_made_up(jobsets):
    tree = jobset(roles={"chief": 1})
    tree["metadata"] = {"generateName": "run-"}
    name = create(jobsets, tree)["metadata"]["name"]
    assert (name[:4], len(name)) == ("run-", 9)

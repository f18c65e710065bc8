"""Tests that the small API server responds to the official client like a real one."""

import pytest
import urllib3
from kubernetes import client, watch

from tests.kubernetes.admission import ENFORCE, refusal
from tests.kubernetes.cluster import NAMESPACE, tfjob
from tests.kubernetes.control import USER

ARGS = ("kubeflow.org", "v1", NAMESPACE, "tfjobs")


@pytest.fixture
def jobs(api):
    return client.CustomObjectsApi(api)


@pytest.fixture
def core(api):
    return client.CoreV1Api(api)


def refused(call, *arguments, **keywords):
    with pytest.raises(client.ApiException) as caught:
        call(*arguments, **keywords)
    return caught.value


def test_a_watch_continues_from_a_version_until_it_has_expired(kube, core, jobs):
    begun = core.list_namespaced_pod(NAMESPACE).metadata.resource_version
    jobs.create_namespaced_custom_object(*ARGS, tfjob(roles={"Chief": 1, "Worker": 1}))
    kube.all_pods()
    stream = watch.Watch().stream(
        core.list_namespaced_pod, NAMESPACE, resource_version=begun, timeout_seconds=1
    )
    seen = [event["type"] for event in stream]
    assert seen[:2] == ["ADDED", "ADDED"]
    kube.store.expire()
    expired = refused(core.list_namespaced_pod, NAMESPACE, resource_version=begun, watch=True)
    assert expired.status == 410


def test_a_log_is_followed_until_its_container_ends_and_breaks_in_a_line(kube, jobs, core):
    jobs.create_namespaced_custom_object(*ARGS, tfjob(roles={"Chief": 1, "PS": 1}))
    name = kube.pod("chief-0")["metadata"]["name"]
    assert refused(core.read_namespaced_pod_log, name, NAMESPACE).status == 400
    kube.run_all()
    kube.write_log("chief-0", "one")

    def read(**more):
        return core.read_namespaced_pod_log(
            name, NAMESPACE, follow=True, timestamps=True, _preload_content=False, **more
        )

    with read() as stream:
        lines = iter(stream.stream(None))
        assert next(lines).decode().endswith("one\n")
        with kube.store.changed:
            kube.write_log("chief-0", "two, which is long")
            kube.server.drop_streams()
        with pytest.raises(urllib3.exceptions.ProtocolError):
            list(lines)
    kube.finish("chief-0", 0)
    text = read().data.decode()
    assert [line.partition(" ")[2] for line in text.splitlines()] == ["one", "two, which is long"]


def test_a_resource_that_is_not_served_is_a_404_without_an_object(kube, jobs):
    kube.server.control.kinds.clear()
    for call in (
        lambda: jobs.list_namespaced_custom_object(*ARGS),
        lambda: jobs.create_namespaced_custom_object(*ARGS, tfjob()),
    ):
        error = refused(call)
        found = (error.status, error.reason, error.body)
        assert found == (404, "Not Found", "404 page not found\n")


def test_without_the_operator_a_job_has_no_condition(kube, jobs):
    kube.operator.down = True
    jobs.create_namespaced_custom_object(*ARGS, tfjob())
    jobs.create_namespaced_custom_object(*ARGS, tfjob("other", suspend=True))
    assert [each.get("status") for each in kube.jobs()] == [None, None]
    kube.operator.down = False
    assert len(kube.all_pods()) == 4
    kube.store.wait(lambda: all(each.get("status") for each in kube.jobs()))
    kinds = {
        each["metadata"]["name"]: [one["type"] for one in each["status"]["conditions"]]
        for each in kube.jobs()
    }
    assert (kinds["job"][0], kinds["other"][-1]) == ("Created", "Suspended")


def test_a_webhook_without_its_operator_refuses_to_write_jobs(kube, jobs):
    jobs.create_namespaced_custom_object(*ARGS, tfjob())
    kube.server.control.is_webhook_silent = True
    for call in (
        lambda: jobs.create_namespaced_custom_object(*ARGS, tfjob("other")),
        lambda: jobs.patch_namespaced_custom_object(*ARGS, "job", {"metadata": {}}),
    ):
        error = refused(call)
        assert error.status == 500
        assert 'failed calling webhook \\"validator.tfjob.training-operator' in error.body
    assert jobs.get_namespaced_custom_object(*ARGS, "job")
    jobs.delete_namespaced_custom_object(*ARGS, "job")


def test_a_log_that_is_lost_is_a_message_without_time_and_newline(kube, jobs, core):
    jobs.create_namespaced_custom_object(*ARGS, tfjob(roles={"Chief": 1, "PS": 1}))
    pod = kube.run_all()["chief-0"]["metadata"]
    kube.write_log("chief-0", "one")
    kube.server.logs.lose(pod["uid"], 0)
    text = core.read_namespaced_pod_log(pod["name"], NAMESPACE, timestamps=True, follow=True)
    assert text.startswith("unable to retrieve container logs for containerd://")
    assert not text.endswith("\n")


@pytest.mark.parametrize("cuts_streams", [False, True])
def test_a_server_that_ends_serves_its_open_streams_unless_it_is_killed(
    kube, jobs, core, cuts_streams
):
    jobs.create_namespaced_custom_object(*ARGS, tfjob(roles={"Chief": 1, "PS": 1}))
    name = kube.run_all()["chief-0"]["metadata"]["name"]
    kube.write_log("chief-0", "one")
    with core.read_namespaced_pod_log(
        name, NAMESPACE, follow=True, _preload_content=False
    ) as stream:
        lines = iter(stream.stream(None))
        assert next(lines).decode().endswith("one\n")
        kube.server.go_down(cuts_streams=cuts_streams)
        with pytest.raises(urllib3.exceptions.HTTPError):
            core.list_namespaced_pod(NAMESPACE, _request_timeout=1)
        if cuts_streams:
            with pytest.raises((urllib3.exceptions.HTTPError, StopIteration)):
                next(lines)
        else:
            kube.write_log("chief-0", "two")
            assert next(lines).decode().endswith("two\n")


def test_an_eviction_says_so_and_leaves_the_pod_its_grace_period(kube, jobs, core):
    kube.store.graceful.add("pods")
    jobs.create_namespaced_custom_object(*ARGS, tfjob())
    name = kube.run_all()["worker-0"]["metadata"]["name"]
    core.create_namespaced_pod_eviction(
        name, NAMESPACE, client.V1Eviction(metadata=client.V1ObjectMeta(name=name))
    )
    pod = kube.pod("worker-0")
    (target,) = (each for each in pod["status"]["conditions"] if each["type"] == "DisruptionTarget")
    assert target["reason"] == "EvictionByEvictionAPI"
    meta = pod["metadata"]
    assert meta["deletionGracePeriodSeconds"] == 30
    assert meta["deletionTimestamp"] > meta["creationTimestamp"]
    assert pod["status"]["phase"] == "Running"


def test_a_pod_is_deleted_at_once_by_force_and_where_it_does_not_run(kube, core):
    kube.store.graceful.add("pods")
    kube.operator.down = True
    spec = {"nodeName": "node-1"}
    for name, status in (("a-ended-0", {"phase": "Failed"}), ("a-running-0", {"phase": "Running"})):
        tree = {"metadata": {"name": name}, "spec": spec, "status": status}
        kube.store.create("pods", NAMESPACE, tree)

    def delete(name, **options):
        body = client.V1DeleteOptions(**options)
        core.delete_namespaced_pod(name, NAMESPACE, body=body, _preload_content=False)

    delete("a-ended-0")
    delete("a-running-0")
    assert set(kube.pods()) == {"running-0"}
    delete("a-running-0", grace_period_seconds=0)
    assert not kube.pods()


@pytest.mark.cluster
def test_a_pod_deleted_by_force_is_killed_and_its_end_is_not_that_of_its_successor(real_kube):
    kube = real_kube
    job = tfjob(roles={"Chief": 1, "PS": 1})
    for replica in job["spec"]["tfReplicaSpecs"].values():
        container = {"name": "tensorflow", "command": ["sleep", "1000"]}
        replica["template"] = {"spec": {"containers": [container]}}
    kube.store.create("tfjobs", NAMESPACE, job)

    def running(task):
        return kube.pods().get(task, {"status": {}})["status"].get("phase") == "Running"

    kube.store.wait(lambda: running("ps-0"))
    before = kube.take_away("ps-0", grace=0)
    log = kube.server.logs.of(before["metadata"]["uid"], 0)
    after = kube.pod("ps-0", but=before["metadata"]["uid"])
    kube.store.wait(lambda: log.ended and running("ps-0"))
    kube.store.delete("tfjobs", NAMESPACE, "job")
    kube.wait_until_deleted()
    made = {tree["metadata"]["uid"] for _, _, kind, tree in kube.store.history if kind == "pods"}
    # Only these two pods and the chief's pod were created.
    assert {before["metadata"]["uid"], after["metadata"]["uid"]} < made
    assert len(made) == 3


def test_network_policies_are_listed_and_go_with_their_owner(kube, api, jobs):
    kube.server.control.kinds = {"kubeflow.org/v1": ["tfjobs"]}
    uid = jobs.create_namespaced_custom_object(*ARGS, tfjob())["metadata"]["uid"]
    owner = {"apiVersion": "kubeflow.org/v1", "kind": "TFJob", "name": "job", "uid": uid}
    metadata = {"name": "policy", "ownerReferences": [owner]}
    spec = {"podSelector": {"matchLabels": {"a": "b"}}, "policyTypes": ["Ingress"]}
    networking = client.NetworkingV1Api(api)
    networking.create_namespaced_network_policy(NAMESPACE, {"metadata": metadata, "spec": spec})
    [found] = networking.list_namespaced_network_policy(NAMESPACE).items
    assert (found.metadata.name, found.spec.pod_selector.match_labels) == ("policy", {"a": "b"})
    jobs.delete_namespaced_custom_object(*ARGS, "job")
    assert not networking.list_namespaced_network_policy(NAMESPACE).items


RESTRICTED = {ENFORCE: "restricted"}


# The message of a real API server for a pod without a security context.
NOTHING_SET = (
    'violates PodSecurity "restricted:latest": allowPrivilegeEscalation != false (container '
    '"tensorflow" must set securityContext.allowPrivilegeEscalation=false), unrestricted '
    'capabilities (container "tensorflow" must set securityContext.capabilities.drop=["ALL"]), '
    'runAsNonRoot != true (pod or container "tensorflow" must set '
    'securityContext.runAsNonRoot=true), seccompProfile (pod or container "tensorflow" must set '
    'securityContext.seccompProfile.type to "RuntimeDefault" or "Localhost")'
)
CONTAINER = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
POD = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


def pod(whole=POD, container=CONTAINER, **more):
    spec = {"containers": [{"name": "tensorflow", "securityContext": container}], **more}
    return {"metadata": {"name": "x"}, "spec": {**spec, "securityContext": whole}}


def test_a_pod_is_refused_and_its_job_is_accepted(kube, api):
    kube.store.labels[NAMESPACE] = RESTRICTED
    jobs, core = client.CustomObjectsApi(api), client.CoreV1Api(api)
    jobs.create_namespaced_custom_object(*ARGS, tfjob())
    kube.store.wait(lambda: kube.store.all("events"))
    [event] = kube.store.all("events", NAMESPACE, fields="involvedObject.name=job")
    assert (event["type"], event["reason"]) == ("Warning", "FailedCreatePod")
    name = 'pods "job-chief-0" is forbidden'
    assert event["message"] == f"Error creating: {name}: {NOTHING_SET}"
    assert not kube.pods()
    error = refused(core.create_namespaced_pod, NAMESPACE, pod(whole={}, container={}))
    assert (error.status, error.reason) == (403, "Forbidden")
    core.create_namespaced_pod(NAMESPACE, pod())
    assert core.read_namespace(NAMESPACE).metadata.labels == RESTRICTED


@pytest.mark.parametrize("labels", [{}, {ENFORCE: "baseline"}, {ENFORCE: "privileged"}])
def test_only_the_label_of_the_namespace_enforces_it(labels):
    assert not refusal(pod(whole={}, container={}), labels)
    assert refusal(pod(whole={}, container={}), RESTRICTED).endswith(NOTHING_SET)


@pytest.mark.parametrize(
    ("tree", "violated"),
    [
        (pod(), ""),
        (pod(whole={}, container={**CONTAINER, **POD}), ""),
        (
            pod(whole={**POD, "runAsNonRoot": False}),
            "runAsNonRoot != true (pod must not set securityContext.runAsNonRoot=false)",
        ),
        (
            pod(container={**CONTAINER, "runAsNonRoot": False}),
            'runAsNonRoot != true (container "tensorflow" must not set '
            "securityContext.runAsNonRoot=false)",
        ),
        (pod(whole={**POD, "runAsUser": 0}), "runAsUser=0 (pod must not set runAsUser=0)"),
        (
            pod(whole={**POD, "seccompProfile": {"type": "Unconfined"}}),
            'seccompProfile (pod must not set securityContext.seccompProfile.type to "Unconfined")',
        ),
        (
            pod(volumes=[{"name": "d", "hostPath": {"path": "/d"}}, {"name": "s", "emptyDir": {}}]),
            'restricted volume types (volume "d" uses restricted volume type "hostPath")',
        ),
        (
            pod(initContainers=[{"name": "a"}, {"name": "b", "securityContext": CONTAINER}]),
            'allowPrivilegeEscalation != false (container "a" must set '
            "securityContext.allowPrivilegeEscalation=false), unrestricted capabilities "
            '(container "a" must set securityContext.capabilities.drop=["ALL"])',
        ),
    ],
)
def test_what_a_pod_violates(tree, violated):
    prefix = 'pods "x" is forbidden: violates PodSecurity "restricted:latest": '
    assert refusal(tree, RESTRICTED) == (f"{prefix}{violated}" if violated else "")


def quota(kube, hard, **status):
    tree = {"metadata": {"name": "team"}, "spec": {"hard": hard}, "status": status}
    kube.store.create("resourcequotas", NAMESPACE, tree)


def events(kube):
    kube.store.wait(lambda: kube.store.all("events"))
    job = kube.job()["metadata"]
    found = kube.store.all("events", NAMESPACE, fields=f"involvedObject.uid={job['uid']}")
    return [(each["reason"], each["message"]) for each in found]


def test_an_absent_service_account_leaves_a_job_without_pods_and_conditions(kube, api):
    job = tfjob(roles={"Chief": 1, "Worker": 1})
    pod = job["spec"]["tfReplicaSpecs"]["Chief"]["template"]["spec"]
    pod["serviceAccountName"] = "robot"
    client.CustomObjectsApi(api).create_namespaced_custom_object(*ARGS, job)
    assert events(kube) == [
        (
            "FailedCreatePod",
            'Error creating: pods "job-chief-0" is forbidden: error looking up service account '
            'models/robot: serviceaccount "robot" not found',
        )
    ]
    assert (kube.job().get("status"), kube.pods()) == (None, {})
    kube.store.create("serviceaccounts", NAMESPACE, {"metadata": {"name": "robot"}})
    assert set(kube.all_pods()) == {"chief-0", "worker-0"}


def test_a_full_quota_refuses_what_is_beyond_it(kube, api):
    quota(kube, {"pods": "2"}, used={"pods": "1"})
    client.CustomObjectsApi(api).create_namespaced_custom_object(*ARGS, tfjob())
    assert events(kube) == [
        (
            "FailedCreatePod",
            'Error creating: pods "job-ps-0" is forbidden: exceeded quota: team, requested: '
            "pods=1, used: pods=2, limited: pods=2",
        )
    ]
    assert set(kube.pods()) == {"chief-0"}


@pytest.mark.parametrize(
    ("hard", "words"),
    [
        ({"requests.cpu": "1"}, "failed quota: team: must specify requests.cpu for: tensorflow"),
        ({"limits.memory": "1"}, "failed quota: team: must specify limits.memory for: tensorflow"),
        ({"requests.nvidia.com/gpu": "0"}, ""),
    ],
)
def test_a_dry_run_says_what_would_be_refused_and_leaves_nothing(kube, api, hard, words):
    quota(kube, hard)
    version = kube.store.version()
    core = client.CoreV1Api(api)
    pod = {"metadata": {"name": "x"}, "spec": {"containers": [{"name": "tensorflow"}]}}
    if words:
        with pytest.raises(client.ApiException, match=words) as caught:
            core.create_namespaced_pod(NAMESPACE, pod, dry_run="All")
        assert caught.value.status == 403
    else:
        assert core.create_namespaced_pod(NAMESPACE, pod, dry_run="All").metadata.uid
    assert kube.store.version() == version


POD_PATH = f'cannot get resource "pods/log" in API group "" in the namespace "{NAMESPACE}"'
JOB = f'in API group "kubeflow.org" in the namespace "{NAMESPACE}"'


def test_a_verb_that_is_not_granted_is_forbidden_by_name(kube, api):
    kube.store.create("tfjobs", NAMESPACE, tfjob("x"))
    jobs, core = client.CustomObjectsApi(api), client.CoreV1Api(api)
    place = ("kubeflow.org", "v1", NAMESPACE, "tfjobs")
    kube.server.control.granted[USER] = {("get", "tfjobs")}
    assert jobs.get_namespaced_custom_object(*place, "x")["metadata"]["name"] == "x"
    words = refused(jobs.patch_namespaced_custom_object, *place, "x", {"metadata": {}}).body
    named = f'\\"{USER}\\" cannot patch resource \\"tfjobs\\"'
    assert f'tfjobs.kubeflow.org \\"x\\" is forbidden: User {named}' in words
    assert JOB.replace('"', '\\"') in words
    words = refused(jobs.list_namespaced_custom_object, *place).body
    assert "tfjobs.kubeflow.org is forbidden" in words
    error = refused(core.read_namespaced_pod_log, "job-chief-0", NAMESPACE)
    assert (error.status, POD_PATH.replace('"', '\\"') in error.body) == (403, True)


def test_a_patch_of_another_object_of_the_same_name_is_refused(kube, api):
    kube.store.create("tfjobs", NAMESPACE, tfjob("x"))
    place = ("kubeflow.org", "v1", NAMESPACE, "tfjobs", "x")
    patch = client.CustomObjectsApi(api).patch_namespaced_custom_object
    assert refused(patch, *place, {"metadata": {"uid": "another"}}).status == 422


def test_deployments_of_the_whole_cluster(kube, api):
    apps = client.AppsV1Api(api)
    for replicas in (1, 0):
        kube.install_operator(replicas=replicas)
        [found] = apps.list_deployment_for_all_namespaces().items
        assert found.status.ready_replicas == (replicas or None)

"""Pod Security as a real API server enforces it: pods are refused, and what makes them is not."""

from __future__ import annotations

import pytest
from kubernetes import client

from tests.kubernetes.admission import ENFORCE, refusal
from tests.kubernetes.cluster import NAMESPACE, tfjob
from tests.kubernetes.test_api_server import ARGS

RESTRICTED = {ENFORCE: "restricted"}
# What a pod without any security context violates, as a real API server says it.
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
    with pytest.raises(client.ApiException) as caught:
        core.create_namespaced_pod(NAMESPACE, pod(whole={}, container={}))
    assert (caught.value.status, caught.value.reason) == (403, "Forbidden")
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

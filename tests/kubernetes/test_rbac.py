"""The API server refuses what a user may not do, in the words of Kubernetes."""

from __future__ import annotations

import pytest
from kubernetes import client

from tests.kubernetes import rbac
from tests.kubernetes.cluster import NAMESPACE
from tests.kubernetes.control import USER
from tests.kubernetes.test_api_server import tfjob

POD = f'cannot get resource "pods/log" in API group "" in the namespace "{NAMESPACE}"'
JOB = f'in API group "kubeflow.org" in the namespace "{NAMESPACE}"'


def refused(call, *arguments, **named):
    with pytest.raises(client.ApiException) as error:
        call(*arguments, **named)
    assert error.value.status == 403
    return error.value.body


def test_a_verb_that_is_not_granted_is_forbidden_by_name(kube, api):
    kube.store.create("tfjobs", NAMESPACE, tfjob("x"))
    jobs, core = client.CustomObjectsApi(api), client.CoreV1Api(api)
    place = ("kubeflow.org", "v1", NAMESPACE, "tfjobs")
    kube.server.control.granted[USER] = {("get", "tfjobs")}
    assert jobs.get_namespaced_custom_object(*place, "x")["metadata"]["name"] == "x"
    words = refused(jobs.patch_namespaced_custom_object, *place, "x", {"metadata": {}})
    named = f'\\"{USER}\\" cannot patch resource \\"tfjobs\\"'
    assert f'tfjobs.kubeflow.org \\"x\\" is forbidden: User {named}' in words
    assert JOB.replace('"', '\\"') in words
    words = refused(jobs.list_namespaced_custom_object, *place)
    assert "tfjobs.kubeflow.org is forbidden" in words
    words = refused(core.read_namespaced_pod_log, "job-chief-0", NAMESPACE)
    assert POD.replace('"', '\\"') in words


def test_the_roles_are_those_of_the_deployment():
    assert ("patch", "tfjobs") in rbac.grants(rbac.LAUNCHER)
    assert ("patch", "tfjobs") not in rbac.grants(rbac.TRAINER)


def test_a_patch_of_another_object_of_the_same_name_is_refused(kube, api):
    kube.store.create("tfjobs", NAMESPACE, tfjob("x"))
    place = ("kubeflow.org", "v1", NAMESPACE, "tfjobs", "x")
    with pytest.raises(client.ApiException) as error:
        client.CustomObjectsApi(api).patch_namespaced_custom_object(
            *place, {"metadata": {"uid": "another"}}
        )
    assert error.value.status == 422

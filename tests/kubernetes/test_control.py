"""The small API server outside of a namespace's objects, through the official client."""

from __future__ import annotations

import pytest
from kubernetes import client

from tests.kubernetes.cluster import NAMESPACE
from tests.kubernetes.control import USER


def review(api, user=None, **attributes):
    resource = client.V1ResourceAttributes(namespace=NAMESPACE, **attributes)
    authorization = client.AuthorizationV1Api(api)
    if user is None:
        spec = client.V1SelfSubjectAccessReviewSpec(resource_attributes=resource)
        body = client.V1SelfSubjectAccessReview(
            api_version="authorization.k8s.io/v1", kind="SelfSubjectAccessReview", spec=spec
        )
        return authorization.create_self_subject_access_review(body).status.allowed
    spec = client.V1SubjectAccessReviewSpec(resource_attributes=resource, user=user)
    body = client.V1SubjectAccessReview(
        api_version="authorization.k8s.io/v1", kind="SubjectAccessReview", spec=spec
    )
    return authorization.create_subject_access_review(body).status.allowed


def test_version_and_kinds(kube, api):
    assert client.VersionApi(api).get_code().git_version == "v1.31.4"
    kinds = client.CustomObjectsApi(api).list_cluster_custom_object
    kube.server.control.kinds.clear()
    with pytest.raises(client.ApiException) as caught:
        kinds("kubeflow.org", "v1", "")
    assert caught.value.status == 404


def test_permissions_are_those_of_the_test(kube, api):
    create = {"group": "kubeflow.org", "resource": "tfjobs", "verb": "create"}
    assert review(api, **create)
    assert review(api, "bob", **create)
    kube.server.control.deny(USER, "create tfjobs")
    assert not review(api, **create)
    assert review(api, "bob", **create)
    kube.server.control.deny("bob", "get pods/log")
    assert not review(api, "bob", group="", resource="pods", subresource="log", verb="get")
    assert review(api, "bob", group="", resource="pods", verb="get")


def test_a_permission_in_another_group_is_none(api):
    assert not review(api, group="", resource="tfjobs", verb="get")


def test_nodes_namespaces_and_classes(kube, api):
    core, scheduling = client.CoreV1Api(api), client.SchedulingV1Api(api)
    kube.store.create("nodes", "", {"metadata": {"name": "n"}, "spec": {}, "status": {}})
    assert [each.metadata.name for each in core.list_node().items] == ["n"]
    assert core.read_namespace(NAMESPACE).status.phase == "Active"
    kube.server.control.absent.add(NAMESPACE)
    for read in (
        lambda: core.read_namespace(NAMESPACE),
        lambda: scheduling.read_priority_class("x"),
    ):
        with pytest.raises(client.ApiException) as caught:
            read()
        assert caught.value.status == 404


def test_quotas_and_secrets_are_objects_like_others(kube, api):
    core = client.CoreV1Api(api)
    quota = {"metadata": {"name": "q"}, "spec": {"hard": {"pods": "4"}}}
    kube.store.create("resourcequotas", NAMESPACE, quota)
    kube.store.create("secrets", NAMESPACE, {"metadata": {"name": "s"}, "data": {"k": "dg=="}})
    [found] = core.list_namespaced_resource_quota(NAMESPACE).items
    assert found.spec.hard == {"pods": "4"}
    assert core.read_namespaced_secret("s", NAMESPACE).data == {"k": "dg=="}


def test_deployments_of_the_whole_cluster(kube, api):
    apps = client.AppsV1Api(api)
    for replicas in (1, 0):
        kube.install_operator(replicas=replicas)
        [found] = apps.list_deployment_for_all_namespaces().items
        assert found.status.ready_replicas == (replicas or None)


def test_a_forbidden_request_names_user_verb_and_resource(kube, api):
    kube.faults.add("pods", 403)
    with pytest.raises(client.ApiException) as caught:
        client.CoreV1Api(api).list_namespaced_pod(NAMESPACE)
    words = f'pods is forbidden: User \\"{USER}\\" cannot list resource \\"pods\\" in API group'
    assert words in caught.value.body

"""Tests that a launcher without a required permission fails at once and leaves no job."""

import pytest

from tests.components.kubernetes.attempts import Attempt, job_of, settings, step
from tests.kubernetes.cluster import NAMESPACE
from tests.kubernetes.control import USER

ACCOUNT = f"system:serviceaccount:{NAMESPACE}:pipeline-runner"


def created(kube):
    return [each for each in kube.server.requests if each.startswith("POST /apis/kubeflow")]


def test_without_patch_no_job_is_launched_and_the_line_names_verb_account_and_remedy(kube):
    kube.server.control.user = ACCOUNT
    kube.server.control.deny(ACCOUNT, "patch tfjobs", "get pods/log")
    message = Attempt(job_of(settings())).failure()
    assert message.startswith(
        f"{ACCOUNT} lacks permissions in the namespace {NAMESPACE}: patch tfjobs.kubeflow.org, get "
        "pods/log; to grant them, run: kubectl apply "
    )
    assert "--kustomize deploy/base && kubectl create rolebinding" in message
    assert f"--serviceaccount {NAMESPACE}:pipeline-runner" in message
    assert not created(kube)


def test_an_optional_permission_is_not_required(kube):
    kube.server.control.deny(USER, "list events")
    attempt = Attempt(job_of(settings()))
    kube.run_all()
    kube.finish("chief-0", 0)
    attempt.succeed()


def test_where_permissions_are_not_reviewed_the_first_heartbeat_says_what_is_forbidden(kube):
    kube.faults.add("POST .*accessreviews", 403)
    kube.server.control.deny(USER, "patch leases")
    message = Attempt(job_of(settings())).failure()
    assert (
        f'User "{USER}" cannot patch resource "leases" in API group "coordination.k8s.io"'
        in message
    )
    assert "the permissions in deploy/" in message
    assert len(created(kube)) == 1
    kube.wait_until_deleted()


def test_an_api_that_drops_the_heartbeat_is_refused(kube, monkeypatch):
    patch = kube.store.patch

    def without(kind, namespace, name, body, *more, **named):
        if kind == "leases":
            body = {**body, "spec": {**body.get("spec", {}), "holderIdentity": "someone"}}
        return patch(kind, namespace, name, body, *more, **named)

    monkeypatch.setattr(kube.store, "patch", without)
    assert "the cluster changed the lease " in Attempt(job_of(settings())).failure()
    kube.wait_until_deleted()


@pytest.mark.cluster
def test_a_permission_that_is_taken_away_later_ends_the_run_before_the_guard_does(kube):
    with step(kube, settings(heartbeat=2)) as process:
        kube.wait_watched()
        kube.run_all()
        kube.server.control.deny(USER, "patch leases")
        code, _, message = process.end()
    assert code == 1
    assert f'User "{USER}" cannot patch resource "leases"' in message
    kube.wait_until_deleted()

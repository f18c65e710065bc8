"""Tests that a launcher without a required permission fails at once and leaves no job."""

import re

import pytest

from flotilla.components import launchers as engines
from flotilla.components.kubernetes.launcher import delete_jobs
from flotilla.components.kubernetes.requirements import LAUNCHER, TRAINER, required_rules
from flotilla.components.launchers import ENGINES
from flotilla.trainer.config.schema import Config
from tests.components.kubernetes.attempts import (
    Attempt,
    job_of,
    run_to_end,
    running_step,
    settings,
    step,
)
from tests.kubernetes import pods, rbac
from tests.kubernetes.cluster import NAMESPACE
from tests.kubernetes.control import USER
from tests.kubernetes.server import PATH

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
    run_to_end(kube, attempt)


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
    with running_step(kube, settings(heartbeat=2)) as process:
        kube.server.control.deny(USER, "patch leases")
        code, _, message = process.end()
    assert code == 1
    assert f'User "{USER}" cannot patch resource "leases"' in message
    kube.wait_until_deleted()


# Every authenticated user may send these requests, which ask about the user's own permissions.
REVIEWS = re.compile(r"POST /apis/auth(entication|orization)\.k8s\.io/v1/self")
GET_LEASE = re.compile(r"GET .*/leases/")


def permission(request):
    method, _, address = request.partition(" ")
    found = PATH.fullmatch(address.partition("?")[0])
    assert found, request
    verb = rbac.verb_of(method, found["name"], watches="watch=" in address)
    return verb, f"{found['kind']}{found['log'] or ''}"


@pytest.mark.cluster
@pytest.mark.parametrize("engine", ENGINES)
def test_the_launcher_is_allowed_exactly_what_it_requests(kube, engine):
    kube.install_jobset()
    kind = engines.engine(engine).kind
    tree = settings(max_restarts=1, heartbeat=1)
    tree["cluster"]["launcher"] = engine
    attempt = Attempt(job_of(tree))
    kube.run_all()
    kube.store.wait(lambda: any(each.startswith("PATCH") for each in kube.server.requests))
    kube.store.wait(lambda: any("/log" in each for each in kube.server.requests))
    kube.store.wait(lambda: any(GET_LEASE.match(each) for each in kube.server.requests))
    worker = kube.finish("worker-0", 137)["metadata"]["uid"]
    kube.pod("worker-0", but=worker)
    pods.running(kube.store, kube.pod("worker-0", but=worker))
    kube.finish("worker-0", 137)
    assert "max_restarts" in attempt.failure()
    with step(kube, tree) as process:
        kube.run_all()
        kube.wait_renewed()
        process.process.kill()
    delete_jobs(engines.engine(engine), Config().cluster.kubernetes, "run-1")
    asked = {permission(each) for each in kube.server.requests if not REVIEWS.match(each)}
    granted = {(each.verb, each.resource) for each in required_rules(LAUNCHER, kind)}
    # Stopping a TFJob does not patch the job itself, but the rules allow it for both kinds of job.
    assert asked | {("patch", kind.resource.plural)} == granted


@pytest.mark.parametrize("role", [LAUNCHER, TRAINER])
def test_one_list_says_what_the_roles_grant(role):
    kinds = [engines.engine(name).kind for name in ENGINES]
    listed = {(each.verb, each.resource) for kind in kinds for each in required_rules(role, kind)}
    assert listed == rbac.grants(role)


def test_the_tasks_may_delete_jobs_and_read_leases():
    jobs = {("delete", "tfjobs"), ("delete", "jobsets")}
    leases = {(verb, "leases") for verb in ("get", "list", "watch")}
    assert rbac.grants(rbac.TRAINER) == jobs | leases


def test_no_permission_is_a_wildcard():
    text = rbac.FILE.read_text(encoding="utf-8")
    assert not re.search(r"\*|ClusterRole|secrets", text)

"""Tests that deploy/base/rbac.yaml allows exactly the API requests that Flotilla sends."""

import re

import pytest

from flotilla.components import launchers as engines
from flotilla.components.kubernetes.api.rbac import LAUNCHER, TRAINER, required_rules
from flotilla.components.kubernetes.launcher import delete_jobs
from flotilla.components.launchers import ENGINES
from flotilla.trainer.config.schema import Config
from tests.components.kubernetes.attempts import Attempt, job_of, settings, step
from tests.kubernetes import pods, rbac
from tests.kubernetes.server import PATH

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

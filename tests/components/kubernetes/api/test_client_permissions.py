"""deploy/base/rbac.yaml allows every request that is sent to the API, and nothing else."""

from __future__ import annotations

import re

import pytest

from components.kubernetes.api.rbac import LAUNCHER, NEEDED, TRAINER
from components.kubernetes.launcher import delete_jobs
from tests.components.kubernetes.attempts import Attempt, job_of, settings, step
from tests.kubernetes import rbac
from tests.kubernetes.server import PATH
from trainer.config.schema import Config

# What everybody may ask: who they are, and what they may do.
REVIEWS = re.compile(r"POST /apis/auth(entication|orization)\.k8s\.io/v1/self")


def permission(request):
    """Return the verb and the resource of a request, as Kubernetes authorizes it."""
    method, _, address = request.partition(" ")
    found = PATH.fullmatch(address.partition("?")[0])
    assert found, request
    verb = rbac.verb_of(method, found["name"], watches="watch=" in address)
    return verb, f"{found['kind']}{found['log'] or ''}"


@pytest.mark.cluster
def test_the_launcher_is_allowed_exactly_what_it_requests(kube):
    tree = settings(max_restarts=0, heartbeat=1)
    attempt = Attempt(job_of(tree))
    kube.wait_watched()
    kube.run_all()
    kube.store.wait(lambda: any(each.startswith("PATCH") for each in kube.server.requests))
    kube.store.wait(lambda: any("/log" in each for each in kube.server.requests))
    kube.finish("worker-0", 137)
    assert "max_restarts" in attempt.failure()
    with step(kube, tree) as process:
        kube.all_pods()
        process.process.kill()
    delete_jobs(Config().cluster.kubernetes, "run-1")
    asked = {permission(each) for each in kube.server.requests if not REVIEWS.match(each)}
    assert asked == rbac.grants(rbac.LAUNCHER)


def test_the_tasks_may_only_read_and_delete_jobs():
    verbs = ("get", "list", "watch", "delete")
    assert rbac.grants(rbac.TRAINER) == {(verb, "tfjobs") for verb in verbs}


@pytest.mark.parametrize("role", [LAUNCHER, TRAINER])
def test_one_list_says_what_the_roles_grant(role):
    assert {(each.verb, each.resource) for each in NEEDED[role]} == rbac.grants(role)


def test_no_permission_is_a_wildcard():
    text = rbac.FILE.read_text(encoding="utf-8")
    assert not re.search(r"\*|ClusterRole|secrets", text)

"""deploy/rbac.yaml allows every request that is sent to the API, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from components.tfjob.launcher import delete_jobs
from tests.components.tfjob.attempts import Attempt, job_of, settings, step
from tests.kubernetes.server import PATH
from trainer.config.schema import Config

FILE = Path(__file__).parents[3] / "deploy" / "rbac.yaml"
VERBS = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}


def roles():
    documents = list(yaml.safe_load_all(FILE.read_text(encoding="utf-8")))
    return {each["metadata"]["name"]: each for each in documents if each["kind"] == "Role"}


def allowed(role):
    return {
        (resource, verb)
        for rule in roles()[role]["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def permission(request):
    """Return the resource and the verb of a request, as Kubernetes authorizes it."""
    method, _, address = request.partition(" ")
    found = PATH.fullmatch(address.partition("?")[0])
    assert found, request
    if found["log"]:
        return "pods/log", "get"
    verb = VERBS.get(method) or ("get" if found["name"] else "list")
    return found["kind"], "watch" if "watch=" in address else verb


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
    assert {permission(each) for each in kube.server.requests} == allowed("flotilla-launcher")


def test_the_guard_may_only_read_and_delete_jobs():
    assert allowed("flotilla-trainer") == {("tfjobs", "get"), ("tfjobs", "delete")}


def test_no_permission_is_a_wildcard():
    text = FILE.read_text(encoding="utf-8")
    assert not re.search(r"\*|ClusterRole|secrets", text)

"""Which launcher is called, and what it refuses before its first request."""

from __future__ import annotations

import base64
from concurrent.futures import ThreadPoolExecutor

import pytest

from components import launchers
from components.image import PodDefaults
from components.kubernetes import launcher
from components.kubernetes.api import client
from components.kubernetes.pods.template import Place
from components.tfjob.manifest import manifest
from tests.components.kubernetes.attempts import SECONDS, job_of, settings
from tests.kubernetes.cluster import NAMESPACE
from trainer import storage
from trainer.errors import ConfigError, UserError


@pytest.mark.parametrize("key", ["in_process", "existing_servers"])
def test_servers_that_are_not_pods_are_refused(key):
    with pytest.raises(ConfigError, match=f"cluster.{key}: not with cluster.launcher tfjob"):
        launchers.launch(job_of({"cluster": {key: True}}))


def test_without_a_cluster_the_message_names_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    with pytest.raises(UserError, match=r"no Kubernetes API .*; run in a cluster, or set KUBECONF"):
        launchers.launch(job_of({}))


def test_the_steps_endpoints_reach_every_task_and_its_secrets_do_not(kube, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://seaweedfs.kubeflow:9000")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "do-not-pass-on")
    defaults = PodDefaults(image="ours:2", store_secret="ours")
    place = launcher._place(client.connect(), "models", defaults)
    assert place.defaults == defaults
    assert place.variables == {"AWS_ENDPOINT_URL": "http://seaweedfs.kubeflow:9000"}
    assert kube.kubeconfig.is_file()


@pytest.mark.parametrize("is_adopted", [False, True])
def test_a_chief_that_ends_with_0_is_believed_by_its_record_alone(kube, tmp_path, is_adopted):
    job = job_of(settings(), storage.uri_of(tmp_path / "run-1"))
    if is_adopted:
        kube.store.create("tfjobs", NAMESPACE, manifest(job, Place(namespace=NAMESPACE)))
    with ThreadPoolExecutor() as pool:
        launched = pool.submit(launchers.launch, job)
        kube.wait_watched()
        kube.run_all()
        kube.finish("chief-0", 0)
        error = launched.exception(SECONDS)
    assert isinstance(error, UserError)
    assert str(error).startswith("chief-0 ended with exit code 0 before training was over: ")
    kube.wait_until_deleted()


@pytest.mark.parametrize(
    ("claims", "account"),
    [
        ('{"sub": "system:serviceaccount:kubeflow:pipeline-runner"}', "pipeline-runner"),
        ('{"sub": "someone"}', ""),
        ("{}", ""),
    ],
)
def test_a_token_names_the_service_account(claims, account):
    body = base64.urlsafe_b64encode(claims.encode()).decode().rstrip("=")
    assert client._service_account(f"head.{body}.tail") == account
    assert client._service_account("no token") == ""

"""Fixtures: a fake cluster, and the official client for it."""

import pytest
from kubernetes import client

from tests.kubernetes.cluster import cluster, real_cluster


@pytest.fixture
def kube(tmp_path):
    with cluster(tmp_path) as made:
        yield made


@pytest.fixture
def real_kube(tmp_path):
    with real_cluster(tmp_path, {"store": {"accesskey": "abc"}}) as made:
        yield made


@pytest.fixture
def api(kube):
    configuration = client.Configuration(host=kube.server.url)
    configuration.retries = False
    with client.ApiClient(configuration) as made:
        yield made

"""A scripted cluster that the kubeconfig of this process names."""

from __future__ import annotations

import pytest

from tests.kubernetes.cluster import cluster, real_cluster


@pytest.fixture
def kube(tmp_path, monkeypatch):
    with cluster(tmp_path) as made:
        monkeypatch.setenv("KUBECONFIG", str(made.kubeconfig))
        yield made


@pytest.fixture
def real_kube(tmp_path, monkeypatch):
    with real_cluster(tmp_path) as made:
        monkeypatch.setenv("KUBECONFIG", str(made.kubeconfig))
        yield made

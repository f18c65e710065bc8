"""Fixtures of the cluster tests: a published dataset and a fake Kubernetes cluster."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from flotilla.trainer import events, storage
from flotilla.trainer.cluster import forks
from flotilla.trainer.cluster.process import MODULES
from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.data.prepare import prepare
from tests.cluster.job_training import Training
from tests.kubernetes.cluster import Cluster, real_cluster
from tests.trainer.cluster.serving import serving


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the URI of the prepared digits: 8 shards, and a validation split."""
    folder: Path = tmp_path_factory.mktemp("dataset")
    return prepare(DataConfig(), storage.uri_of(folder), folder / "scratch").uri


@pytest.fixture(scope="package")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fork tasks from one process that has imported TensorFlow, as a local run does."""
    modules = ",".join(sorted(set(MODULES.values())))
    settings = {"TF_CPP_MIN_LOG_LEVEL": "2", "GRPC_EXPERIMENTS": "tcp_frame_size_tuning"}
    with (
        serving(tmp_path_factory.mktemp("forks"), at_once=modules, **settings) as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv(forks.VARIABLE, server.first)
        yield


@pytest.fixture(scope="module", autouse=True)
def _forks(request: pytest.FixtureRequest) -> None:
    """Start the fork server for modules whose tasks are not pods, which cannot use it."""
    own = [item for item in request.session.items if item.path == request.path]
    if any(each.get_closest_marker("cluster") and "kube" not in each.fixturenames for each in own):
        request.getfixturevalue("fork_server")


@pytest.fixture
def kube(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Cluster]:
    """Yield a cluster whose pods train models; for the engine `jobset`, it supports JobSets."""
    with real_cluster(tmp_path / "kubernetes", {"store": {"accesskey": "abc"}}) as made:
        parameters = getattr(request.node, "callspec", None)
        if parameters and parameters.params.get("engine") == "jobset":
            made.install_jobset()
        monkeypatch.setenv("KUBECONFIG", str(made.kubeconfig))
        # Only the launcher gets this variable; the pods have their own environment.
        monkeypatch.setenv(events.VARIABLE, str(tmp_path / "events.jsonl"))
        yield made


@pytest.fixture
def training(kube: Cluster, engine: str, tmp_path: Path, dataset: str) -> Training:
    return Training(kube, engine, tmp_path, dataset)

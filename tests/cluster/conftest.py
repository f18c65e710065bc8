"""What the tests of this folder train on: a published dataset, and a cluster of Kubernetes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.job_training import Training
from tests.kubernetes.cluster import Cluster, real_cluster
from tests.trainer.cluster.forks.serving import serving
from trainer import events, storage
from trainer.cluster.forks import forked
from trainer.cluster.process import MODULES
from trainer.config.data import DataConfig
from trainer.data.prepare import prepare


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    """URI of the prepared digits in 8 shards, with a validation split."""
    folder: Path = tmp_path_factory.mktemp("dataset")
    return prepare(DataConfig(), storage.uri_of(folder), folder / "scratch").uri


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server that has loaded TensorFlow once for the tasks of all tests."""
    modules = ",".join(sorted(set(MODULES.values())))
    settings = {"TF_CPP_MIN_LOG_LEVEL": "2", "GRPC_EXPERIMENTS": "tcp_frame_size_tuning"}
    with serving(tmp_path_factory.mktemp("forks"), at_once=modules, **settings) as found:
        yield found.first


@pytest.fixture(autouse=True)
def _forks(fork_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have local launchers fork their tasks, as those of `flotilla run` do."""
    monkeypatch.setenv(forked.VARIABLE, fork_server)


@pytest.fixture
def kube(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Cluster]:
    """Yield a cluster whose pods train; it serves JobSets where the test's engine is `jobset`."""
    with real_cluster(tmp_path / "kubernetes", {"store": {"accesskey": "abc"}}) as made:
        parameters = getattr(request.node, "callspec", None)
        if parameters and parameters.params.get("engine") == "jobset":
            made.install_jobset()
        monkeypatch.setenv("KUBECONFIG", str(made.kubeconfig))
        # Those of the launcher; the pods have an environment of their own.
        monkeypatch.setenv(events.VARIABLE, str(tmp_path / "events.jsonl"))
        yield made


@pytest.fixture
def training(kube: Cluster, engine: str, tmp_path: Path, dataset: str) -> Training:
    """Return a run on the engine of the test, which has not begun."""
    return Training(kube, engine, tmp_path, dataset)

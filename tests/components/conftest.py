"""Fixtures that prepare this process to run a pipeline step."""

import sys

import pytest

from flotilla.components.image import MARK_OPTION, own_mark
from flotilla.components.records import run_store
from flotilla.trainer import events, storage
from flotilla.trainer.cluster import fitting
from tests.kubernetes.cluster import cluster, real_cluster
from tests.trainer.small_run import small_run


@pytest.fixture
def emitted(tmp_path, monkeypatch):
    """Set the variables that a step's process has; return a function that reads its events."""
    path = tmp_path / "events.jsonl"
    monkeypatch.setenv(events.VARIABLE, str(path))
    monkeypatch.setenv(run_store.RUN_FOLDER, str(tmp_path / "folder"))
    (tmp_path / "folder").mkdir()
    return lambda: list(events.read(path))


@pytest.fixture
def run_events(emitted):
    """Return a function that reads the events of a kind."""
    return lambda kind: [each for each in emitted() if isinstance(each, kind)]


@pytest.fixture(autouse=True)
def _compiled(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["executor", MARK_OPTION, own_mark()])


@pytest.fixture(autouse=True)
def fits(monkeypatch):
    """Replace the trial of the model, which takes seconds; return the tried configurations."""
    tried = []
    monkeypatch.setattr(fitting, "try_fit", lambda config, _dataset="": tried.append(config) or {})
    return tried


@pytest.fixture
def root(tmp_path):
    return storage.uri_of(tmp_path / "root")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return small_run(tmp_path_factory.mktemp("run"))


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

"""Fixtures: a scripted cluster, a working folder, and calls of the doctor."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import urllib3

from flotilla.pipelines.cli import app
from flotilla.pipelines.doctor import Finding, machine
from flotilla.pipelines.doctor import cluster as clusters
from flotilla.pipelines.runs import kfp_access
from tests.kubernetes.cluster import NAMESPACE, Cluster, cluster

RUNNER = f"system:serviceaccount:{NAMESPACE}:pipeline-runner"
IMAGE = "cluster.kubernetes.pod.image=registry.example.com/flotilla:1"
OWN_TIMEOUT = clusters.TIMEOUT
LONG_TIMEOUT = urllib3.Timeout(connect=3, read=60)


@dataclass(frozen=True, kw_only=True)
class Report:
    code: int
    err: str
    answer: dict[str, Any]

    def __getitem__(self, name: str) -> dict[str, str]:
        [found] = [each for each in self.answer["checks"] if each["name"] == name]
        return found

    def states(self) -> dict[str, str]:
        return {each["name"]: each["state"] for each in self.answer["checks"]}

    def failed(self) -> list[str]:
        return list(self.reasons())

    def reasons(self) -> dict[str, str]:
        checks = self.answer["checks"]
        return {each["name"]: each["message"] for each in checks if each["state"] == "fail"}


Doctor = Callable[..., Report]


@pytest.fixture(autouse=True)
def _without_tensorflow(monkeypatch) -> None:
    """Skip the only slow check; `test_configuration` tests it."""
    finding = Finding("ok", "not tried in this test")
    monkeypatch.setattr(machine, "fits", lambda _config, **_: finding)


@pytest.fixture(autouse=True)
def _long_timeout(monkeypatch) -> None:
    """Use a longer timeout than the doctor does, because this machine may be busy."""
    monkeypatch.setattr(clusters, "TIMEOUT", LONG_TIMEOUT)


@pytest.fixture
def own_timeout(monkeypatch) -> None:
    """Use the doctor's own timeouts, for tests in which the API does not respond."""
    monkeypatch.setattr(clusters, "TIMEOUT", OWN_TIMEOUT)


@pytest.fixture
def doctor(tmp_path, monkeypatch, capsys) -> Doctor:
    """Return a function that calls `flotilla doctor --json`; `settings` are values for `--set`."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    monkeypatch.setattr(kfp_access, "TOKEN_VOLUME", tmp_path / "no-volume")

    def call(*settings: str, options: tuple[str, ...] = ()) -> Report:
        sets = [word for each in settings for word in ("--set", each)]
        code = app.call(["doctor", "--json", *options, *sets])
        out, err = capsys.readouterr()
        return Report(code=code, answer=json.loads(out), err=err)

    return call


@pytest.fixture
def kube(tmp_path, monkeypatch) -> Iterator[Cluster]:
    with cluster(tmp_path) as made:
        monkeypatch.setenv("KUBECONFIG", str(made.kubeconfig))
        made.install_operator()
        made.store.create("serviceaccounts", NAMESPACE, {"metadata": {"name": "pipeline-runner"}})
        yield made


def _of(launcher: str) -> Any:
    """Return a fixture that calls the doctor with an image and a launcher."""

    @pytest.fixture
    def given(doctor) -> Doctor:
        def call(*settings: str, options: tuple[str, ...] = ()) -> Report:
            return doctor(f"cluster.launcher={launcher}", IMAGE, *settings, options=options)

        return call

    return given


of_job, of_jobset, of_auto = _of("tfjob"), _of("jobset"), _of("auto")


@pytest.fixture
def jobset(kube) -> Cluster:
    kube.install_jobset()
    return kube


def content(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}

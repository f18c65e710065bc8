"""An instance on loopback, and the command line on it."""

from __future__ import annotations

import copy
import functools
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kfp import client as sdk

from pipelines import compile
from pipelines.cli import app
from pipelines.compile import Package, package_of
from pipelines.runs import kfp_watch
from pipelines.step_pods import StepPods
from tests.kfp_instance.server import Instance


@dataclass(frozen=True, kw_only=True)
class CommandResult:
    """How a call ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The JSON object on the last line of standard output."""
        tree: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return tree


Flotilla = Callable[..., CommandResult]


@pytest.fixture
def instance(tmp_path, monkeypatch) -> Iterator[Instance]:
    """A KFP instance; a home folder of its own, and looks that do not wait."""
    monkeypatch.setattr(kfp_watch, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(sdk.Client, "_LOCAL_KFP_CONTEXT", str(tmp_path / "home" / "context.json"))
    for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    with Instance() as served:
        # A store that this machine can read.
        served.store.pipeline_root = (tmp_path / "store").as_uri()
        served.store.disk = (tmp_path / "disk").as_uri()
        yield served


@pytest.fixture
def remote(instance, tmp_path, monkeypatch, capsys) -> Flotilla:
    """Call `flotilla` on the instance, in an empty folder."""
    (tmp_path / "here").mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("KF_PIPELINES_ENDPOINT", instance.url)
    # Compiling takes seconds, and always gives the same.
    monkeypatch.setattr(compile, "compile_all", _compiled_before)

    def call(*words: object) -> CommandResult:
        capsys.readouterr()
        code = app.called([str(word) for word in words])
        out, err = capsys.readouterr()
        return CommandResult(code=code, out=out, err=err)

    return call


# The fixture below puts another function in its place.
_COMPILE_ALL = compile.compile_all


def _compiled_before(
    output: Path, image: str, _components: None, _pods: StepPods
) -> dict[str, str]:
    output.write_bytes(_content(image))
    return {"pipeline": str(output)}


@functools.cache
def _content(image: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "pipeline.yaml")
        _COMPILE_ALL(path, image, None)
        return path.read_bytes()


@pytest.fixture(scope="session")
def compiled() -> Package:
    """Our pipeline."""
    return package_of(None, "")


@pytest.fixture
def uploaded(instance, compiled) -> str:
    """Name of the one version of our pipeline on the instance."""
    store = instance.store
    made = store.create_pipeline({"display_name": compiled.name})
    version = store.add_version(
        made["pipeline_id"], compiled.version(), "", copy.deepcopy(compiled.spec)
    )
    return str(version["display_name"])

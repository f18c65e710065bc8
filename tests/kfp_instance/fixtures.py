"""Fixtures: a fake KFP instance on loopback, and a command line that uses it."""

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from kfp import client as sdk

from flotilla.pipelines import compile
from flotilla.pipelines.cli import app
from flotilla.pipelines.compile import Package, own_package
from flotilla.pipelines.runs import kfp_watch
from flotilla.pipelines.step_settings import StepPods
from flotilla.trainer.config.schema import Config
from tests.kfp_instance.server import Instance


class _Tree(dict[str, Any]):
    """A JSON object whose error for a missing key shows the whole object."""

    def __missing__(self, key: str) -> Any:
        raise KeyError(f"{key} in {dict(self)}")


@dataclass(frozen=True, kw_only=True)
class CommandResult:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """Return the JSON object, which must be the whole standard output."""
        [line] = self.out.splitlines()
        return _Tree(json.loads(line))


Flotilla = Callable[..., CommandResult]


@pytest.fixture
def instance(tmp_path, monkeypatch) -> Iterator[Instance]:
    """Yield a KFP instance; the test gets its own home folder, and polls do not sleep."""
    monkeypatch.setattr(kfp_watch, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(sdk.Client, "_LOCAL_KFP_CONTEXT", str(tmp_path / "home" / "context.json"))
    for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    with Instance() as served:
        # The test process can read the objects in this store.
        served.store.pipeline_root = (tmp_path / "store").as_uri()
        served.store.disk = (tmp_path / "disk").as_uri()
        yield served


@pytest.fixture
def remote(instance, tmp_path, monkeypatch, capsys) -> Flotilla:
    """Return a function that runs `flotilla` against the instance, in an empty folder."""
    (tmp_path / "here").mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("KF_PIPELINES_ENDPOINT", instance.url)
    # Compilation is slow and always has the same result, so tests share the result.
    monkeypatch.setattr(compile, "_text_of_pipeline", _compiled_before)

    def call(*words: object) -> CommandResult:
        capsys.readouterr()
        code = app.call([str(word) for word in words])
        out, err = capsys.readouterr()
        return CommandResult(code=code, out=out, err=err)

    return call


_COMPILE = compile._text_of_pipeline
_COMPILED: dict[str, str] = {}


def _compiled_before(image: str, pods: StepPods, config: Config | None) -> str:
    asked = repr((image, pods, config or Config()))
    if asked not in _COMPILED:
        _COMPILED[asked] = _COMPILE(image, pods, config)
    return _COMPILED[asked]


@pytest.fixture(scope="session")
def compiled() -> Package:
    return own_package()


@pytest.fixture
def uploaded(instance, compiled) -> str:
    """Upload the pipeline, and return the ID of its only version on the instance."""
    store = instance.store
    made = store.create_pipeline({"display_name": compiled.name})
    version = store.add_version(
        made["pipeline_id"], compiled.version(), "", copy.deepcopy(compiled.spec)
    )
    return str(version["display_name"])

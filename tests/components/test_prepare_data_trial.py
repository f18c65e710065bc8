"""The first step on a cluster tries the model in parallel with the preparation."""

import threading
from types import SimpleNamespace

import pytest

from flotilla.components import prepare_data
from flotilla.components.records import run_store
from flotilla.trainer.cluster import fitting
from flotilla.trainer.config.schema import Config
from flotilla.trainer.runtime.errors import ConfigError

CONFIG = Config().model_dump_json()


@pytest.fixture
def step():
    """Return a step with real stages; a failing stage ends it as the frame of a step does."""

    def stage(name, work):
        stages.append(name)
        try:
            work(None)
        except ConfigError as error:
            raise SystemExit(f"{error.exit_code}: {error}") from None

    stages: list[str] = []
    return SimpleNamespace(stage=stage, stages=stages)


def found(monkeypatch, mistake: str) -> None:
    def tried(*_):
        if mistake:
            raise ConfigError(mistake)
        return {}

    monkeypatch.setattr(fitting, "try_fit", tried)


def test_a_mistake_ends_a_preparation_that_goes_on(step, monkeypatch):
    found(monkeypatch, "gate.min: no such metric")
    # The frame of a step does this too.
    monkeypatch.setattr(prepare_data.os, "kill", lambda *_: ended.set())
    ended = threading.Event()

    def prepare_for_hours():
        assert ended.wait(60)
        raise SystemExit(130)

    with (
        pytest.raises(SystemExit, match=r"2: gate\.min: no such metric"),
        prepare_data._try_model(step, CONFIG),
    ):
        prepare_for_hours()
    assert step.stages == ["resolve_config"]


def test_a_mistake_after_the_preparation_is_one_too(step, monkeypatch):
    def begin(_config, _dataset, on_mistake):
        mistake = ConfigError("gate.min: no such metric")
        return SimpleNamespace(join=lambda: on_mistake(mistake))

    monkeypatch.setattr(fitting, "begin", begin)
    monkeypatch.setattr(prepare_data.os, "kill", lambda *_: pytest.fail("nothing is to be ended"))
    with pytest.raises(SystemExit, match=r"2: gate\.min"), prepare_data._try_model(step, CONFIG):
        pass
    assert step.stages == ["resolve_config"]


def test_what_fits_is_prepared(step, monkeypatch):
    found(monkeypatch, "")
    with prepare_data._try_model(step, CONFIG):
        pass
    assert not step.stages


def test_an_interrupt_is_one(step, monkeypatch):
    found(monkeypatch, "")
    with pytest.raises(SystemExit, match="130"), prepare_data._try_model(step, CONFIG):
        raise SystemExit(130)
    assert not step.stages


def test_on_this_machine_the_runner_tries_it(step, monkeypatch):
    monkeypatch.setenv(run_store.RUN_ID, "local")
    monkeypatch.setattr(fitting, "begin", lambda *_: pytest.fail("it is tried twice"))
    with prepare_data._try_model(step, CONFIG):
        pass

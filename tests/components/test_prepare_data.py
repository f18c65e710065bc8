"""Tests the first step: its outputs for KFP, and the trial of the model that runs in parallel."""

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from flotilla.components import prepare_data, resolve_config
from flotilla.components.records import run_store
from flotilla.components.records.record import Step
from flotilla.components.resolve_config import Resolved
from flotilla.trainer.cluster import fitting
from flotilla.trainer.config.schema import Config
from flotilla.trainer.runtime.errors import ConfigError
from tests.components.called_steps import artifact_in, no_larger_files_than, refused


@pytest.fixture
def unchanged(tmp_path, monkeypatch):
    """Return the first step of a run whose data has not changed."""
    found = Resolved(config="{}", root="gs://b/r", run_id="digits-2", is_unchanged=True)
    monkeypatch.setattr(resolve_config, "work", lambda _step: found)
    made = {name: artifact_in(tmp_path) for name in ("dataset", "validation", "page")}
    return Step(at="", published="", **made)


def test_where_nothing_is_new_every_output_has_a_file(unchanged, tmp_path):
    (tmp_path / "kfp").mkdir()
    prepared = prepare_data.work(unchanged)
    assert (prepared.Output, prepared.dataset_uri) == ("unchanged", "")
    made = (unchanged.dataset, unchanged.validation, unchanged.page)
    assert all(Path(each.path).stat().st_size for each in made)


def test_on_a_full_disk_it_is_one_line(unchanged, capsys):
    with no_larger_files_than(0):
        code, line = refused(prepare_data.work, unchanged, capsys=capsys)
    assert (code, "File too large; free some space" in line) == (1, True)


CONFIG = Config().model_dump_json()


@pytest.fixture
def step():
    """Return a step whose stages really run; an invalid configuration ends the process."""

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
    # Setting the event replaces the signal that would end this process.
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

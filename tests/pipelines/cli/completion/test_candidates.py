"""The candidates for runs, models, versions and steps; a completion never fails."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from flotilla.components.table import STEPS
from flotilla.pipelines.cli.completion import candidates
from flotilla.trainer import storage
from flotilla.trainer.promotion import registry

RUNS = ["digits-20260101-000000-aaaa", "wine-20260102-000000-bbbb"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Create two runs, a sweep, and a model with two versions; the first one is champion."""
    monkeypatch.chdir(tmp_path)
    for age, run in enumerate(reversed(RUNS)):
        Path("runs", run).mkdir(parents=True)
        config = Path("runs", run, "config.json")
        config.write_text("{}")
        os.utime(config, (1000 - age, 1000 - age))
    Path("runs", "sweep-1").mkdir()
    Path("runs", "sweep-1", "sweep.journal").write_text("")
    root = storage.uri_of(tmp_path / "runs")
    for number in (1, 2):
        source, uri = tmp_path / f"source-{number}", storage.uri_of(tmp_path / f"model-{number}")
        (source / "serving").mkdir(parents=True)
        (source / "serving" / "saved_model.pb").write_text(str(number))
        storage.publish(source, uri, kind="model", fields={"saved_model": "serving"})
        registry.register(root, "digits", uri, lineage={}, scratch=tmp_path)
    registry.promote(root, "digits", 1, after=0, by="run a")
    return tmp_path


def context(**params):
    return SimpleNamespace(params=params)


def values(found):
    return [value for value, _ in found]


def test_runs_are_offered_newest_first(here):
    assert values(candidates.complete_runs(context())) == RUNS[::-1]
    assert values(candidates.complete_runs(context(workdir=here / "runs", runs=[RUNS[0]]))) == [
        RUNS[1]
    ]
    assert candidates.complete_runs(context(workdir=here / "absent")) == []


@pytest.mark.usefixtures("here")
def test_sweeps_are_offered():
    assert values(candidates.complete_sweeps(context())) == ["sweep-1"]


@pytest.mark.usefixtures("here")
def test_models_and_versions_are_offered():
    assert values(candidates.complete_models(context())) == ["digits"]
    expected = [("2", ""), ("1", "the champion")]
    assert candidates.complete_versions(context(name="digits")) == expected
    assert values(candidates.complete_model_versions(context(), "di")) == ["digits"]
    assert values(candidates.complete_model_versions(context(), "digits@")) == [
        "digits@2",
        "digits@1",
    ]
    assert candidates.complete_versions(context(name="absent")) == []


def test_steps_and_stages_are_offered():
    found = dict(candidates.complete_steps())
    assert {row.name for row in STEPS if not row.is_exit_step} <= set(found)
    assert found["validate_data"] == "a stage of prepare_data"


def test_the_examples_are_offered():
    assert "digits.yaml" in values(candidates.complete_examples())


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("root", ["s3://bucket/a", "gs://bucket", "nonsense://", "\0"])
def test_nothing_is_asked_over_the_network(root):
    assert candidates.complete_models(context(root=root)) == []
    assert candidates.complete_versions(context(root=root, name="digits")) == []


@pytest.mark.usefixtures("here")
def test_what_cannot_be_read_is_left_out(monkeypatch):
    def fail(*_given):
        raise OSError("unplugged")

    monkeypatch.setattr(registry, "names", fail)
    monkeypatch.setattr(os, "listdir", fail)
    assert candidates.complete_models(context()) == []
    assert candidates.complete_runs(context()) == []
    assert candidates.complete_versions(context()) == []

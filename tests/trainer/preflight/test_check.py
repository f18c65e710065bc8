"""Tests the check of a configuration: first its source, then a trial of its model."""

import pytest

from flotilla.trainer.cluster import fitting
from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.schema import Config
from flotilla.trainer.data import listing
from flotilla.trainer.preflight.check import check, require_source
from flotilla.trainer.runtime.errors import ConfigError, TransientError, UserError


@pytest.fixture
def tried(monkeypatch):
    """Replace the trial of the model; return the configurations that it was called with."""
    found = []
    monkeypatch.setattr(
        fitting, "try_fit", lambda config, *_, **__: found.append(config) or {"task": "ranking"}
    )
    return found


def configured(folder, **keys):
    (folder / "t.csv").write_text("age,town,label\n" + "1,Rome,yes\n2,Oslo,no\n" * 20)
    data = DataConfig.model_validate({"source": str(folder / "t.csv"), **keys})
    return Config(data=data)


def test_the_model_is_tried_once_the_source_is_right(tmp_path, tried):
    config = configured(tmp_path)
    assert check(config).found == {"task": "ranking"}
    assert tried == [config]


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"source": "nowhere.csv"}, "data.source: there is nothing at "),
        ({"label": "labl"}, "data.label: there is no column 'labl' in .*; did you mean 'label'"),
        ({"inputs": ["aeg"]}, "data.inputs: there is no column 'aeg' in .*; did you mean 'age'"),
        ({"weight": "w"}, "data.weight: there is no column 'w' in "),
        ({"group": "user"}, "data.group: there is no column 'user' in "),
        ({"drop": ["twon"]}, "data.drop: there is no column 'twon' in .*; did you mean 'town'"),
        ({"types": {"aged": "int"}}, "data.types: there is no column 'aged' in "),
        ({"splits": {"column": "part"}}, "data.splits.column: there is no column 'part' in "),
        ({"splits": {"group": "user"}}, "data.splits.group: there is no column 'user' in "),
        ({"spans": "all"}, "data.spans: all, but no file of data.source has a span"),
        ({"label": "town", "inputs": ["town"]}, "data.inputs: 'town' of .* is also its label"),
        ({"drop": ["age", "town"]}, r"data.inputs: .* has no column left to predict from"),
        ({"format": "parquet"}, "is not a valid Parquet file"),
    ],
)
def test_a_mistake_in_the_source_is_found_without_tensorflow(tmp_path, tried, keys, line):
    with pytest.raises(ConfigError, match=line):
        check(configured(tmp_path, **keys))
    assert not tried


def test_a_source_that_does_not_answer_is_a_note(tmp_path, tried, monkeypatch):
    def fail(_config):
        raise TransientError("no answer")

    monkeypatch.setattr(listing, "list_source", fail)
    config = configured(tmp_path)
    assert check(config).notes == ("data.source was not checked: no answer",)
    assert not tried


def test_a_source_of_other_machines_may_be_out_of_reach(monkeypatch):
    def fail(_config):
        raise UserError("no keys for s3://bucket") from PermissionError("no keys")

    monkeypatch.setattr(listing, "list_source", fail)
    data = DataConfig(source="s3://bucket/t.csv")
    assert require_source(data, is_remote=True) == (
        "data.source was not checked: no keys for s3://bucket",
    )
    with pytest.raises(ConfigError, match="no keys"):
        require_source(data)


def test_what_is_not_known_of_a_model_is_a_note(tmp_path, monkeypatch):
    def fail(*_args, **_named):
        raise fitting.NotKnownError("no answer after 90 s")

    monkeypatch.setattr(fitting, "try_fit", fail)
    assert check(configured(tmp_path)).notes == (
        "cannot check whether the model fits the dataset: no answer after 90 s",
    )


def test_a_program_is_looked_for_and_not_tried(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = {"command": ["python", "train.py"]}
    assert check(parse_config({"program": program})).notes == (
        "the model is not checked, because the program 'python train.py' builds it",
    )
    with pytest.raises(ConfigError, match=r"program\.command: there is no program no-such"):
        check(parse_config({"program": {"command": ["no-such"]}}))
    with pytest.raises(ConfigError, match=r"program\.working_dir: there is no folder .*/absent"):
        check(parse_config({"program": {**program, "working_dir": "absent"}}))

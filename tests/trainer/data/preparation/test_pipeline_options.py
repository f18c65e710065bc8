"""Options of a Beam pipeline: refused in one line before anything is made."""

import sys

import pytest
from pydantic import ValidationError

from trainer.config.data import DataConfig, RunnerConfig
from trainer.data.preparation.pipeline_options import pipeline_options, require_reachable
from trainer.errors import ConfigError

BUCKET = "gs://bucket/root"


def beam(*options):
    return {"name": "beam", "options": list(options)}


def test_without_a_runner_beam_runs_here():
    for options in ((), ("--runner=DirectRunner",), ("--runner=direct",)):
        found = pipeline_options(RunnerConfig(name="beam", options=options))
        assert found.get_all_options()["runner"].endswith(".FnApiRunner")


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--runer=FlinkRunner", "no option --runer; did you mean 'runner'?"),
        ("--runner=Flick", "--runner=Flick: ValueError: Unexpected pipeline runner"),
        ("--direct_num_workers=two", "argument --direct_num_workers: invalid int value: 'two'"),
    ],
)
def test_a_bad_option_is_one_line(option, words, capsys):
    with pytest.raises(ConfigError) as caught:
        pipeline_options(RunnerConfig(name="beam", options=(option,)))
    assert str(caught.value).startswith("data.runner.options: ")
    assert words in str(caught.value)
    assert not capsys.readouterr().err


def test_options_are_written_as_flags_and_for_beam_alone():
    with pytest.raises(ValidationError, match="write each option as --name=value"):
        DataConfig(runner=beam("runner", "FlinkRunner"))
    with pytest.raises(ValidationError, match="set name to beam"):
        DataConfig(runner={"options": ["--runner=FlinkRunner"]})


def test_without_the_extra_there_is_one_line(monkeypatch):
    for name in [each for each in sys.modules if each.partition(".")[0] == "apache_beam"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "apache_beam", None)
    with pytest.raises(ConfigError, match=r"data.runner: beam needs .*pip install 'flotilla\[beam"):
        require_reachable(DataConfig(runner=beam()), BUCKET)


@pytest.mark.parametrize(
    ("root", "data", "words"),
    [
        ("file:///root", {"source": "gs://bucket/*.csv"}, "set storage.root to a bucket"),
        (BUCKET, {"source": "/data/*.csv"}, "/data/*.csv; set data.source to a URI of a bucket"),
        (BUCKET, {"dataset": "mnist"}, "set TFDS_DATA_DIR to a folder that they mount"),
    ],
)
def test_what_remote_workers_do_not_reach_is_refused(root, data, words, monkeypatch):
    monkeypatch.delenv("TFDS_DATA_DIR", raising=False)
    with pytest.raises(ConfigError) as caught:
        require_reachable(DataConfig(runner=beam("--runner=FlinkRunner"), **data), root)
    assert "the workers of FlinkRunner do not reach" in str(caught.value)
    assert words in str(caught.value)


def test_workers_of_this_machine_reach_all():
    for options in ((), ("--runner=FlinkRunner", "--environment_type=LOOPBACK")):
        require_reachable(DataConfig(runner=beam(*options)), "file:///root")
    require_reachable(
        DataConfig(runner=beam("--runner=SparkRunner"), source="gs://bucket/a.csv"), BUCKET
    )

"""Tests parts that Apache Beam maps: the same dataset, and one-line errors."""

import pickle
import sys

import pytest
from pydantic import ValidationError

from flotilla.trainer import storage
from flotilla.trainer.config.data import DataConfig, RunnerConfig
from flotilla.trainer.data.preparation.runners import (
    PartMapper,
    pipeline_options,
    require_reachable,
)
from flotilla.trainer.data.prepare import prepare
from flotilla.trainer.runtime.errors import ConfigError, UserError

BEAM = {"name": "beam"}


def test_by_beam_the_same_bytes_are_made_under_the_same_key(prepared, source, tmp_path):
    alone = prepared(source)
    storage.delete(alone.uri)
    by_beam = prepared(source, runner=BEAM)
    assert by_beam.uri == alone.uri
    assert by_beam.manifest.same_content(alone.manifest)
    assert not list((tmp_path / "root" / "preparing").rglob("*.records"))


def test_a_part_that_fails_is_one_line_and_what_was_finished_is_kept(prepared, source, tmp_path):
    source.breaks = 3
    with pytest.raises(UserError) as caught:
        prepared(source, runner=BEAM)
    assert str(caught.value) == "part 3 is broken"
    (kept,) = (tmp_path / "root" / "preparing").iterdir()
    assert sorted(place.name for place in kept.iterdir()) == ["000000", "000001", "000002"]
    source.breaks = -1
    prepared(source, runner=BEAM)
    assert (source.seen / "1").read_text() == "read\n"


def test_a_worker_publishes_its_part_or_why_it_has_none(source, tmp_path):
    source.breaks = 3
    source.fetch()
    uri = storage.uri_of(tmp_path / "parts")
    mapper = pickle.loads(pickle.dumps(PartMapper(pickle.dumps(source), uri, DataConfig())))
    assert [mapper(part) for part in source.parts()[:2]] == [0, 1]
    with pytest.raises(UserError, match="part 3 is broken"):
        mapper(source.parts()[3])
    assert [m.fields for _, m in storage.list_published(uri, "failed part")] == [
        {"message": "part 3 is broken"}
    ]
    # A Beam runner retries failed parts.
    with pytest.raises(UserError, match="part 3 is broken"):
        mapper(source.parts()[3])
    assert mapper(source.parts()[1]) == 1


@pytest.mark.slow
# TFDS reads a dataset's description with a method that protobuf has deprecated.
@pytest.mark.filterwarnings(r"ignore:label\(\) is deprecated:DeprecationWarning")
def test_a_builder_that_uses_beam_is_run_by_it(root, scratch, contents):
    config = DataConfig(dataset="tests.trainer.data.made_builders:ByBeam", shards=2, runner=BEAM)
    dataset = prepare(config, root, scratch)
    found = contents(dataset, "test")
    assert sorted(found["number"].tolist()) == list(range(40, 50))


@pytest.mark.filterwarnings(r"ignore:label\(\) is deprecated:DeprecationWarning")
def test_examples_of_a_function_are_mapped_by_beam(root, scratch):
    config = DataConfig(
        dataset="tests.trainer.data.made_builders:Small",
        map="tests.trainer.data.mapping:odd_ones_left_out",
        shards=2,
    )
    alone = prepare(config, root, scratch)
    storage.delete(alone.uri)
    by_beam = prepare(config.model_copy(update={"runner": RunnerConfig(**BEAM)}), root, scratch)
    assert by_beam.uri == alone.uri
    assert by_beam.manifest.same_content(alone.manifest)


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
    with pytest.raises(ValidationError, match="does not have the form --name=value"):
        DataConfig(runner=beam("runner", "FlinkRunner"))
    with pytest.raises(ValidationError, match="set name to beam"):
        DataConfig(runner={"options": ["--runner=FlinkRunner"]})


def test_without_the_extra_there_is_one_line(monkeypatch):
    for name in [each for each in sys.modules if each.partition(".")[0] == "apache_beam"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "apache_beam", None)
    with pytest.raises(
        ConfigError, match=r"data.runner: beam needs .*pip install 'kfp-flotilla\[beam"
    ):
        require_reachable(DataConfig(runner=beam()), BUCKET)


@pytest.mark.parametrize(
    ("root", "data", "words"),
    [
        ("file:///root", {"source": "gs://bucket/*.csv"}, "set storage.root to a bucket"),
        (BUCKET, {"source": "/data/*.csv"}, "/data/*.csv; set data.source to the URI of a bucket"),
        (BUCKET, {"dataset": "mnist"}, "set TFDS_DATA_DIR to a folder that the workers mount"),
    ],
)
def test_what_remote_workers_do_not_reach_is_refused(root, data, words, monkeypatch):
    monkeypatch.delenv("TFDS_DATA_DIR", raising=False)
    with pytest.raises(ConfigError) as caught:
        require_reachable(DataConfig(runner=beam("--runner=FlinkRunner"), **data), root)
    assert "the workers of FlinkRunner cannot reach" in str(caught.value)
    assert words in str(caught.value)


def test_workers_of_this_machine_reach_all():
    for options in ((), ("--runner=FlinkRunner", "--environment_type=LOOPBACK")):
        require_reachable(DataConfig(runner=beam(*options)), "file:///root")
    require_reachable(
        DataConfig(runner=beam("--runner=SparkRunner"), source="gs://bucket/a.csv"), BUCKET
    )

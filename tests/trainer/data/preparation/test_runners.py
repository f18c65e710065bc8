"""Tests that parts are mapped in processes and by Beam, and that no finished part is lost."""

import itertools
import pickle
import random
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from flotilla.trainer import storage
from flotilla.trainer.config.data import DataConfig, RunnerConfig
from flotilla.trainer.data.preparation import runners
from flotilla.trainer.data.preparation.runners import (
    PartMapper,
    map_parts,
    pipeline_options,
    require_reachable,
)
from flotilla.trainer.data.prepare import prepare
from flotilla.trainer.events.progress import Work
from flotilla.trainer.runtime.errors import ConfigError, UserError
from tests.trainer.works import works


def reads(source):
    return {int(path.name): len(path.read_text().splitlines()) for path in source.seen.iterdir()}


def left_of(tmp_path):
    return [path for path in (tmp_path / "root" / "preparing").rglob("*") if path.is_file()]


@pytest.mark.slow
def test_any_number_of_processes_gives_the_same_bytes(prepared, source):
    alone = prepared(source)
    storage.delete(alone.uri)
    with works() as (last, _):
        assert prepared(source, processes=2).manifest.same_content(alone.manifest)
    assert reads(source) == dict.fromkeys(range(5), 2)
    assert last["encoding the examples"].done == source.count * source.size


def test_what_was_finished_is_kept(prepared, source, tmp_path):
    source.breaks = 3
    with pytest.raises(UserError, match="part 3 is broken"):
        prepared(source)
    assert not list((tmp_path / "root").glob("datasets/*"))
    source.breaks = -1
    again = prepared(source)
    assert reads(source) == dict.fromkeys(range(5), 1)
    assert not left_of(tmp_path)
    storage.delete(again.uri)
    assert prepared(source).manifest.same_content(again.manifest)


def test_a_finished_part_that_was_damaged_is_made_again(prepared, source, tmp_path, caplog):
    source.breaks = 3
    with pytest.raises(UserError):
        prepared(source)
    (records, *_) = (tmp_path / "root" / "preparing").rglob("*1/train.arrow")
    records.write_bytes(records.read_bytes()[::-1])
    source.breaks = -1
    prepared(source)
    assert reads(source)[1] == 2
    assert "crc32c" in caplog.text


@pytest.mark.slow
def test_a_process_that_is_killed_is_one_line_and_its_end_keeps_the_rest(prepared, source):
    source.kills = 3
    with pytest.raises(UserError) as caught:
        prepared(source, processes=2)
    assert "part 3 ended unexpectedly (signal SIGKILL); run the command again" in str(caught.value)
    finished = set(reads(source))
    source.kills = -1
    prepared(source, processes=2)
    assert {1} <= finished <= {0, 1, 2, 4}
    assert set(reads(source)) == set(range(5))


def test_few_parts_need_no_process(source, tmp_path, monkeypatch):
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("a process"))
    source.fetch()
    done = []
    parts = source.parts()[:3]
    map_parts(
        source,
        parts,
        tmp_path,
        config=DataConfig(),
        work=Work("encoding"),
        done=lambda place: done.append(int(place.name)),
    )
    assert done == [0, 1, 2]


def test_a_process_that_ends_before_it_reads_its_request_is_an_error(prepared, source, monkeypatch):
    monkeypatch.setattr(runners, "_COMMAND", "raise SystemExit(3)")
    source.padding = "x" * 1_000_000
    with pytest.raises(UserError, match=r"part \d ended unexpectedly \(exit code 3"):
        prepared(source, processes=2)


FILES, ROWS, KILLS = 12, 400, 2


@pytest.fixture
def tables(tmp_path):
    folder = tmp_path / "tables"
    folder.mkdir()
    for number in range(FILES):
        drawn = np.random.RandomState(number)
        columns = {name: drawn.normal(size=ROWS).astype(np.float32) for name in "abcdef"}
        table = pa.table({**columns, "label": drawn.randint(0, 3, ROWS)})
        pq.write_table(table, folder / f"{number:02d}.parquet", compression="none")
    return folder


def begun(tables, root):
    words = [sys.executable, "-m", "tests.trainer.data.preparation.killed", str(tables), str(root)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


@pytest.mark.long
def test_kills_at_random_change_nothing(tables, tmp_path):
    draw = random.Random(5)
    for _ in range(KILLS):
        with begun(tables, tmp_path / "killed") as process:
            # Wait until some parts are done and others are in progress.
            list(itertools.islice(process.stdout, draw.randint(1, FILES // KILLS - 1)))
            process.kill()
    (kept,) = (tmp_path / "killed" / "preparing").iterdir()
    assert list(kept.glob("*/MANIFEST.json"))
    lines = {}
    for name in ("killed", "alone"):
        with begun(tables, tmp_path / name) as process:
            lines[name] = [line for line in process.stdout if "is done" in line]
        assert process.returncode == 0
    assert len(lines["killed"]) < len(lines["alone"]) == FILES
    ours, other = (
        storage.newest(storage.uri_of(tmp_path / name / "datasets"))[1] for name in lines
    )
    assert ours.same_content(other)
    assert not list((tmp_path / "killed" / "preparing").rglob("*.records"))


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

"""Tests that parts are mapped in parallel and that a killed process loses no finished part."""

import itertools
import random
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flotilla.trainer import storage
from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.data.preparation import runners
from flotilla.trainer.data.preparation.runners import map_parts
from flotilla.trainer.events.progress import Work
from flotilla.trainer.runtime.errors import UserError
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

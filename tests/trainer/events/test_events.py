"""Tests events of several processes in one file: lines stay whole, and errors never stop a run."""

import json
import logging
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from flotilla.trainer import events
from flotilla.trainer.events import AttemptBegin, FromScratch, StepBegin, WarmStart, WorkProgress

MANY_TIMES = """
import sys
from flotilla.trainer import events
for number in range(200):
    events.emit(events.CheckpointPublished(uri=sys.argv[1] + "ö" * 50, global_step=number))
"""
LINE = '{"event": "attempt_begin", "time": 1.0, "global_step": 3, "steps": 9, "resumed": true'
ATTEMPT = AttemptBegin(global_step=3, steps=9, resumed=True)


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "events.jsonl"
    monkeypatch.setenv(events.VARIABLE, str(path))
    return path


def test_an_event_is_one_line_of_json_with_its_name_and_time(file):
    events.emit(WarmStart(uri="file:///tmp/ä b"))
    events.emit(FromScratch(reason="two\nlines"))
    first, second = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    assert first.pop("time") > 0
    assert (first["event"], first["uri"]) == ("warm_start", "file:///tmp/ä b")
    assert second["reason"] == "two\nlines"


def test_what_is_written_is_read_as_the_same_type(file):
    # Fields of a newer version are ignored.
    file.write_text(f'{LINE}, "more": {{"of": ["them"]}}}}\n')
    written = [
        StepBegin(step="train_model"),
        events.Progress(
            global_step=1, steps=2, loss=0.5, steps_per_second=3, seconds_left=4,
            metrics={"workers": {"worker-0": {"local_steps": 1}}},
        ),
        events.TaskFailed(task="ps-0", cause="signal SIGKILL", last_lines=("a", "b")),
        events.StepEnd(step="train_model", status="done", metrics={"loss": 0.5}, uri="gs://b/c"),
    ]  # fmt: skip
    for event in written:
        events.emit(event)
    read = list(events.read(file))
    assert read == [ATTEMPT, *written]
    assert [each.time for each in read[1:]] == [each.time for each in written]


def test_every_kind_has_a_name_of_its_own():
    names = [events.event_name(kind) for kind in events.Event.__subclasses__()]
    assert len(set(names)) == len(names)
    assert {"step_begin", "checkpoint_passed_over"} <= set(names)


def test_without_a_file_they_go_to_the_log(monkeypatch, caplog):
    monkeypatch.delenv(events.VARIABLE, raising=False)
    with caplog.at_level(logging.INFO):
        events.emit(ATTEMPT)
    assert events.parse(f"2026-01-02 03:04:05,006 INFO {caplog.messages[0]}\n") == ATTEMPT


DAMAGES = [
    "\n",
    "words\n",
    '{"event": "attempt_b\n',
    '{"event": "no_such_event", "time": 1.0}\n',
    '{"event": 7, "time": 1.0}\n',
    '{"event": "warm_start", "time": 1.0}\n',
    '{"event": "warm_start", "uri": "gs://b"}\n',
    '{"event": "warm_start", "time": 1.0, "uri": 5}\n',
    '{"event": "warm_start", "time": NaN, "uri": "gs://b"}\n',
    f'{LINE}, "steps": true}}\n',
    f'{LINE}, "steps": 1.5}}\n',
    '{"event": "task_failed", "time": 1, "task": "a", "cause": "b", "last_lines": [1]}\n',
    '{"event": "stalled", "time": 1, "tasks": "ps-0", "seconds": 1}\n',
    '{"event": "warm_start", "time": 1, "uri": "a", "left": {"x": "y"}}\n',
    # A full disk truncated this line, so the next one follows without a line break.
    '{"event": "warm_start", "ti',
    # This JSON is nested too deeply.
    f'{LINE[:-1]}, "more": {"[" * 100_000}\n',
    *[
        f'{{"event": "run_begin", "time": {time}, "run_id": "a", "number": {number}}}\n'
        for far in ("1e999", "9" * 400, "-1e400")
        for time, number in ((far, 1), (1.0, far))
    ],
]


def test_a_damaged_or_unknown_line_hides_no_other(file):
    for damage in [each.encode() for each in DAMAGES] + [b"\xff\xfe\n"]:
        file.write_bytes(f"{LINE}}}\n".encode() + damage + f"{LINE}}}\n{LINE}".encode())
        assert list(events.read(file)) == [ATTEMPT, ATTEMPT], damage[:80]


def test_a_folder_or_nothing_in_the_place_of_the_file_is_no_events(file):
    assert list(events.read(file)) == list(events.read(file.parent)) == []


@pytest.mark.parametrize("where", ["/dev/full", "absent/events.jsonl", "."])
def test_an_event_that_cannot_be_written_stops_nothing(tmp_path, monkeypatch, caplog, where):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(events.VARIABLE, where)
    events.emit(ATTEMPT)
    assert f"cannot write to {where}: " in caplog.text
    assert '"global_step": 3' in caplog.text


def test_lines_of_several_processes_do_not_mix(file):
    root = Path(events.__file__).parents[2]
    command = [sys.executable, "-c", MANY_TIMES]
    writers = [subprocess.Popen([*command, str(index)], cwd=root) for index in range(2)]
    assert [writer.wait() for writer in writers] == [0] * 2
    found = [(event.uri[0], event.global_step) for event in events.read(file)]
    assert len(found) == 400
    for writer in "01":
        assert [number for name, number in found if name == writer] == list(range(200))


def progress(step, time=1.0, **more):
    fields = {"steps": 10, "loss": 0.5, "steps_per_second": 1.0, "seconds_left": 1.0, **more}
    return events.Progress(global_step=step, time=time, **fields)


class TestProgress:
    """Tests that progress is appended up to a file size, and that later only the newest is kept."""

    @pytest.fixture
    def full(self, file, monkeypatch):
        monkeypatch.setattr(events, "PROGRESS_BYTES", 300)
        events.begin_again(file, "run-1")
        for step in range(100):
            events.append(file, progress(step))
        return file

    def test_the_file_does_not_grow_with_it(self, full):
        size = full.stat().st_size
        assert size < 600
        found = list(events.read(full))
        assert [each.global_step for each in found[1:]] == [0, 1, 99]
        events.append(full, progress(100))
        assert full.stat().st_size == size
        assert len(list(full.parent.iterdir())) == 2

    def test_every_other_event_is_appended_all_the_same(self, full):
        events.append(full, ATTEMPT)
        assert ATTEMPT in list(events.read(full))

    def test_the_next_start_keeps_how_far_this_one_came(self, full):
        size = events.begin_again(full, "run-1")
        assert not events.newest_progress(full)
        found = list(events.read(full))
        assert found[-2:] == [progress(99), events.RunBegin(run_id="run-1", number=2)]
        assert full.read_bytes()[size:].count(b"\n") == 1

    def test_a_pipe_takes_all_of_it(self, tmp_path, monkeypatch):
        monkeypatch.setattr(events, "PROGRESS_BYTES", 1)
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        for step in range(3):
            events.append(pipe, progress(step))
        assert os.read(reader, 10_000).count(b"\n") == 3
        os.close(reader)

    @pytest.mark.parametrize("damage", [b"", b"{", b"\0" * 9, b"\xff", b"[" * 9999])
    def test_a_damaged_one_is_none(self, full, damage):
        full.with_name("events.jsonl.progress").write_bytes(damage)
        assert not events.newest_progress(full)
        assert len(list(events.read(full))) == 3


class TestReadingOfSomeKinds:
    def test_of_the_others_the_newest_of_each_start_comes(self, file):
        for number in (1, 2):
            events.begin_again(file, "run-1")
            for step in range(5):
                events.append(file, progress(step))
                events.append(file, events.Saved(uri="u", global_step=step, seconds=1.0))
            events.append(file, WarmStart(uri=str(number)))
        found = list(events.read(file, every=[WarmStart]))
        start = [progress(4), events.Saved(uri="u", global_step=4, seconds=1.0)]
        assert found[1:4] == [WarmStart(uri="1"), *start]
        assert found[5:] == [WarmStart(uri="2"), *start]

    def test_a_line_behind_a_torn_one_is_of_its_own_kind(self, file):
        file.write_text('{"event": "progress", "ti' + f"{LINE}}}\n")
        assert list(events.read(file, every=[type(ATTEMPT)])) == [ATTEMPT]

    def test_a_line_without_an_end_takes_no_memory(self, file):
        with file.open("wb") as writer:
            writer.write(f"{LINE}}}\n".encode())
            writer.truncate(1 << 26)
            writer.seek(0, 2)
            writer.write(f"\n{LINE}}}\n".encode())
        tracemalloc.start()
        assert list(events.read(file)) == [ATTEMPT, ATTEMPT]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1 << 24


def test_a_long_run_is_read_in_little_memory(file):
    events.append(file, StepBegin(step="train_model"))
    with file.open("ab") as writer:
        for step in range(12_000):
            writer.write(f"{json.dumps(events.to_tree(progress(step)))}\n".encode())
    assert file.stat().st_size > 1 << 21
    tracemalloc.start()
    found = list(events.read(file, every=[StepBegin]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == [StepBegin(step="train_model"), progress(11_999)]
    assert peak < 1 << 20


class TestFollowing:
    def test_every_event_comes_once_and_whole(self, tmp_path):
        path = tmp_path / "events.jsonl"
        path.touch()
        with path.open("a", encoding="utf-8") as writer, events.Follower(path) as follower:

            def write(text):
                writer.write(text)
                writer.flush()
                return list(follower.new())

            assert write("") == []
            first, second, third = (FromScratch(reason=each) for each in ("ä", "b", "c"))
            text = json.dumps(events.to_tree(third))
            lines_of = "".join(json.dumps(events.to_tree(each)) + "\n" for each in (first, second))
            assert write(lines_of + text[:9]) == [first, second]
            assert write(text[9:20]) == []
            assert write(text[20:] + "\n") == [third]
            assert write("") == []
            assert write(f"{text[:20]}{text}\n{text[:30]}\n{text}\n") == [third, third]

    def test_progress_for_which_the_file_has_no_room_comes_too(self, file, monkeypatch):
        monkeypatch.setattr(events, "PROGRESS_BYTES", 1)
        events.begin_again(file, "run-1")
        with events.Follower(file) as follower:
            list(follower.new())
            for each in (progress(1, time=1.0), WorkProgress(what="reading", time=2.0)):
                events.append(file, each)
                assert list(follower.new()) == [each]
                assert list(follower.new()) == []
            events.append(file, progress(2, time=3.0))
            assert list(follower.new()) == [progress(2)]

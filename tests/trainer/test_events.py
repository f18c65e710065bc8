"""Events of several processes in one file: whole lines, typed, and never in the way of a run."""

from __future__ import annotations

import dataclasses
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from trainer import events
from trainer.events import (
    AttemptBegin,
    Event,
    FromScratch,
    Progress,
    StepBegin,
    StepEnd,
    TaskFailed,
    WarmStart,
)

MANY_TIMES = """
import sys
from trainer import events
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
    assert first == {"event": "warm_start", "uri": "file:///tmp/ä b"}
    assert second["reason"] == "two\nlines"


def test_what_is_written_is_read_as_the_same_type(file):
    written = [
        StepBegin(step="train_model", inputs={"dataset": "gs://b/d"}),
        Progress(
            global_step=1, steps=2, loss=0.5, steps_per_second=3, seconds_left=4,
            metrics={"workers": {"worker-0": {"local_steps": 1}}},
        ),
        TaskFailed(task="ps-0", cause="signal SIGKILL", last_lines=("a", "b")),
        StepEnd(step="train_model", status="done", metrics={"loss": 0.5}, uri="gs://b/c"),
    ]  # fmt: skip
    for event in written:
        events.emit(event)
    read = list(events.read(file))
    assert read == written
    assert [each.time for each in read] == [each.time for each in written]


def test_every_kind_has_a_name_of_its_own():
    names = [events.name_of(kind) for kind in Event.__subclasses__()]
    assert len(set(names)) == len(names)
    assert {"step_begin", "checkpoint_passed_over"} <= set(names)


def test_a_record_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ATTEMPT.steps = 4


def test_they_are_appended_to_what_is_there(file):
    file.write_text(f"{LINE}}}\n")
    events.emit(WarmStart(uri="gs://b/c"))
    assert list(events.read(file)) == [ATTEMPT, WarmStart(uri="gs://b/c")]


def test_without_a_file_they_go_to_the_log(monkeypatch, caplog):
    monkeypatch.delenv(events.VARIABLE, raising=False)
    with caplog.at_level(logging.INFO):
        events.emit(ATTEMPT)
    assert events.parse(f"2026-01-02 03:04:05,006 INFO {caplog.messages[0]}\n") == ATTEMPT


@pytest.mark.parametrize(
    "damage",
    [
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
        '{"event": "step_begin", "time": 1, "step": "a", "inputs": ["x"]}\n',
        '{"event": "step_begin", "time": 1, "step": "a", "inputs": {"x": 1}}\n',
        # Torn by a full disk: the next line follows on the same one.
        '{"event": "warm_start", "ti',
    ],
)
def test_a_damaged_or_unknown_line_hides_no_other(file, damage):
    file.write_text(f"{LINE}}}\n{damage}{LINE}}}\n{LINE}")
    assert list(events.read(file)) == [ATTEMPT, ATTEMPT]


def test_bytes_that_are_no_text_hide_no_line(file):
    file.write_bytes(f"{LINE}}}\n".encode() + b"\xff\xfe\n" + f"{LINE}}}\n".encode())
    assert list(events.read(file)) == [ATTEMPT, ATTEMPT]


def test_fields_of_a_newer_version_are_ignored(file):
    file.write_text(f'{LINE}, "more": {{"of": ["them"]}}}}\n')
    assert list(events.read(file)) == [ATTEMPT]


def test_a_line_that_is_nested_too_deep_is_passed_over(file):
    file.write_text(f'{LINE[:-1]}, "more": {"[" * 100_000}\n{LINE}}}\n')
    assert list(events.read(file)) == [ATTEMPT]


def test_a_folder_in_the_place_of_the_file_is_no_events(tmp_path):
    assert list(events.read(tmp_path)) == []


def test_no_file_is_no_events(file):
    assert list(events.read(file)) == []


@pytest.mark.parametrize("where", ["/dev/full", "absent/events.jsonl", "."])
def test_an_event_that_cannot_be_written_stops_nothing(tmp_path, monkeypatch, caplog, where):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(events.VARIABLE, where)
    events.emit(ATTEMPT)
    assert f"cannot write to {where}: " in caplog.text
    assert '"global_step": 3' in caplog.text


def test_lines_of_several_processes_do_not_mix(file):
    root = Path(events.__file__).parents[1]
    command = [sys.executable, "-c", MANY_TIMES]
    writers = [subprocess.Popen([*command, str(index)], cwd=root) for index in range(4)]
    assert [writer.wait() for writer in writers] == [0] * 4
    found = [(event.uri[0], event.global_step) for event in events.read(file)]
    assert len(found) == 800
    for writer in "0123":
        assert [number for name, number in found if name == writer] == list(range(200))

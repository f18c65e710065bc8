"""Events of several processes in one file, whole lines only, and never in the way of a run."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from trainer import events

FOUR_TIMES = """
import sys
from trainer import events
for number in range(200):
    events.emit("progress", writer=sys.argv[1], number=number, text="ö" * 50)
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "events.jsonl"
    monkeypatch.setenv(events.VARIABLE, str(path))
    return path


def test_an_event_is_one_line_of_json(file):
    events.emit("checkpoint", uri="file:///tmp/ä b", global_step=3)
    events.emit("life", resumed=True, text="two\nlines")
    lines = file.read_text(encoding="utf-8").splitlines()
    first, second = map(json.loads, lines)
    assert first.pop("time") > 0
    assert first == {"event": "checkpoint", "uri": "file:///tmp/ä b", "global_step": 3}
    assert second["text"] == "two\nlines"
    assert list(events.read(file)) == [json.loads(line) for line in lines]


def test_they_are_added_to_what_is_there(file):
    file.write_text('{"event": "run"}\n')
    events.emit("life")
    assert [event["event"] for event in events.read(file)] == ["run", "life"]


def test_without_a_file_they_go_to_the_log(monkeypatch, caplog):
    monkeypatch.delenv(events.VARIABLE, raising=False)
    with caplog.at_level(logging.INFO):
        events.emit("progress", loss=0.5)
    assert json.loads(caplog.messages[0])["loss"] == 0.5


def test_a_line_that_is_not_whole_is_left_out(file):
    file.write_text('{"event": "run"}\n{"event": "li\n{"event": "life"}\n{"eve')
    assert list(events.read(file)) == [{"event": "run"}, {"event": "life"}]


def test_no_file_is_no_events(file):
    assert list(events.read(file)) == []


@pytest.mark.parametrize("where", ["/dev/full", "absent/events.jsonl", "."])
def test_an_event_that_cannot_be_written_stops_nothing(tmp_path, monkeypatch, caplog, where):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(events.VARIABLE, where)
    events.emit("progress", loss=0.5)
    assert f"cannot write to {where}: " in caplog.text
    assert '"loss": 0.5' in caplog.text


def test_lines_of_several_processes_do_not_mix(file):
    root = Path(events.__file__).parents[1]
    command = [sys.executable, "-c", FOUR_TIMES]
    writers = [subprocess.Popen([*command, str(index)], cwd=root) for index in range(4)]
    assert [writer.wait() for writer in writers] == [0] * 4
    found = [(event["writer"], event["number"]) for event in events.read(file)]
    assert len(found) == 800
    for writer in "0123":
        assert [number for name, number in found if name == writer] == list(range(200))

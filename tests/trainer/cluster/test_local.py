"""The logs of local tasks become lines of the step's own log, each once."""

import logging
import threading

import pytest

from tests.trainer.cluster.test_event_lines import progress
from trainer import events
from trainer.cluster.local import TaskLogs, relayed
from trainer.errors import UserError
from trainer.events import CheckpointPublished, UserCodeFailed


def write(workdir, task, text):
    folder = workdir / task
    folder.mkdir(exist_ok=True)
    with (folder / "log.txt").open("a", encoding="utf-8") as log:
        log.write(text)


class Lines(list[str]):
    def put(self, task, line):
        self.append(f"{task} {line}")

    def taken(self):
        found = list(self)
        self.clear()
        return found


@pytest.fixture
def lines():
    return Lines()


@pytest.fixture
def event_line(tmp_path):
    def line(event):
        path = tmp_path / "event.jsonl"
        events.append(path, event)
        text = path.read_text(encoding="utf-8")
        path.unlink()
        return f"2026-01-01 00:00:00,000 INFO {text}"

    return line


def test_lines_have_the_name_of_their_task_and_events_are_words(
    tmp_path, lines, caplog, event_line
):
    caplog.set_level(logging.INFO)
    logs = TaskLogs(tmp_path, lines.put)
    write(tmp_path, "chief-0", "loading\n" + event_line(progress(20, 1.0)))
    write(tmp_path, "worker-0", event_line(CheckpointPublished(uri="u", global_step=5)))
    logs.take()
    assert lines.taken() == ["chief-0 loading"]
    assert caplog.messages == [
        "global step 20/300  loss 0.2500  100 steps/s  12 s left",
        "checkpoint of global step 5: u",
    ]


def test_a_line_is_taken_once_and_when_it_is_complete(tmp_path, lines):
    logs = TaskLogs(tmp_path, lines.put)
    write(tmp_path, "ps-0", "one\ntw")
    logs.take()
    assert lines.taken() == ["ps-0 one"]
    write(tmp_path, "ps-0", "o\n")
    logs.take()
    logs.take()
    assert lines.taken() == ["ps-0 two"]


def test_what_an_earlier_attempt_has_left_is_not_repeated(tmp_path, lines):
    write(tmp_path, "ps-0", "before\n")
    logs = TaskLogs(tmp_path, lines.put)
    write(tmp_path, "ps-0", "now\n")
    logs.take()
    assert lines.taken() == ["ps-0 now"]


def test_lines_come_while_the_block_runs_and_the_rest_at_its_end(tmp_path, monkeypatch, lines):
    seen = threading.Event()
    take = TaskLogs.take

    def taken(self):
        take(self)
        if lines:
            seen.set()

    monkeypatch.setattr(TaskLogs, "take", taken)
    with relayed(tmp_path, lines.put):
        write(tmp_path, "chief-0", "running\n")
        assert seen.wait(60)
        assert lines.taken() == ["chief-0 running"]
        write(tmp_path, "chief-0", "ended\n")
    assert lines.taken() == ["chief-0 ended"]


def test_the_traceback_of_the_users_code_reaches_the_error_of_the_step(tmp_path, lines, event_line):
    def fail():
        with relayed(tmp_path, lines.put):
            failed = UserCodeFailed(error="bad", traceback="Traceback: blocks.py")
            write(tmp_path, "chief-0", event_line(failed))
            raise UserError("bad")

    with pytest.raises(UserError, match="bad") as caught:
        fail()
    assert caught.value.traceback == "Traceback: blocks.py"

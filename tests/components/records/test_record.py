"""What a step leaves behind: its events, one line of an error, and its exit code."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from components.records.record import STOPPING, recorded
from components.records.step_record import read, step_records
from trainer import events
from trainer.errors import ClusterLostError, ConfigError, RunInterruptedError, UserError
from trainer.events import StepBegin, StepEnd
from trainer.run_state import state_of

ROOT = Path(__file__).parents[3]
BEGINS = """
import sys
from components.records.record import recorded

with recorded(sys.argv[1]):
    print("at work", flush=True)
    {body}
print("went on", flush=True)
"""
# Not `signal.pause`, which misses a signal that comes just before it.
WORKS = "while True: pass"


@pytest.fixture
def emitted(tmp_path, monkeypatch):
    """Return what was written to the events so far."""
    path = tmp_path / "events.jsonl"
    monkeypatch.setenv(events.VARIABLE, str(path))
    return lambda: list(events.read(path))


@pytest.fixture
def start(tmp_path):
    """Start a step in a process of its own."""
    started = []

    def begin(step, body, **environment):
        env = {**os.environ, events.VARIABLE: str(tmp_path / "events.jsonl"), **environment}
        process = subprocess.Popen(
            [sys.executable, "-c", BEGINS.format(body=body), step],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def test_a_step_that_is_done(emitted, capsys):
    with recorded("train_model") as record:
        record.output.done("file:///c", {"global_step": 7})
    begin, end = emitted()
    assert begin == StepBegin(step="train_model")
    assert end == StepEnd(
        step="train_model",
        status="done",
        seconds=end.seconds,
        metrics={"global_step": 7},
        uri="file:///c",
        output="checkpoint",
    )
    assert end.seconds >= 0
    assert not "".join(capsys.readouterr())


def test_its_inputs_are_recorded_before_it_works(emitted):
    with recorded("train_model", inputs={"dataset": "gs://b/d"}):
        (begin,) = emitted()
    assert begin.inputs == {"dataset": "gs://b/d"}


def test_it_has_begun_before_it_works(emitted):
    with recorded("train_model"):
        assert [type(event) for event in emitted()] == [StepBegin]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (UserError("no space"), "failed", 1),
        (ConfigError("no such key"), "failed", 2),
        (RunInterruptedError("interrupted at 7"), "interrupted", 130),
        (ClusterLostError("worker-0 is gone"), "failed", 138),
    ],
)
def test_an_error_of_the_user_is_one_line_and_a_code(emitted, capsys, error, status, code):
    def work():
        with recorded("train_model") as record:
            record.output.metrics = {"so far": 1}
            raise error

    with pytest.raises(SystemExit) as ended:
        work()
    assert ended.value.code == code
    assert ended.value.__suppress_context__
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"flotilla: train_model: {error}\n")
    end = emitted()[-1]
    assert (end.status, end.exit_code, end.error) == (status, code, str(error))
    assert end.metrics == {"so far": 1}


def test_a_bug_is_recorded_and_raised(emitted, capsys):
    step, bug = recorded("check_gate"), ZeroDivisionError("by\nzero")
    step.__enter__()
    # No frame of the error is in a file of the user.
    assert not step.__exit__(ZeroDivisionError, bug, None)
    end = emitted()[-1]
    assert (end.status, end.exit_code, end.traceback) == ("failed", 1, "")
    # One line, whatever a library has to say.
    assert end.error == "bug in check_gate: ZeroDivisionError: by zero"
    assert not "".join(capsys.readouterr())


def test_an_error_in_the_users_code_is_a_line_with_its_place_and_a_traceback(
    emitted, capsys, caplog
):
    with pytest.raises(SystemExit) as ended, recorded("evaluate_model"):
        raise ZeroDivisionError("by\nzero")
    assert ended.value.code == 1
    end = emitted()[-1]
    assert re.fullmatch(
        r"the code that it was given raised ZeroDivisionError: by \(.*test_record\.py:\d+\)",
        end.error,
    )
    assert capsys.readouterr().err == f"flotilla: evaluate_model: {end.error}\n"
    assert end.traceback.startswith("Traceback (most recent call last):\n")
    assert end.traceback in caplog.text


@pytest.mark.parametrize("given", [0, 3, None, "no such class"])
def test_sys_exit_in_the_users_code_is_an_error_of_the_users_code(emitted, capsys, given):
    with pytest.raises(SystemExit) as ended, recorded("export_model"):
        sys.exit(given)
    # Whatever it wanted to say by its own code: nothing was exported.
    assert ended.value.code == 1
    end = emitted()[-1]
    assert (end.status, end.exit_code) == ("failed", 1)
    assert re.fullmatch(
        r"the code that it was given raised SystemExit.* \(.*test_record\.py:\d+\)", end.error
    )
    assert capsys.readouterr().err == f"flotilla: export_model: {end.error}\n"


def test_a_sys_exit_that_is_not_the_users_is_an_end_too(emitted):
    step = recorded("check_gate")
    step.__enter__()
    # No frame of the error is in a file of the user.
    with pytest.raises(SystemExit) as ended:
        step.__exit__(SystemExit, SystemExit(0), None)
    assert ended.value.code == 1
    assert emitted()[-1].error == "bug in check_gate: SystemExit: 0"


def test_a_message_on_a_full_disk_hides_neither_the_record_nor_the_exit_code(tmp_path):
    at = (tmp_path / "root" / "0b7c").as_uri()
    body = (
        "import sys\nfrom components.records.record import recorded\n"
        "from trainer.errors import UserError\n"
        "with recorded('train_model', sys.argv[1]): raise UserError('no space')\n"
    )
    with open("/dev/full", "wb") as full:
        process = subprocess.run(
            [sys.executable, "-c", body, at], cwd=ROOT, stderr=full, check=False
        )
    # 1, and not that of a traceback or of a stream that could not be flushed.
    assert process.returncode == 1
    (found,) = read(at, well=False)
    assert (found.status, found.error) == ("failed", "no space")


def test_signals_are_as_they_were_afterwards():
    before = signal.getsignal(signal.SIGTERM)
    with recorded("prepare_data"):
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_without_a_file_the_events_go_to_the_log(monkeypatch, caplog):
    monkeypatch.delenv(events.VARIABLE, raising=False)
    with caplog.at_level("INFO"), recorded("prepare_data"):
        pass
    assert [record.name for record in caplog.records] == ["trainer.events"] * 2


def test_sigterm_interrupts_the_step(start, emitted):
    process = start("prepare_data", WORKS)
    assert process.stdout.readline() == "at work\n"
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate()
    assert process.returncode == 130
    assert err == "flotilla: prepare_data: interrupted before the step was done\n"
    assert not out
    assert emitted()[-1].status == "interrupted"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_library_that_catches_every_exception_does_not_hide_it(start, emitted, number):
    body = "while True:\n        try: len(str(10**999))\n        except Exception: pass"
    process = start("prepare_data", body)
    assert process.stdout.readline() == "at work\n"
    process.send_signal(number)
    process.communicate()
    assert process.returncode == 130
    assert emitted()[-1].error == "interrupted before the step was done"


def test_a_step_that_is_killed_leaves_its_begin_alone(start, emitted):
    process = start("prepare_data", WORKS)
    assert process.stdout.readline() == "at work\n"
    process.kill()
    process.communicate()
    assert [type(event) for event in emitted()] == [StepBegin]
    assert step_records(state_of(emitted()))[0].error.startswith(
        "the step was killed, or code that "
    )


def test_an_end_that_was_asked_for_between_two_steps_stops_the_next(start, emitted):
    process = start("train_model", "pass", **{STOPPING: "1"})
    out, _ = process.communicate()
    assert process.returncode == 130
    assert not out
    assert [type(event) for event in emitted()] == [StepBegin, StepEnd]
    assert emitted()[-1].status == "interrupted"


def test_the_exit_step_works_all_the_same(start, emitted):
    process = start("finish", "pass", **{STOPPING: "1"})
    out, _ = process.communicate()
    assert process.returncode == 0
    assert out == "at work\nwent on\n"
    assert emitted()[-1].status == "done"

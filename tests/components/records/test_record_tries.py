"""Tests that a stage is tried again after a transient failure, and what its record says."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flotilla.components.records import record, run_store
from flotilla.components.records.record import run_stage
from flotilla.components.records.step_record import read, step_records
from flotilla.components.table import find_step
from flotilla.trainer import events, storage
from flotilla.trainer.events import StepBegin, StepEnd
from flotilla.trainer.events.run_state import reduce_events
from flotilla.trainer.runtime.errors import (
    ConfigError,
    RunInterruptedError,
    TransientError,
    UserError,
)
from flotilla.trainer.storage.errors import Unavailable

ROOT = Path(__file__).parents[3]
TRIES = 1 + find_step("train_model").retries
OUT = "the store has not been available for 300 s"
WAITS = """
import sys, time
from flotilla.components.records import record
from flotilla.trainer.runtime.errors import TransientError

sleep = time.sleep
time.sleep = lambda seconds: (print(f"pauses {seconds:g} s", flush=True), sleep(seconds))

def work(_output):
    raise TransientError("the store is out")

record.run_stage("train_model", sys.argv[1], work)
"""


@pytest.fixture(autouse=True)
def in_a_pod(monkeypatch):
    for name in (run_store.RUN_ID, run_store.RUN_FOLDER, events.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(record, "FIRST_PAUSE_SECONDS", 0.0)


@pytest.fixture
def at(tmp_path):
    return storage.uri_of(tmp_path / "root" / "0b7c")


class Work:
    """A function that raises each of the given errors in turn and then succeeds."""

    def __init__(self, *errors):
        self._errors, self.count = list(errors), 0

    def __call__(self, output):
        self.count += 1
        output.metrics = {"try": self.count}
        if self._errors:
            raise self._errors.pop(0)
        output.done("gs://b/c", output.metrics)
        return "blessed"


def test_a_failure_that_passes_is_two_tries_in_the_record_and_the_events(
    at, tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv(events.VARIABLE, str(tmp_path / "events.jsonl"))
    assert run_stage("train_model", at, Work(Unavailable(OUT))) == "blessed"
    (found,) = read(at, well=True)
    assert (found.status, found.error, found.uri, found.tries) == ("done", "", "gs://b/c", 2)
    assert found.metrics == {"try": 2}
    (first,) = found.earlier
    assert (first.status, first.error) == ("failed", OUT)
    assert first.began <= found.began
    assert caplog.text.count(f"{OUT}; retrying in 0 s (attempt 2 of {TRIES})") == 1
    emitted = list(events.read(tmp_path / "events.jsonl"))
    assert [type(each) for each in emitted] == [StepBegin, StepEnd] * 2
    (step,) = step_records(reduce_events(emitted))
    assert (step.status, step.tries, step.earlier[0].error) == ("done", 2, OUT)


def test_only_the_stage_that_fails_is_tried_again(at):
    calls = []

    def fails(times):
        def work(step):
            calls.append(step.stage_name)
            if calls.count(step.stage_name) <= times:
                raise TransientError(OUT)

        return work

    def begin(step):
        for name, times in (("resolve_config", 0), ("prepare_data", 2), ("validate_data", 1)):
            step.stage(name, fails(times), stage_name=name)

    begin.__module__ = "flotilla.components.prepare_data"
    record.run(begin, {"root": storage.parent_of(at), "run_id": storage.name_of(at)})
    assert calls == ["resolve_config", *["prepare_data"] * 3, *["validate_data"] * 2]
    found = {each.step: [one.error for one in each.earlier] for each in read(at, well=True)}
    assert found == {"resolve_config": [], "prepare_data": [OUT, OUT], "validate_data": [OUT]}


def test_the_last_try_is_reported_as_any_failure(at, capsys):
    work = Work(*(TransientError(f"out {number}") for number in range(99)))
    with pytest.raises(SystemExit) as ended:
        run_stage("train_model", at, work)
    assert (ended.value.code, work.count) == (1, TRIES)
    assert capsys.readouterr().err == f"flotilla: train_model: out {TRIES - 1}\n"
    (found,) = read(at, well=False)
    assert (found.status, found.tries, found.error) == ("failed", TRIES, f"out {TRIES - 1}")
    assert [each.error for each in found.earlier] == [f"out {n}" for n in range(TRIES - 1)]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("no space"), 1),
        (ConfigError("no such key"), 2),
        (RunInterruptedError("at step 7"), 130),
        (ZeroDivisionError(), 1),
    ],
)
def test_what_a_retry_cannot_help_is_one_try(at, error, code):
    work = Work(error)
    with pytest.raises(SystemExit) as ended:
        run_stage("train_model", at, work)
    assert (ended.value.code, work.count) == (code, 1)
    assert read(at, well=False)[0].tries == 1


def test_on_this_machine_the_user_sees_the_failure_at_once(at, monkeypatch):
    monkeypatch.setenv(run_store.RUN_ID, "digits-1")
    work = Work(TransientError(OUT))
    with pytest.raises(SystemExit):
        run_stage("train_model", at, work)
    assert work.count == 1


def test_while_it_pauses_the_record_has_no_end(at):
    seen = []

    def work(_output):
        text = storage.read_bytes(storage.join(at, "steps", "train_model.json"))
        seen.append(json.loads(text))
        raise TransientError(OUT)

    with pytest.raises(SystemExit):
        run_stage("train_model", at, work)
    assert [each["status"] for each in seen] == ["running"] * TRIES
    assert [len(each["earlier"]) for each in seen] == list(range(TRIES))


def test_after_a_request_to_end_there_is_no_further_try(at):
    count = []

    def work(_output):
        count.append(1)
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.sigtimedwait([], 10)
        except BaseException:
            # Imitate a library that replaces every exception with its own.
            raise TransientError("the connection was closed") from None

    with pytest.raises(SystemExit):
        run_stage("train_model", at, work)
    assert len(count) == 1


def test_a_request_to_end_during_the_pause_ends_it(at):
    process = subprocess.Popen(
        [sys.executable, "-c", WAITS, at],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline().endswith("pauses 30 s\n")
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=300)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130
    assert err.endswith("\nflotilla: train_model: interrupted before the step was finished\n")
    (found,) = read(at, well=False)
    assert (found.status, found.tries) == ("interrupted", 2)


def test_a_store_that_was_out_at_the_end_of_a_try_hides_none(tmp_path, capsys):
    place = tmp_path / "root"
    at = storage.uri_of(place / "0b7c")
    place.write_text("a file in the folder's place", encoding="utf-8")

    def work(_output):
        if place.is_dir():
            return
        place.unlink()
        place.mkdir()
        raise TransientError(OUT)

    run_stage("train_model", at, work)
    (found,) = read(at, well=True)
    assert (found.tries, found.earlier[0].error) == (2, OUT)
    assert capsys.readouterr().err.count("could not be published") == 1

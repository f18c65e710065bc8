"""Tests the records of steps that share no folder: how they are written, replaced and read.

A failure to write a record must not stop a step.
"""

import json
import time

import pytest

from flotilla.components.records import run_store
from flotilla.components.records.record import record_stage
from flotilla.components.records.step_record import PublishedRecord, read
from flotilla.trainer import storage
from flotilla.trainer.events import StepResult
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.storage import retry
from tests.stores.faults import Fault
from tests.stores.fixtures import bucket_name
from tests.trainer.storage.places import BucketPlace, FilePlace

RUN = "0b7c"


HELD = {"tasks": {"worker": 2}, "gpus": 0}


@pytest.fixture(params=["file", "gs", "s3"])
def place(request, tmp_path):
    if request.param == "file":
        return FilePlace(tmp_path)
    server = request.getfixturevalue("gcs" if request.param == "gs" else "s3")
    return BucketPlace(server, f"{request.param}://{bucket_name()}/k")


@pytest.fixture
def at(place):
    return storage.join(place.root, RUN)


@pytest.fixture
def disk(tmp_path):
    return storage.uri_of(tmp_path / "root" / RUN)


def written(at, step):
    return json.loads(storage.read_bytes(storage.join(at, "steps", f"{step}.json")))


def put(at, step, **fields):
    whole = {"step": step, "status": "running", **fields}
    if "ended" in whole:
        end = {"status": "done", "error": "", "uri": "", "metrics": {}, "held": {}}
        whole = {**whole, **end, "seconds": whole["ended"] - whole["began"], **fields}
    storage.write_bytes(storage.join(at, "steps", f"{step}.json"), json.dumps(whole).encode())


def fail(at, error):
    with pytest.raises(SystemExit), record_stage("train_model", at):
        raise error


def test_a_step_publishes_its_end(at):
    before = time.time()
    with record_stage("train_model", at) as record:
        record.output.held = HELD
        record.output.done("gs://b/c", {"global_step": 7})
    found = written(at, "train_model")
    assert before - 1 <= found["began"] <= found["ended"] <= time.time() + 1
    assert {name: found[name] for name in ("step", "status", "exit_code", "error", "uri")} == {
        "step": "train_model", "status": "done", "exit_code": 0, "error": "", "uri": "gs://b/c",
    }  # fmt: skip
    assert (found["metrics"], found["held"]) == ({"global_step": 7}, HELD)
    assert found["earlier"] == []
    assert [each.step for each in read(at, well=True)] == ["train_model"]


def test_it_has_begun_before_it_works(at):
    with record_stage("train_model", at):
        found = written(at, "train_model")
    assert found["status"] == "running"
    assert found["ended"] is None


def test_a_failure_is_published_with_its_one_line(at):
    fail(at, UserError("worker-0 ended with exit code 1"))
    found = written(at, "train_model")
    assert (found["status"], found["exit_code"]) == ("failed", 1)
    assert found["error"] == "worker-0 ended with exit code 1"


def test_a_bug_is_published_and_goes_on(disk):
    step, bug = record_stage("check_gate", disk), ZeroDivisionError("by\nzero")
    step.__enter__()
    assert not step.__exit__(ZeroDivisionError, bug, None)
    assert written(disk, "check_gate")["error"] == "bug in check_gate: ZeroDivisionError: by zero"


def test_metrics_that_are_no_json_hide_no_error(disk, capsys):
    record = PublishedRecord("train_model", disk)
    record.begin()
    loop = {}
    loop["itself"] = loop
    record.end(StepResult(step="train_model", status="done", metrics=loop))
    assert "could not be published" in capsys.readouterr().err


def test_the_last_try_wins_and_the_earlier_ones_time_counts(at):
    put(at, "train_model", began=100.0, ended=140.0, status="failed", error="worker-0 died")
    with record_stage("train_model", at):
        pass
    found = written(at, "train_model")
    assert (found["status"], found["error"]) == ("done", "")
    first = {"began": 100.0, "seconds": 40.0, "status": "failed", "error": "worker-0 died"}
    assert found["earlier"] == [first]
    fail(at, UserError("again"))
    (found,) = read(at, well=False)
    assert (found.tries, found.error) == (3, "again")
    assert [(each.status, each.error) for each in found.earlier] == [
        ("failed", "worker-0 died"), ("done", ""),
    ]  # fmt: skip
    assert 40 <= found.earlier_seconds < 100


def test_a_try_that_was_killed_went_on_until_the_next_one_began(disk):
    put(disk, "train_model", began=time.time() - 1000)
    with record_stage("train_model", disk):
        pass
    (killed,) = written(disk, "train_model")["earlier"]
    assert 999 < killed["seconds"] < 1100
    assert killed["status"] == "failed"
    assert "the pod of the step was killed" in killed["error"]


def test_or_until_the_exit_step_saw_it(disk):
    began = time.time() - 1000
    put(disk, "train_model", began=began)
    put(disk, "finish", began=began + 30)
    with record_stage("train_model", disk):
        pass
    (killed,) = written(disk, "train_model")["earlier"]
    assert killed["seconds"] == pytest.approx(30, abs=0.1)


def test_records_are_read_in_the_order_in_which_the_steps_began(disk):
    put(disk, "train_model", began=20.0, ended=30.0)
    put(disk, "prepare_data", began=10.0, ended=15.0)
    put(disk, "finish", began=40.0)
    found = read(disk, well=True)
    assert [(each.step, each.ended) for each in found] == [
        ("prepare_data", 15), ("train_model", 30),
    ]  # fmt: skip


def test_the_last_one_without_an_end_was_killed(disk):
    put(disk, "prepare_data", began=10.0)
    put(disk, "train_model", began=time.time() - 60)
    prepared, trained = read(disk, well=False)
    # A later step has started, so this step had ended and only the write of its end failed.
    assert (prepared.status, prepared.error) == ("done", "")
    assert trained.status == "failed"
    assert "the pod of the step was killed" in trained.error
    assert 59 < trained.seconds < 120


def test_a_step_that_another_one_followed_did_not_fail(disk):
    put(disk, "train_model", began=10.0, ended=15.0, status="failed", error="worker-0 died")
    put(disk, "evaluate_model", began=50.0, ended=60.0, status="failed", error="no space")
    trained, evaluated = read(disk, well=False)
    assert (trained.status, trained.error, trained.seconds) == ("done", "", 40)
    assert (evaluated.status, evaluated.error) == ("failed", "no space")


def test_of_a_run_that_ended_well_none_was(disk):
    put(disk, "train_model", began=10.0)
    assert [each.status for each in read(disk, well=True)] == ["done"]


def test_what_the_last_pod_of_a_step_has_not_reached_again_is_skipped(disk):
    put(disk, "resolve_config", began=50.0)
    put(disk, "prepare_data", began=20.0, ended=30.0)
    put(disk, "validate_data", began=30.0)
    found = read(disk, well=False)
    assert [(each.step, each.status) for each in found] == [
        ("resolve_config", "failed"), ("prepare_data", "skipped"), ("validate_data", "skipped"),
    ]  # fmt: skip


def test_what_was_killed_ended_when_the_exit_step_began(disk):
    put(disk, "train_model", began=10.0)
    put(disk, "finish", began=25.0)
    (found,) = read(disk, well=False)
    assert (found.status, found.seconds) == ("failed", 15)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"step": "train_model"}', '{"step": 1, "began": 1}', "\udcff",
     '{"step": "a", "status": "done", "began": NaN}', '{"step": "a", "status": "done"}',
     '{"step": "a", "status": "done", "began": 1, "ended": "now"}',
     '{"step": "a", "status": "done", "began": 1, "held": ["cpu"]}',
     '{"step": "a", "status": "done", "began": 1, "earlier": [{"began": 1, "seconds": "2"}]}'],
)  # fmt: skip
def test_a_damaged_record_is_passed_over_and_replaced(disk, caplog, text):
    uri = storage.join(disk, "steps", "train_model.json")
    storage.write_bytes(uri, text.encode(errors="surrogateescape"))
    assert read(disk, well=False) == []
    assert "is not the record of a step" in caplog.text
    with record_stage("train_model", disk):
        pass
    assert written(disk, "train_model")["earlier"] == []


def test_a_run_without_records(at, place):
    storage.write_bytes(storage.join(place.root, "there"), b"")
    assert read(at, well=False) == []


def test_a_store_that_cannot_be_written_is_one_line_and_the_error_stays(tmp_path, capsys):
    (tmp_path / "root").write_text("a file in the folder's place", encoding="utf-8")
    fail(storage.uri_of(tmp_path / "root" / RUN), UserError("worker-0 died"))
    record, reported = capsys.readouterr().err.splitlines()
    assert reported == "flotilla: train_model: worker-0 died"
    assert record.startswith("flotilla: the record of train_model could not be published: cannot ")


def test_a_bucket_that_refuses_writes_does_not_fail_a_step(s3, capsys):
    place = BucketPlace(s3, f"s3://{bucket_name()}/k")
    s3.plan.add(Fault(403, method="PUT", times=10))
    with record_stage("train_model", storage.join(place.root, RUN)) as record:
        record.output.done("s3://b/c", {})
    assert capsys.readouterr().err.count("could not be published") == 1
    s3.plan.clear()
    assert read(storage.join(place.root, RUN), well=True) == []


def test_a_bucket_that_does_not_answer_is_given_up(s3, capsys, monkeypatch):
    monkeypatch.setattr("flotilla.components.records.step_record._RETRY_SECONDS", 0.3)
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.01)
    place = BucketPlace(s3, f"s3://{bucket_name()}/k")
    s3.plan.add(Fault(503, path=RUN, times=10**6))
    fail(storage.join(place.root, RUN), UserError("worker-0 died"))
    reported = capsys.readouterr().err
    assert "flotilla: train_model: worker-0 died\n" in reported
    assert reported.count("could not be published") == 1
    assert "has not been available for 0.3 s" in reported


def test_the_error_is_reported_before_the_last_request_to_the_store(disk, monkeypatch, capsys):
    seen = []
    write = storage.write_bytes

    def written_after(uri, data):
        seen.append(capsys.readouterr().err)
        write(uri, data)

    monkeypatch.setattr(storage, "write_bytes", written_after)
    fail(disk, UserError("worker-0 died"))
    assert seen == ["", "flotilla: train_model: worker-0 died\n"]


def test_a_store_that_comes_back_gets_the_end(s3, capsys):
    place = BucketPlace(s3, f"s3://{bucket_name()}/k")
    at = storage.join(place.root, RUN)
    s3.plan.add(Fault(403, method="PUT", path="steps"))
    with record_stage("train_model", at):
        assert read(at, well=False) == []
    assert written(at, "train_model")["status"] == "done"
    assert "could not be published" in capsys.readouterr().err


class TestPlaces:
    def test_a_run_on_this_machine_shares_its_folder(self, monkeypatch):
        assert run_store.find_run("gs://b/k", RUN) == f"gs://b/k/{RUN}"
        monkeypatch.setenv(run_store.RUN_FOLDER, "/here")
        assert run_store.find_run("gs://b/k", RUN) == ""

    @pytest.mark.parametrize(
        ("root", "run"), [("", RUN), ("gs://b", ""), ("b", RUN), ("gs://b", "..")]
    )
    def test_without_a_place_there_is_no_record(self, root, run, capsys):
        assert run_store.find_run(root, run) == ""
        with record_stage("train_model", run_store.find_run(root, run)):
            pass
        assert not capsys.readouterr().err

    def test_the_exit_step_finds_the_root_as_the_first_step_does(self):
        artifact = f"s3://b/v2/p/{RUN}/finish/7/report?endpoint=http%3A%2F%2Fa&region=x"
        query = artifact.partition("?")[2]
        assert run_store.run_at_first("", artifact, RUN) == f"s3://b/v2/flotilla/{RUN}?{query}"
        assert run_store.run_at_first("", "/tmp/report", RUN) == ""
        assert run_store.run_at_first("gs://b/k", "/tmp/report", RUN) == f"gs://b/k/{RUN}"

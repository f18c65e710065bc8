"""Tests the records of steps that share no folder: how they are written, replaced and read.

A failure to write a record must not stop a step.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from kfp import dsl

from flotilla.components import launchers, prepare_data
from flotilla.components.finish import finish
from flotilla.components.records import run_store
from flotilla.components.records.record import record_stage, run
from flotilla.components.records.step_record import PublishedRecord, read
from flotilla.components.train_model import train_model
from flotilla.trainer import events, storage
from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.config.form import FIELDS
from flotilla.trainer.config.schema import Config
from flotilla.trainer.data.prepare import prepare
from flotilla.trainer.events import StepResult
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.storage import store
from tests.components.called_steps import ended
from tests.stores.faults import Fault
from tests.stores.fixtures import bucket_name
from tests.trainer.page import Page
from tests.trainer.report.test_report import rows_of
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


@pytest.fixture
def bucket(s3):
    """Return the URI of a run in a bucket, whose faults `s3.plan` has."""
    return storage.join(BucketPlace(s3, f"s3://{bucket_name()}/k").root, RUN)


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
        # The start is published before the work begins.
        found = written(at, "train_model")
        assert (found["status"], found["ended"]) == ("running", None)
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
    assert (found.tries, found.status, found.exit_code, found.error) == (3, "failed", 1, "again")
    assert [(each.status, each.error) for each in found.earlier] == [
        ("failed", "worker-0 died"), ("done", ""),
    ]  # fmt: skip
    assert 40 <= found.earlier_seconds < 100


@pytest.mark.parametrize(("seen", "least"), [([], 999), ([30], 29.9)])
def test_a_try_that_was_killed_went_on_until_the_exit_step_or_the_next_one_began(disk, seen, least):
    began = time.time() - 1000
    put(disk, "train_model", began=began)
    for seconds in seen:
        put(disk, "finish", began=began + seconds)
    with record_stage("train_model", disk):
        pass
    (killed,) = written(disk, "train_model")["earlier"]
    assert least < killed["seconds"] < least + 100
    assert killed["status"] == "failed"
    assert "the pod of the step was killed" in killed["error"]


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


def test_what_the_last_pod_of_a_step_has_not_reached_again_is_skipped(disk):
    put(disk, "resolve_config", began=50.0)
    put(disk, "prepare_data", began=20.0, ended=30.0)
    put(disk, "validate_data", began=30.0)
    found = read(disk, well=False)
    assert [(each.step, each.status) for each in found] == [
        ("resolve_config", "failed"), ("prepare_data", "skipped"), ("validate_data", "skipped"),
    ]  # fmt: skip


@pytest.mark.parametrize(("well", "status"), [(False, "failed"), (True, "done")])
def test_what_was_killed_ended_when_the_exit_step_began_unless_the_run_ended_well(
    disk, well, status
):
    put(disk, "train_model", began=10.0)
    put(disk, "finish", began=25.0)
    (found,) = read(disk, well=well)
    assert (found.status, found.seconds) == (status, 15)


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


def test_a_bucket_that_refuses_writes_does_not_fail_a_step(s3, bucket, capsys):
    s3.plan.add(Fault(403, method="PUT", times=10))
    with record_stage("train_model", bucket) as record:
        record.output.done("s3://b/c", {})
    assert capsys.readouterr().err.count("could not be published") == 1
    s3.plan.clear()
    assert read(bucket, well=True) == []


def test_a_bucket_that_does_not_answer_is_given_up(s3, bucket, capsys, monkeypatch):
    monkeypatch.setattr("flotilla.components.records.step_record._RETRY_SECONDS", 0.3)
    monkeypatch.setattr(store, "FIRST_PAUSE", 0.01)
    s3.plan.add(Fault(503, path=RUN, times=10**6))
    fail(bucket, UserError("worker-0 died"))
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


def test_a_store_that_comes_back_gets_the_end(s3, bucket, capsys):
    s3.plan.add(Fault(403, method="PUT", path="steps"))
    with record_stage("train_model", bucket):
        assert read(bucket, well=False) == []
    assert written(bucket, "train_model")["status"] == "done"
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


ROOT = Path(__file__).parents[3]
POD_RUN = "0b7c0000-1111-2222-3333-444455556666"
REASON = "worker-0 ended with exit code 137 | <killed>"
# A training program for a separate process, which a test kills or asks to end.
POD = """
import sys, types
from flotilla.components import launchers, prepare_data
from flotilla.components.train_model import train_model
from kfp import dsl

def launch(job, defaults):
    print("training", flush=True)
    while True: pass

launchers.launch = launch
config, root, run, dataset, folder = sys.argv[1:]
artifacts = [dsl.Artifact(uri=f"{folder}/{name}") for name in ("model", "viewers")]
train_model.python_func(config, root, run, dataset, "image", "", *artifacts)
"""


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.slow)])
def pod_place(request, tmp_path):
    if request.param == "file":
        return FilePlace(tmp_path)
    return BucketPlace(request.getfixturevalue("s3"), f"s3://{bucket_name()}/k")


def resolved_only(step):
    return step.stage("resolve_config", prepare_data.resolve)


class Pods:
    """A run in which every step has its own disk."""

    def __init__(self, root, dataset, folder, monkeypatch):
        self.root, self.dataset, self._folder = root, dataset, folder
        self._monkeypatch, self._count = monkeypatch, 0

    def disk(self):
        self._count += 1
        folder = self._folder / f"pod-{self._count}"
        folder.mkdir()
        self._monkeypatch.setattr(tempfile, "tempdir", str(folder))
        return folder

    def output(self, kind, step, name):
        """Return an output as KFP's launcher passes it, with a URI that contains the run's ID."""
        disk = self.disk()
        artifact = kind(uri=f"gs://bucket/v2/flotilla-training/{POD_RUN}/{step}/77/{name}")
        self._monkeypatch.setattr(kind, "path", property(lambda each: str(disk / each.name)))
        artifact.name = name
        return artifact

    def resolved(self, **asked):
        return self._first(resolved_only, **asked)

    def prepared(self, **asked):
        return self._first(prepare_data.work, **asked)

    def _first(self, work, **asked):
        values = {each.name: each.default for each in FIELDS}
        values |= {"storage_root": self.root, "kfp_run_id": POD_RUN, **asked}
        kinds = {"configuration": dsl.Artifact, "dataset": dsl.Dataset}
        kinds |= {"validation": dsl.Artifact, "page": dsl.HTML}
        made = {name: self.output(kind, "prepare-data", name) for name, kind in kinds.items()}
        return run(work, {**values, **made, "published": "", "is_whole_run": True})

    def trained(self, config=""):
        viewers = self.output(dsl.Artifact, "train-model", "viewers")
        checkpoint = self.output(dsl.Model, "train-model", "checkpoint")
        config = config or Config().model_dump_json()
        given = (config, self.root, POD_RUN, self.dataset, "image", "")
        return train_model.python_func(*given, checkpoint, viewers)

    def finished(self, state="FAILED", words=None):
        report = self.output(dsl.HTML, "finish", "report")
        summary = self.output(dsl.Markdown, "finish", "summary")
        finish.python_func(ended(state, words), self.root, {}, POD_RUN, report, summary)
        displayed = [Path(each.path).read_text(encoding="utf-8") for each in (report, summary)]
        return Page(displayed[0]), displayed[1]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dataset")
    return prepare(DataConfig(), storage.uri_of(folder / "root"), folder / "scratch").uri


@pytest.fixture
def pods(pod_place, dataset, tmp_path, monkeypatch):
    for name in (run_store.RUN_FOLDER, run_store.RUN_ID, events.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    # Writing an object creates the bucket.
    storage.write_bytes(storage.join(pod_place.root, "there"), b"")
    return Pods(pod_place.root, dataset, tmp_path, monkeypatch)


@pytest.fixture
def broken(monkeypatch):
    def launch(_job, _defaults):
        raise UserError(REASON)

    monkeypatch.setattr(launchers, "launch", launch)


@pytest.fixture
def pod(pods, dataset, tmp_path):
    """Return a function that starts training in a separate process."""
    started = []

    def begin():
        folder = tmp_path / "pod"
        folder.mkdir()
        config = Config().model_dump_json()
        process = subprocess.Popen(
            [sys.executable, "-c", POD, config, pods.root, POD_RUN, dataset, folder],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": str(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout.readline().endswith("training\n")
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def cells(summary, first):
    return next(row for row in rows_of(summary) if row[0].replace("\\", "") == first)


@pytest.mark.usefixtures("broken")
def test_a_failed_training_is_named_with_reason_time_and_cost(pods, capsys):
    prepared = pods.prepared()
    assert (prepared.root, prepared.run_id, prepared.Output) == (pods.root, POD_RUN, "ready")
    with pytest.raises(SystemExit):
        pods.trained(prepared.config)
    assert f"flotilla: train_model: {REASON}" in capsys.readouterr().err
    page, summary = pods.finished(words="Task run failed.")
    assert page.verdict == "failed"
    assert f"train_model: {REASON}" in page.text
    assert "KFP says" not in page.text + summary
    assert "train\\_model: worker-0 ended with exit code 137 \\| \\<killed\\>" in summary
    for step in ("resolve_config", "prepare_data", "validate_data", "train_model"):
        assert cells(summary, step)[1] == ("failed" if step == "train_model" else "done")
        assert cells(summary, step)[2].endswith(" s")
    assert cells(summary, "tasks")[1] == "ps 1, worker 2, chief 1"
    assert "task hours" in page.words
    assert page.heads() == ["Steps and lineage", "Configuration"]
    published = storage.read_bytes(storage.join(pods.root, POD_RUN, "report.html")).decode()
    assert f"train_model: {REASON}" in Page(published).text


def test_the_report_counts_restarts_and_names_task_and_cause(pods, monkeypatch):
    cause = "loss of its pod: evicted (EvictionByEvictionAPI)"

    def launch(_job, _defaults):
        for number in (1, 2):
            events.emit(events.Restart(task="worker-1", cause=cause, restarts=number))
        raise UserError(REASON)

    monkeypatch.setattr(launchers, "launch", launch)
    with pytest.raises(SystemExit):
        pods.trained()
    record = json.loads(
        storage.read_bytes(storage.join(pods.root, POD_RUN, "steps/train_model.json"))
    )
    assert [each["restarts"] for each in record["incidents"]] == [1, 2]
    page, _ = pods.finished()
    assert page.heads()[:2] == ["Incidents", "Steps and lineage"]
    assert page.text.count(cause) == 2
    assert "worker-1" in page.text


def test_a_wrong_value_is_reported_with_its_line(pods):
    with pytest.raises(SystemExit):
        pods.resolved(steps=-5)
    page, summary = pods.finished()
    assert "resolve_config: training.steps: -5 is not allowed" in page.text
    assert "resolve\\_config: training.steps: -5 is not allowed" in summary


# KFP may report `RUNNING` for a run that has ended.
@pytest.mark.parametrize("state", ["FAILED", "RUNNING"])
def test_a_pod_that_was_killed_is_named_and_kfp_has_its_say(pod, pods, state):
    process = pod()
    process.kill()
    process.communicate()
    page, summary = pods.finished(state, words="OOMKilled\n(exit code 137)")
    assert page.verdict == "failed"
    # The message also mentions a stop, because a cancelled step leaves the same records if the
    # store is down.
    said = "train_model: the step started but did not record how it ended: the run was stopped,"
    assert f"{said} the pod of the step was killed" in page.text
    assert "KFP says: OOMKilled (exit code 137)" in page.text
    assert "KFP says: OOMKilled \\(exit code 137\\)" in summary
    assert cells(summary, "train_model")[1] == "failed"


def test_a_pod_that_is_asked_to_end_says_so(pod, pods):
    process = pod()
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 130
    page, summary = pods.finished("CANCELED")
    assert page.verdict == "interrupted"
    assert "train\\_model: interrupted before the step was finished" in summary


@pytest.mark.parametrize(
    ("reached", "words", "expected"),
    [
        ("resolved", "OOMKilled", "process of the step ended before prepare_data began; KFP says:"),
        ("prepared", "ErrImagePull", "train_model has no record: its pod did not start"),
        ("disk", "quota exceeded", ""),
    ],
)
def test_what_has_no_record_is_named_with_what_kfp_says(pods, reached, words, expected):
    getattr(pods, reached)()
    page, summary = pods.finished(words=words)
    assert page.verdict == "failed"
    assert expected in page.text
    assert f"KFP says: {words}" in page.text
    assert f"KFP says: {words}" in summary


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize("pod_place", ["s3"], indirect=True)
def test_a_store_that_cannot_be_written_masks_nothing(pods, s3, capsys):
    s3.plan.add(Fault(403, method="PUT", path="/steps/", times=100))
    with pytest.raises(SystemExit) as failed:
        pods.trained()
    assert failed.value.code == 1
    reported = capsys.readouterr().err
    assert f"flotilla: train_model: {REASON}\n" in reported
    assert reported.count("could not be published") == 1
    page, _ = pods.finished(words="exit code 1")
    assert page.verdict == "failed"
    assert "KFP says: exit code 1" in page.text


@pytest.mark.usefixtures("broken")
def test_no_record_and_no_configuration_holds_a_secret(pods, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
    monkeypatch.setenv("secretkey", "hush-hush")
    pods.resolved()
    with pytest.raises(SystemExit):
        pods.trained()
    run = storage.join(pods.root, POD_RUN)
    steps = [storage.join(run, "steps", name) for name in storage.names(f"{run}/steps")]
    assert len(steps) == 2
    for uri in (*steps, storage.join(run, "config.json")):
        assert b"hush-hush" not in storage.read_bytes(uri)

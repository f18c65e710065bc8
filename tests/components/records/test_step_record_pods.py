"""Tests what the exit step reports about the pods of the other steps."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from kfp import dsl

from flotilla.components import launchers, prepare_data, resolve_config
from flotilla.components.finish import finish
from flotilla.components.records import run_store
from flotilla.components.records.record import run
from flotilla.components.train_model import train_model
from flotilla.trainer import events, storage
from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.config.form import FIELDS
from flotilla.trainer.config.schema import Config
from flotilla.trainer.data.prepare import prepare
from flotilla.trainer.runtime.errors import UserError
from tests.components.called_steps import ended
from tests.stores.faults import Fault
from tests.stores.fixtures import bucket_name
from tests.trainer.page import Page
from tests.trainer.report.test_report import rows_of
from tests.trainer.storage.places import BucketPlace, FilePlace

ROOT = Path(__file__).parents[3]


POD_RUN = "0b7c0000-1111-2222-3333-444455556666"


REASON = "worker-0 ended with exit code 137 | <killed>"


# A training program for a separate process, which a test kills or asks to end.
POD = """
import sys, types
from flotilla.components import launchers, prepare_data, resolve_config
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
    return step.stage("resolve_config", resolve_config.work)


class Pods:
    """A run in which every step has its own disk."""

    def __init__(self, root, dataset, folder, monkeypatch):
        self.root, self.dataset, self._folder, self._monkeypatch = (
            root,
            dataset,
            folder,
            monkeypatch,
        )
        self._count = 0

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
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                POD,
                Config().model_dump_json(),
                pods.root,
                POD_RUN,
                dataset,
                folder,
            ],
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
    for step, status in (
        ("resolve_config", "done"),
        ("prepare_data", "done"),
        ("validate_data", "done"),
        ("train_model", "failed"),
    ):
        assert cells(summary, step)[1] == status
        assert cells(summary, step)[2].endswith(" s")
    assert cells(summary, "tasks")[1] == "ps 1, worker 2, chief 1"
    assert "task hours" in page.words
    assert page.heads() == ["Steps and lineage", "Configuration"]
    published = storage.read_bytes(storage.join(pods.root, POD_RUN, "report.html")).decode()
    assert f"train_model: {REASON}" in Page(published).text


@pytest.mark.usefixtures("broken")
def test_a_step_that_was_tried_again_costs_all_its_tries(pods):
    for _ in range(3):
        with pytest.raises(SystemExit):
            pods.trained()
    page, summary = pods.finished()
    assert "in 2 earlier tries" in page.text
    assert "in 2 earlier tries" in cells(summary, "train_model")[2]


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


def test_a_pod_that_was_killed_is_named_and_kfp_has_its_say(pod, pods):
    process = pod()
    process.kill()
    process.communicate()
    page, summary = pods.finished(words="OOMKilled\n(exit code 137)")
    assert page.verdict == "failed"
    # The message also mentions a stop, because a cancelled step leaves the same records if the
    # store is down.
    said = "train_model: the step started but did not record how it ended: the run was stopped,"
    assert f"{said} the pod of the step was killed" in page.text
    assert "KFP says: OOMKilled (exit code 137)" in page.text
    assert "KFP says: OOMKilled \\(exit code 137\\)" in summary
    assert cells(summary, "train_model")[1] == "failed"


def test_a_state_that_kfp_lost_count_of_does_not_hide_a_killed_pod(pod, pods):
    process = pod()
    process.kill()
    process.communicate()
    page, _ = pods.finished("RUNNING")
    assert page.verdict == "failed"
    assert "train_model: the step started but did not record how it ended" in page.text


def test_a_pod_that_is_asked_to_end_says_so(pod, pods):
    process = pod()
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 130
    page, summary = pods.finished("CANCELED")
    assert page.verdict == "interrupted"
    assert "train\\_model: interrupted before the step was finished" in summary


def test_a_pod_that_was_killed_between_two_stages_is_said_to_be(pods):
    pods.resolved()
    page, _ = pods.finished(words="OOMKilled")
    assert page.verdict == "failed"
    assert "process of the step ended before prepare_data began; KFP says: OOMKilled" in page.text


def test_a_pod_that_never_began_is_named(pods):
    pods.prepared()
    page, summary = pods.finished(words="ErrImagePull")
    assert page.verdict == "failed"
    assert "has no record: its pod did not start" in page.text
    assert "train_model has no record" in page.text
    assert "KFP says: ErrImagePull" in summary


def test_of_a_run_that_left_nothing_kfp_s_words_are_all(pods):
    page, summary = pods.finished(words="quota exceeded")
    assert "KFP says: quota exceeded" in page.text
    assert "KFP says: quota exceeded" in summary


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

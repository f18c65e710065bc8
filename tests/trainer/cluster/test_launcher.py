"""Tests the id of a job, and the record of the end of training."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from flotilla.trainer import storage
from flotilla.trainer.cluster import launcher
from flotilla.trainer.cluster.launcher import ALL_STEPS, EARLY_STOP, Job
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.runtime.errors import UserError

STEPS = 20


def job_of(folder, steps=STEPS, run="run-1", **more):
    return Job(
        config=parse_config({"training": {"steps": steps}, **more}),
        dataset="",
        checkpoints=storage.uri_of(folder / run / "checkpoints"),
        workdir=folder,
    )


def publish(job, step):
    folder = job.workdir / f"made-{step}"
    folder.mkdir(exist_ok=True)
    (folder / "variables.index").write_text(str(step), encoding="utf-8")
    uri = storage.join(job.checkpoints, f"step-{step:08d}")
    storage.publish(folder, uri, kind="checkpoint", fields={"global_step": step})
    return uri


@pytest.fixture
def over(tmp_path):
    job = job_of(tmp_path)
    publish(job, 10)
    launcher.record_end(job, publish(job, STEPS))
    return job


def refused(job):
    with pytest.raises(UserError) as caught:
        launcher.require_end(job, "chief-0")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("step", [STEPS + 75, "abc"])
def test_a_later_checkpoint_that_was_there_before_does_not_count(tmp_path, step):
    job = job_of(tmp_path)
    damaged = publish(job, STEPS + 75)
    folder = storage.local_path(damaged)
    text = (folder / "MANIFEST.json").read_text(encoding="utf-8")
    changed = text.replace(f'"global_step": {STEPS + 75}', f'"global_step": {json.dumps(step)}')
    tree = json.loads(changed)
    # Make the checkpoint older than the record. Without this, both could have the same time in
    # milliseconds.
    tree["created"] = "2026-01-01T00:00:00.000Z"
    (folder / "MANIFEST.json").write_text(json.dumps(tree), encoding="utf-8")
    launcher.record_end(job, publish(job, STEPS))
    launcher.require_end(job, "chief-0")


def test_it_names_the_run_the_configuration_and_the_checkpoint(over):
    launcher.require_end(over, "chief-0")
    path = storage.local_path(over.checkpoints) / launcher.END_FILE
    assert json.loads(path.read_text(encoding="utf-8")) == {
        "run_id": "run-1",
        "config_hash": over.config.digest(),
        "steps": STEPS,
        "reason": ALL_STEPS,
        "global_step": STEPS,
        "checkpoint": f"step-{STEPS:08d}",
        "created": storage.read_manifest(f"{over.checkpoints}/step-{STEPS:08d}").created,
    }


def test_fewer_steps_are_an_early_stop(tmp_path):
    job = job_of(tmp_path)
    assert launcher.record_end(job, publish(job, 10)).reason == EARLY_STOP
    assert launcher.is_over(job)


def test_without_a_record_the_line_names_task_and_place(tmp_path):
    job = job_of(tmp_path)
    publish(job, STEPS)
    assert refused(job).startswith(
        f"chief-0 ended with exit code 0 before training was complete: {job.checkpoints} has no "
        "record"
    )


@pytest.mark.parametrize(
    "other",
    [{"steps": STEPS + 1}, {"steps": STEPS - 1}, {"model": {"name": "softmax"}}],
    ids=["more steps", "fewer steps", "another model"],
)
def test_the_record_of_another_configuration_is_not_believed(over, other):
    refused(job_of(over.workdir, **other))


def test_the_record_of_another_run_is_not_believed(over):
    other = job_of(over.workdir, run="run-2")
    publish(other, STEPS)
    record = storage.read_bytes(storage.join(over.checkpoints, launcher.END_FILE))
    storage.write_bytes(storage.join(other.checkpoints, launcher.END_FILE), record)
    refused(other)


@pytest.mark.parametrize("change", ["training has gone on", "deleted", "published again"])
def test_a_record_is_not_believed_once_its_checkpoint_is_not_the_newest(over, change):
    uri = storage.join(over.checkpoints, f"step-{STEPS:08d}")
    path = storage.local_path(uri) / "MANIFEST.json"
    if change == "training has gone on":
        publish(over, STEPS + 10)
    elif change == "deleted":
        storage.delete(uri)
    else:
        tree = json.loads(path.read_text(encoding="utf-8"))
        tree["created"] = "2030-01-01T00:00:00.000Z"
        path.write_text(json.dumps(tree), encoding="utf-8")
    refused(over)


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b"{}", b"[" * 100_000])
def test_a_damaged_record_is_none(over, data):
    storage.write_bytes(storage.join(over.checkpoints, launcher.END_FILE), data)
    refused(over)


def test_the_job_that_is_asked_has_to_be_the_one_on_record(over):
    assert launcher.is_over(replace(over, workdir=Path("elsewhere")))


@pytest.mark.parametrize("uri", ["gs://b/a/{}", "minio://b/{}?endpoint=http://store:9000&region=x"])
def test_a_job_knows_its_run_by_where_it_publishes(uri):
    checkpoints = uri.format("run-7/checkpoints")
    job = Job(config=parse_config({}), dataset="", checkpoints=checkpoints, workdir=Path())
    assert job.run_id == "run-7"

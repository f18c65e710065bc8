"""Failures of a cluster's run, replayed from its bucket: seen again, and the bucket untouched."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import pytest

from pipelines.replay.execution import ReplayOptions, replay
from tests.pipelines.replay.cluster_run import PLANTS, ClusterRun, write_code
from tests.pipelines.replay.gate_run import RUN, evaluation_at, gated
from tests.trainer.small_run import small_run
from trainer import storage
from trainer.errors import UserError

FLOTILLA = Path(sys.executable).with_name("flotilla")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def run(s3, small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    write_code(tmp_path)
    return ClusterRun(s3=s3, folder=tmp_path, small=small)


def replayed(run, step, **more):
    root = (f"storage.root={run.root}",)
    options = ReplayOptions(run=run.run_id, step=step, settings=root, workdir="runs", **more)
    lines = []
    return replay(options, lines.append), lines


def seen_again(run, name):
    record = PLANTS[name](run)
    assert record.status == "failed" or record.metrics["decision"] == "refused", record
    before = run.content()
    result, lines = replayed(run, record.step)
    assert result.verdict.same, (record.error, result.verdict)
    assert run.content() == before
    return record, result, lines


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.parametrize("name", PLANTS)
def test_each_planted_failure_is_seen_again(run, name):
    seen_again(run, name)


@pytest.mark.slow
@pytest.mark.cluster
def test_a_damaged_shard_is_seen_again(run):
    record, result, lines = seen_again(run, "storage: a shard is damaged")
    assert result.verdict.words == f"the same failure: {record.error}"
    assert result.fetched > 0
    assert any(line.startswith("replaying evaluate_model of") for line in lines)


@pytest.mark.slow
@pytest.mark.cluster
def test_training_that_has_succeeded_comes_as_far_with_a_cluster_of_its_own(run):
    run.run_id = str(uuid4())
    training = {"steps": 20, "batch_size": 8, "checkpoint_every": 10, "validate_every": 0}
    record = run.trained(training=training, cluster={"workers": 1}, data={"shards": 2})
    assert (record.status, record.metrics["global_step"]) == ("done", 20), record.error
    before = run.content()
    result, lines = replayed(run, "train_model")
    assert result.verdict.same, result.verdict
    assert result.replayed.metrics["global_step"] == 20
    # Of one worker the order of the updates is always the same.
    assert result.replayed.metrics["loss"] == pytest.approx(record.metrics["loss"], rel=1e-5)
    assert run.content() == before
    # It began from scratch, and not from what it has published itself.
    assert not [line for line in lines if "checkpoint is" in line]
    at = f"flotilla/{run.run_id}/checkpoints/step-"
    published = {key.split("/")[3] for key in before if key.startswith(at)}
    written = (result.folder / "storage" / run.run_id / "checkpoints").glob("step-*")
    assert {each.name for each in written} == published


@pytest.fixture
def gate(tmp_path, monkeypatch):
    """A run whose gate has refused, below a root of this machine."""
    monkeypatch.chdir(tmp_path)
    root = storage.uri_of(tmp_path / "root")
    gated(tmp_path, root, evaluation_at(tmp_path, root), min={"accuracy": 0.95})
    return root


def command(root, *more):
    words = ["replay", RUN, "check_gate", "--set", f"storage.root={root}", *more]
    return subprocess.run([FLOTILLA, *words], capture_output=True, text=True, check=False)


def content_of(folder):
    return {str(each): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


@pytest.mark.slow
@pytest.mark.cluster
def test_the_command_says_what_it_compared(gate, tmp_path):
    before = content_of(tmp_path / "root")
    ended = command(gate, "--json")
    assert ended.returncode == 0, ended.stderr
    answer = json.loads(ended.stdout.splitlines()[-1])
    assert answer["status"] == "same"
    words = "the same decision, refused: accuracy 0.9 is below gate.min 0.95"
    assert answer["comparison"] == words
    assert answer["fetched_bytes"] > 0
    assert any((tmp_path / answer["folder"] / "storage" / RUN / "decision").iterdir())
    assert content_of(tmp_path / "root") == before
    # Another policy on record than the one that judged: the replay does not agree.
    record = tmp_path / "root" / RUN / "steps" / "check_gate.json"
    record.write_text(record.read_text().replace("0.95", "0.96"))
    assert command(gate).returncode == 1


def test_nothing_is_left_of_a_replay_that_cannot_begin(gate, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=9 << 20))
    options = ReplayOptions(run=RUN, step="check_gate", settings=(f"storage.root={gate}",))
    with pytest.raises(UserError, match="has 9 MB free"):
        replay(options)
    assert list((tmp_path / "runs" / "replays").iterdir()) == []

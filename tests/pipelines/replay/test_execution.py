"""Failures of a cluster's run, replayed from its bucket: seen again, and the bucket untouched."""

import pytest

from pipelines.replay.execution import ReplayOptions, replay
from tests.pipelines.replay.cluster_run import PLANTS, ClusterRun, write_code
from tests.trainer.small_run import small_run

FEW = ("gate: refused", "storage: a shard is damaged", "own code: a metric")


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

"""A run of a KFP instance is replayed from where the instance says that it publishes."""

import pytest

from pipelines.replay import recorded
from pipelines.runs.kfp_access import Instance
from tests.pipelines.replay.gate_run import evaluation_at, gated
from trainer import storage
from trainer.errors import UserError

pytestmark = pytest.mark.usefixtures("uploaded")


@pytest.fixture
def run_id(instance, remote, tmp_path, monkeypatch):
    """A run on the instance whose gate has refused, below the instance's own pipeline root."""
    run_id = remote("submit", "--name", "nightly", "--json").json["run_id"]
    workflow = instance.store.workflows[run_id]
    workflow.begin("check_gate")
    workflow.stop("check_gate", "SUCCEEDED")
    evaluation = evaluation_at(tmp_path, workflow.root, run_id=run_id)
    gated(tmp_path, workflow.root, evaluation, run_id=run_id, min={"accuracy": 0.95})
    # The instance is named by the option alone.
    monkeypatch.delenv("KF_PIPELINES_ENDPOINT")
    return run_id


@pytest.mark.slow
@pytest.mark.cluster
def test_it_is_found_by_the_name_of_the_run_and_replayed(instance, remote, run_id):
    root = storage.local_path(instance.store.workflows[run_id].root)
    before = {str(each): each.read_bytes() for each in root.rglob("*") if each.is_file()}
    ended = remote("replay", "nightly", "check-gate", "--endpoint", instance.url, "--json")
    assert (ended.code, ended.json["status"], ended.json["run_id"]) == (0, "same", run_id)
    words = "the same decision, refused: accuracy 0.9 is below gate.min 0.95"
    assert ended.json["comparison"] == words
    assert before == {str(each): each.read_bytes() for each in root.rglob("*") if each.is_file()}


def test_what_the_instance_does_not_know_is_one_line(instance, run_id, tmp_path):
    def found(run, step="check_gate"):
        there = Instance(endpoint=instance.url)
        return recorded.find(run, step, settings=(), workdir=tmp_path, instance=there)

    assert (found("nightly").run_id, found(run_id).run_id) == (run_id, run_id)
    with pytest.raises(UserError, match=r"has no run 'weekly'; see `flotilla runs`"):
        found("weekly")
    with pytest.raises(UserError, match=r"answered 404 .* check --endpoint and the name or id"):
        found(run_id[:-4] + "0000")
    with pytest.raises(UserError, match=r"export_model never began in the run [0-9a-f-]{36}; the"):
        found("nightly", "export_model")
    instance.store.workflows[run_id].nodes.clear()
    with pytest.raises(UserError, match=r"is not known: add --set storage.root=URI"):
        found("nightly")


def test_a_store_that_has_another_address_here_is_one_line(instance, remote, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    instance.store.pipeline_root = "minio://mlpipeline/v2/artifacts"
    run_id = remote("submit", "--json").json["run_id"]
    instance.store.workflows[run_id].begin("check_gate")
    ended = remote("replay", run_id, "check_gate", "--endpoint", instance.url)
    assert (ended.code, ended.err.count("\n")) == (1, 1)
    assert "no credentials" in ended.err
    assert "add --set storage.root=URI, such as minio://BUCKET/FOLDER?endpoint=" in ended.err

"""Tests how the step and run to replay are chosen, and which names are rejected."""

import json
import re
import shlex

import pytest

from flotilla.pipelines import replay
from flotilla.pipelines.cli import app
from flotilla.pipelines.runs.kfp_access import Instance
from flotilla.trainer import storage
from flotilla.trainer.report import heading
from flotilla.trainer.runtime.errors import USAGE, UserError
from tests.pipelines.gate_run import RUN, prepared


@pytest.fixture
def root(tmp_path):
    return storage.uri_of(tmp_path / "root")


@pytest.fixture
def run(root, tmp_path):
    return prepared(tmp_path, root)


@pytest.fixture
def find(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def call(step="prepare_data", *, run=RUN, settings=()):
        return replay.find(
            run, step, settings=settings, workdir=tmp_path / "runs", instance=Instance()
        )

    return call


def refused(find, *step, **more):
    with pytest.raises(UserError) as caught:
        find(*step, **more)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("prepare_data", ""), ("prepare-data", ""), ("validate_data", "validate_data"),
        ("resolve-config", "resolve_config"),
    ],
)  # fmt: skip
def test_a_step_below_a_storage_root_by_its_name_or_that_of_a_stage(run, root, find, name, stage):
    found = find(name, settings=[f"storage.root={root}"])
    assert (found.run_id, found.root, found.source) == (RUN, root, root)
    assert (found.step, found.stage) == ("prepare_data", stage)
    assert [each.step for each in found.stages] == list(run)
    assert found.data_version == run["resolve_config"].metrics["data_version"]
    assert found.given.arguments["label"] == "y"
    assert found.given.artifacts["dataset"]["uri"].startswith("s3://b/v2/flotilla/")


@pytest.mark.usefixtures("run")
def test_what_is_no_step_of_the_run(root, find):
    settings = [f"storage.root={root}"]
    for step, said in (
        ("evaluate_mode", "no step 'evaluate_mode'; did you mean 'evaluate_model'?"),
        ("finish", "no step 'finish'"),
        ("export_model", f"the run {RUN} did not start export_model; the steps that it started: "
         "resolve_config (done), prepare_data (done), validate_data (done)"),
    ):  # fmt: skip
        assert said in refused(find, step, settings=settings)
    said = f"no run '{RUN}1' below {root}; did you mean '{RUN}'?"
    assert refused(find, run=f"{RUN}1", settings=settings) == said
    assert "no run 'other' below" in refused(find, run="other")
    said = "--set: a replay accepts only storage.root=URI"
    assert refused(find, settings=["name=digits"]) == said


@pytest.mark.usefixtures("run")
def test_a_run_of_an_older_version_cannot_be_replayed(root, find):
    uri = storage.join(root, RUN, "given", "prepare_data.json")
    settings = [f"storage.root={root}"]
    tree = json.loads(storage.read_bytes(uri))
    storage.write_bytes(uri, b"{}")
    assert "given/prepare_data.json is damaged" in refused(find, settings=settings)
    for step in ("nothing", "../x", "train_model"):
        storage.write_bytes(uri, json.dumps({**tree, "step": step}).encode())
        assert "given/prepare_data.json is damaged" in refused(find, settings=settings)
    storage.delete(uri)
    assert "are not recorded" in refused(find, settings=settings)
    storage.write_bytes(uri, json.dumps({**tree, "in_pod": True}).encode())
    assert find(settings=settings).given.version
    # In an earlier version, which had nine steps, this step had these arguments.
    named = {"data": "{}", "root": root, "seal": "", "dataset": {}}
    storage.write_bytes(uri, json.dumps({**tree, "arguments": named, "version": "0.1"}).encode())
    with pytest.raises(UserError) as caught:
        replay.require_arguments(find(settings=settings).given)
    assert re.fullmatch(
        r"prepare_data of Flotilla \S+ needs batch_size, epochs, gpus and 12 more, which "
        r"Flotilla 0\.1 did not record; replay the run with that version",
        str(caught.value),
    )


@pytest.mark.parametrize("turn", [0, 2, 4])
def test_the_command_in_a_report_is_accepted_with_its_words_in_any_order(turn, capsys):
    failed = {"step": "train_model", "status": "failed", "error": "no width"}
    facts = {"run_id": RUN, "verdict": "failed", "workdir": "/no such", "steps": [failed]}
    command, replay, *words = shlex.split(heading.commands(facts)[0]["command"])
    assert (command, replay) == ("flotilla", "replay")
    assert app.call([replay, *words[turn:], *words[:turn]]) == USAGE
    assert capsys.readouterr().err == f"flotilla: no run '{RUN}' below /no such\n"


def test_a_bucket_that_is_not_there_is_one_line(s3, find):
    assert s3.url
    line = refused(find, settings=["storage.root=s3://no-such-bucket-here/flotilla"])
    assert "no-such-bucket-here" in line
    assert "\n" not in line


@pytest.fixture
def run_id(uploaded, instance, remote, tmp_path, monkeypatch):  # noqa: ARG001
    """Create a run whose data was refused on the instance, below its pipeline root."""
    run_id = remote("submit", "--name", "nightly", "--json").json["run_id"]
    workflow = instance.store.workflows[run_id]
    workflow.begin("prepare_data")
    workflow.stop("prepare_data", "SUCCEEDED")
    prepared(tmp_path, workflow.root, run_id=run_id)
    # Without this variable, only the option specifies the instance.
    monkeypatch.delenv("KF_PIPELINES_ENDPOINT")
    return run_id


@pytest.mark.slow
@pytest.mark.cluster
def test_it_is_found_by_the_name_of_the_run_and_replayed(instance, remote, run_id):
    root = storage.local_path(instance.store.workflows[run_id].root)
    before = {str(each): each.read_bytes() for each in root.rglob("*") if each.is_file()}
    ended = remote("replay", "nightly", "validate-data", "--endpoint", instance.url, "--json")
    assert (ended.code, ended.json["status"], ended.json["run_id"]) == (0, "done", run_id)
    stage = ended.json["stages"]["validate_data"]
    assert stage["recorded"] == stage["here"]
    assert stage["here"]["metrics"]["decision"] == "refused"
    assert before == {str(each): each.read_bytes() for each in root.rglob("*") if each.is_file()}


def test_what_the_instance_does_not_know_is_one_line(instance, run_id, tmp_path):
    def found(run, step="prepare_data"):
        there = Instance(endpoint=instance.url)
        return replay.find(run, step, settings=(), workdir=tmp_path, instance=there)

    assert (found("nightly").run_id, found(run_id).run_id) == (run_id, run_id)
    with pytest.raises(UserError, match=r"has no run 'weekly'; see `flotilla runs`"):
        found("weekly")
    with pytest.raises(UserError, match=r"answered 404 .* check the name or id and --endpoint"):
        found(run_id[:-4] + "0000")
    with pytest.raises(UserError, match=r"the run [0-9a-f-]{36} did not start export_model;"):
        found("nightly", "export_model")
    instance.store.workflows[run_id].nodes.clear()
    with pytest.raises(UserError, match=r"is unknown: add --set storage.root=URI"):
        found("nightly")


@pytest.mark.usefixtures("uploaded")
def test_a_store_that_has_another_address_here_is_one_line(instance, remote, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    instance.store.pipeline_root = "minio://mlpipeline/v2/artifacts"
    run_id = remote("submit", "--json").json["run_id"]
    instance.store.workflows[run_id].begin("prepare_data")
    ended = remote("replay", run_id, "prepare_data", "--endpoint", instance.url)
    assert (ended.code, ended.err.count("\n")) == (1, 1)
    assert "missing or wrong credentials" in ended.err
    assert "add --set storage.root=URI, such as minio://BUCKET/FOLDER?endpoint=" in ended.err

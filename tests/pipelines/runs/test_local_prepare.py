"""Tests the complete `flotilla prepare` with KFP's local runner, on real digits."""

import shutil

import pytest

from flotilla.components import prepare_data
from flotilla.components.records import run_store
from flotilla.pipelines.runs import local_status
from flotilla.trainer import storage
from flotilla.trainer.config.load import load_config
from flotilla.trainer.promotion import training_data as trained
from tests.pipelines.called import call, content, setting

pytestmark = pytest.mark.slow

DATASET = {"train": 1293, "validation": 144, "test": 360}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepare")
    # The folder's name contains special characters of shells, URIs and templates.
    return call("prepare", folder / "it's a $wörk dir [x] 100%25", cwd=folder)


def test_it_is_done_and_the_dataset_is_published_and_whole(prepared):
    assert prepared.code == 0, prepared.err
    answer = prepared.answer
    assert (answer["status"], answer["message"], answer["metrics"]) == ("done", "", {})
    assert "global_step" not in answer
    steps = ("resolve_config", "prepare_data", "validate_data")
    assert prepared.statuses() == dict.fromkeys(steps, "done")
    # A run without an exit step is known to have ended.
    assert local_status.read_status(prepared.workdir, answer["run_id"]).status == "done"
    assert list(answer["artifacts"]) == ["dataset", "validation"]
    manifest = storage.verify(answer["artifacts"]["dataset"])
    assert manifest.kind == "dataset"
    splits = manifest.fields["splits"]
    assert {name: each["examples"] for name, each in splits.items()} == DATASET
    assert prepared.path_of("dataset").parent == prepared.workdir / "datasets"


def test_its_course_is_reported_and_the_closing_table_says_what_there_is(prepared):
    lines = prepared.err.splitlines()
    assert lines[0] == f"run {prepared.answer['run_id']} in {prepared.folder}"
    assert [line.split(" in ")[0] for line in lines[1:8]] == [
        "resolve_config ...", "resolve_config done", "prepare_data ...",
        "the newest version of digits is 1.0.0", "prepare_data done", "validate_data ...",
        "validate_data done",
    ]  # fmt: skip
    assert lines[8].startswith("step ")
    text = prepared.err.partition("step  ")[2]
    for words in ("train=1293", "reused=no", " it's a $wörk dir"):
        assert words in text
    assert "file:" not in text


def test_everything_is_whole_and_below_the_workdir(prepared):
    assert [path.name for path in prepared.workdir.parent.iterdir()] == [prepared.workdir.name]
    names = {path.name for path in prepared.workdir.iterdir()}
    assert names - {".lock"} == {"datasets", "in_use", prepared.answer["run_id"]}
    assert not (prepared.folder / "tmp").exists()
    assert not list(prepared.workdir.rglob("*.part"))
    # The artifact in the KFP UI names the URI.
    (path,) = prepared.folder.glob("kfp/*/prepare-data/executor_output.json")
    text = path.read_text(encoding="utf-8")
    assert prepared.answer["artifacts"]["dataset"] in text
    assert '"train": 1293' in text
    # The steps used the installed packages.
    assert "pip install" not in prepared.log


def test_an_unknown_dataset_fails_with_one_line_and_the_code_of_a_mistake(tmp_path):
    ended = call("prepare", tmp_path / "runs", *setting(data__dataset="digitz"), cwd=tmp_path)
    assert ended.code == 2
    assert ended.answer["status"] == "failed"
    assert ended.answer["message"].startswith("prepare_data: ")
    assert "did you mean 'digits'?" in ended.answer["message"]
    assert ended.answer["artifacts"] == {}
    assert ended.statuses()["prepare_data"] == "failed"
    assert "Traceback" not in ended.err + ended.out
    assert ended.err.splitlines()[-1] == f"flotilla: failed: {ended.answer['message']}"


def test_a_second_run_reuses_the_dataset(prepared):
    # Ignore the mark of a dataset's last use, which `flotilla gc` reads.
    before = {
        name: each
        for name, each in content(prepared.workdir).items()
        if "/in_use/" not in str(name)
    }
    again = call("prepare", prepared.workdir, cwd=prepared.workdir.parent)
    assert again.code == 0
    assert again.answer["artifacts"]["dataset"] == prepared.answer["artifacts"]["dataset"]
    assert again.answer["run_id"] != prepared.answer["run_id"]
    assert "reused=yes" in again.err
    after = content(prepared.workdir)
    assert {name: after[name] for name in before} == before
    shutil.rmtree(again.folder)


def test_a_night_without_news_asks_for_no_cluster(tmp_path, monkeypatch):
    monkeypatch.delenv(run_store.RUN_FOLDER, raising=False)
    (tmp_path / "s-1.csv").write_text("a,label\n1,2\n")
    path, workdir = tmp_path / "s.yaml", tmp_path / "runs"
    path.write_text(f"data:\n  source: {tmp_path}/s-{{SPAN}}.csv\n")
    root = storage.uri_of(workdir)
    config = prepare_data.add_listing(load_config(path), root)
    trained.begin(config, root, "first")
    trained.end(root, "first", "promoted")
    again = call("run", workdir, str(path), cwd=tmp_path)
    assert (again.code, again.answer["status"]) == (0, "unchanged"), again.err
    assert again.answer["message"].endswith("to train again, set training.when_unchanged=train")
    assert again.statuses() == {"resolve_config": "done", "finish": "done"}
    assert not (again.folder / "cluster").exists()
    page = (again.folder / "report.html").read_text()
    assert "unchanged" in page
    assert "the same as in the finished run first" in page

"""Tests the origin of a run and its data as it is reported to MLflow."""

import json
import os

import pytest

from flotilla.trainer import storage
from flotilla.trainer.tracking.mlflow_run import describe_dataset, describe_origin
from tests.trainer.promotion.test_lineage import git


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name in ("FLOTILLA_COMMIT", "GIT_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    # The tests' temporary folder may be inside a Git repository.
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    return tmp_path


def test_a_run_has_the_commit_of_the_current_folder(folder):
    git(folder, "init", "-b", "work")
    (folder / "a").write_text("1")
    git(folder, "add", "a")
    git(folder, "commit", "-m", "x")
    tags = describe_origin()
    assert len(tags["mlflow.source.git.commit"]) == 40
    assert tags["mlflow.source.git.branch"] == "work"
    assert tags["mlflow.source.git.dirty"] == "false"
    assert tags["mlflow.source.name"] == "flotilla"
    assert tags["mlflow.user"]
    os.utime(folder / "a", (1, 1))
    index = (folder / ".git" / "index").read_bytes()
    assert describe_origin()["mlflow.source.git.dirty"] == "false"
    # A git that was killed while it refreshes the index would leave a lock behind.
    assert (folder / ".git" / "index").read_bytes() == index
    (folder / "a").write_text("2")
    assert describe_origin()["mlflow.source.git.dirty"] == "true"


@pytest.mark.usefixtures("folder")
def test_outside_of_a_repository_there_is_no_commit_but_that_of_the_image(monkeypatch):
    assert not [name for name in describe_origin() if ".git." in name]
    monkeypatch.setenv("FLOTILLA_COMMIT", "abc")
    assert describe_origin()["mlflow.source.git.commit"] == "abc"
    monkeypatch.setenv("PATH", "")
    assert "mlflow.source.git.branch" not in describe_origin()


def test_a_dataset_has_its_digest_its_address_and_its_rows_unless_it_is_gone(tmp_path):
    uri = storage.uri_of(tmp_path / "published")
    (tmp_path / "made").mkdir()
    splits = {"train": {"examples": 8, "shards": [8]}, "test": {"examples": 2, "shards": [2]}}
    fields = {"dataset": "iris", "fingerprint": "0123456789" * 6, "splits": splits}
    storage.publish(tmp_path / "made", uri, kind="dataset", fields=fields)
    found = describe_dataset(uri)
    assert (found["name"], found["digest"]) == ("iris", "0123456789" * 3 + "012345")
    assert found["source_type"] == "local"
    assert json.loads(found["source"]) == {"uri": uri}
    profile = json.loads(found["profile"])
    assert profile == {"num_rows": 10, "num_rows_train": 8, "num_rows_test": 2}
    assert describe_dataset(storage.uri_of(tmp_path / "none")) == {}

"""Tests that the last line of an incomplete run tells how to resume it, if that is possible."""

import os
from pathlib import Path

import pytest

from flotilla.pipelines.cli import app
from flotilla.pipelines.cli.run import find_remedy
from flotilla.pipelines.runs import local
from flotilla.pipelines.runs.outcome import RunResult
from flotilla.trainer import storage
from flotilla.trainer.config.load import load_config
from flotilla.trainer.config.schema import Config


@pytest.fixture
def run(tmp_path):
    made = local.new_run(Config(), tmp_path / "my runs")
    yield made
    os.close(made.lock)


@pytest.fixture
def checkpoint(run, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    uri = storage.join(run.config.storage.root, run.run_id, "checkpoints", "step-00000010")
    storage.publish(source, uri, kind="checkpoint", fields={"global_step": 10})
    return uri


def remedy(run, pipeline="train", status="failed", exit_code=1, **given):
    options = local.RunOptions(pipeline=pipeline, workdir=run.folder.parent, **given)
    result = RunResult(status=status, exit_code=exit_code, message="x", steps=())
    return find_remedy(options, run, result)


@pytest.mark.usefixtures("checkpoint")
def test_a_failed_run_with_a_checkpoint_can_be_resumed(run):
    resume = f"--workdir '{run.folder.parent}' --resume {run.run_id}"
    assert remedy(run) == f"after fixing the error, resume with: flotilla train {resume}"
    assert remedy(run, dataset="file:///d").endswith(f"train {resume} --dataset file:///d")
    # The resumed run uses the corrected modules instead of the failing ones.
    assert remedy(run, code="mine").endswith(f"train {resume} --code mine")


INTERRUPTED = {"status": "interrupted", "exit_code": 130}


def test_without_a_checkpoint_only_interrupted_training_can_be_resumed(run):
    assert remedy(run) == ""
    assert remedy(run, **INTERRUPTED).startswith("resume with: flotilla train ")
    assert remedy(run, "prepare", **INTERRUPTED) == ""


def test_a_store_that_cannot_be_read_has_no_remedy(run, checkpoint):
    folder = storage.local_path(checkpoint).parent
    folder.rename(folder.with_name("away"))
    folder.write_text("in the way", encoding="utf-8")
    assert remedy(run) == ""


@pytest.mark.usefixtures("checkpoint")
@pytest.mark.parametrize(("status", "code"), [("blessed", 0), ("refused", 3), ("failed", 2)])
def test_a_run_that_is_over_or_was_called_wrongly_is_not_resumed(run, status, code):
    assert remedy(run, status=status, exit_code=code) == ""


def test_a_file_is_written_once_and_a_label_is_asked_for(tmp_path, monkeypatch, capsys):
    def init(*words):
        return app.call(["init", "plants.csv", *words]), capsys.readouterr().err

    monkeypatch.chdir(tmp_path)
    rows = [f"{n},{'ab'[n % 2]}" for n in range(30)]
    Path("plants.csv").write_text("\n".join(["height,kind", *rows]))
    assert init("--label", "kind")[0] == 0
    written = load_config(Path("plants.yaml"), rebases=True)
    assert isinstance(written, Config)
    assert (written.name, written.data.source) == ("plants", "plants.csv")
    assert init("--label", "kind")[0] == 0
    Path("plants.yaml").write_text("name: mine\n")
    code, said = init("--label", "kind")
    assert (code, "plants.yaml exists with different content" in said) == (2, True)
    assert Path("plants.yaml").read_text() == "name: mine\n"
    code, said = init()
    assert (code, "perhaps 'kind' (one of height, kind)" in said) == (2, True)


def test_a_run_on_files_says_which_columns_it_leaves_out(tmp_path, monkeypatch, capsys):
    result = RunResult(status="failed", exit_code=1, message="x", steps=())
    monkeypatch.setattr(local, "execute", lambda *_: result)
    monkeypatch.chdir(tmp_path)
    rows = [f"{n},Z{n},{n % 7},{'ab'[n % 2]}" for n in range(40)]
    Path("shop.csv").write_text("\n".join(["order_id,code,items,y", *rows]))
    assert app.call(["run", "shop.csv", "--label", "y"]) == 1
    assert "shop.yaml and leaves out the columns order_id, code; repeat" in capsys.readouterr().err

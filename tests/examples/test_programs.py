"""The example programs run as tasks, and resume from their checkpoint."""

import os
import sys
from pathlib import Path

import pytest

from flotilla.trainer import storage
from flotilla.trainer.checkpoints.index import list_checkpoints
from flotilla.trainer.cluster.launcher import Job
from flotilla.trainer.cluster.local import launch
from flotilla.trainer.config.load import load_config
from flotilla.trainer.data.prepare import prepare

FOLDER = Path(__file__).parents[2] / "examples/programs"
LONGEST_CONFIGURATION = 20


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_configuration_is_short_and_names_its_program(path):
    config = load_config(path)
    assert len(path.read_text().splitlines()) <= LONGEST_CONFIGURATION
    assert (FOLDER / config.program.command[1]).is_file()
    assert config.program.working_dir == "examples/programs"


# `tf1_async` is not run, because it runs the same program as `tf1_sync`, without `--sync`.
@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize(
    ("name", "runs"),
    [("single", (20, 30)), ("tf1_sync", (20,)), ("mirrored", (20,)), ("coordinator", (20,))],
)
def test_it_trains_and_goes_on_at_its_checkpoint(tmp_path, monkeypatch, name, runs):
    monkeypatch.chdir(FOLDER.parents[1])
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    config = load_config(FOLDER / f"{name}.yaml")
    uri = prepare(config.data, storage.uri_of(tmp_path / "root"), tmp_path / "scratch").uri
    checkpoints = storage.uri_of(tmp_path / "checkpoints")
    for steps in runs:
        config = load_config(FOLDER / f"{name}.yaml", [f"training.steps={steps}"])
        workdir = tmp_path / f"run-{steps}"
        launch(Job(config=config, dataset=uri, checkpoints=checkpoints, workdir=workdir))
    assert sorted(step for _, step in list_checkpoints(checkpoints))[-1] == runs[-1]
    logs = [path.read_text() for path in (tmp_path / f"run-{runs[-1]}").glob("*/log.txt")]
    if runs[1:]:
        assert any(f"begins at step {runs[0]}" in log for log in logs)

"""The programs of the examples run as tasks, and go on at the step of their checkpoint."""

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


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize("name", ["single", "tf1_async", "tf1_sync", "mirrored", "coordinator"])
def test_it_trains_and_goes_on_at_its_checkpoint(tmp_path, monkeypatch, name):
    monkeypatch.chdir(FOLDER.parents[1])
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    for steps in (40, 60):
        config = load_config(FOLDER / f"{name}.yaml", [f"training.steps={steps}"])
        uri = prepare(config.data, storage.uri_of(tmp_path / "root"), tmp_path / "scratch").uri
        checkpoints = storage.uri_of(tmp_path / "checkpoints")
        workdir = tmp_path / f"run-{steps}"
        launch(Job(config=config, dataset=uri, checkpoints=checkpoints, workdir=workdir))
    found = list_checkpoints(checkpoints)
    reached = sorted(step for _, step in found)[-1]
    # An asynchronous worker may apply one more.
    assert reached in ((60, 61) if name == "tf1_async" else (60,))
    logs = [path.read_text() for path in (tmp_path / "run-60").glob("*/log.txt")]
    if not name.startswith("tf1"):
        assert any("begins at step 40" in log for log in logs)

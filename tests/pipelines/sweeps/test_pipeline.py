"""Tests the pipeline of a sweep: its loops are bounded, and it selects and promotes one model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from flotilla.pipelines.models import list_models
from flotilla.pipelines.sweeps import SweepOptions
from flotilla.pipelines.sweeps.pipeline import compile_sweep
from flotilla.trainer.config.schema import Config
from flotilla.trainer.runtime.errors import ConfigError

ROOT = Path(__file__).parents[3]
ON_LOCAL_RUNNER = """
import sys
from pathlib import Path
from kfp import components, local

file, root = sys.argv[1:]
local.init(
    runner=local.SubprocessRunner(use_venv=False),
    pipeline_root=str(Path(root, "kfp")),
    raise_on_error=True,
)
components.load_component_from_file(file)(storage_root=Path(root).as_uri())
"""
BATCHES = ("training.steps=900", "training.batch_size=8,16,32,64,96,128,160,192,256")


def compiled(tmp_path, **named):
    options = SweepOptions(config=Config(), **{"settings": BATCHES, "parallel": 2, **named})
    sweep = compile_sweep(options, tmp_path / "sweep.yaml", "host/name:tag")
    spec, _platform = yaml.safe_load_all((tmp_path / "sweep.yaml").read_text(encoding="utf-8"))
    return sweep, spec


def tasks_of(spec):
    dags = [spec["root"]["dag"], *(c["dag"] for c in spec["components"].values() if "dag" in c)]
    return [task for dag in dags for task in dag["tasks"].values()]


def count_of(spec, name):
    return sum(task["componentRef"]["name"].startswith(f"comp-{name}") for task in tasks_of(spec))


def test_one_loop_trains_one_trial_is_promoted_and_parameters_have_their_defaults(tmp_path):
    _, spec = compiled(tmp_path)
    loops = [task for task in tasks_of(spec) if "parameterIterator" in task]
    assert [each["iteratorPolicy"]["parallelismLimit"] for each in loops] == [2]
    places = json.loads(loops[0]["parameterIterator"]["items"]["raw"])
    assert places == [str(place) for place in range(9)]
    for name in ("prepare-data", "choose-trial", "evaluate-model", "export-model"):
        assert count_of(spec, name) == 1, name
    # A previous run on the same files does not cause the trials to be skipped.
    (prepare,) = (task for task in tasks_of(spec) if "is_whole_run" in task["inputs"]["parameters"])
    assert prepare["inputs"]["parameters"]["is_whole_run"]["runtimeValue"] == {"constant": False}
    given = spec["root"]["inputDefinitions"]["parameters"]
    assert given["steps"]["defaultValue"] == 900
    assert given["image"]["defaultValue"] == "host/name:tag"
    trials = json.loads(given["sweep"]["defaultValue"])["trials"]
    assert trials[2]["settings"] == {"training.batch_size": "32"}


@pytest.mark.slow
def test_halving_is_a_loop_and_a_choice_a_rung(tmp_path):
    sweep, spec = compiled(tmp_path, halving=True)
    assert sweep.rungs == (100, 300, 900)
    loops = [task for task in tasks_of(spec) if "parameterIterator" in task]
    sizes = [len(json.loads(each["parameterIterator"]["items"]["raw"])) for each in loops]
    assert sorted(sizes) == [1, 3, 9]
    # A loop takes no output of a step, because KFP's local runner would replace it with the loop
    # item.
    for loop in loops:
        given = loop["inputs"]["parameters"].values()
        assert not any("taskOutputParameter" in each for each in given)
    assert count_of(spec, "choose-trial") == 3
    assert count_of(spec, "export-model") == 1


@pytest.mark.parametrize(
    ("named", "image", "message"),
    [
        ({}, "Bad Image", "--image"),
        ({"tpe": 3}, "a/b:c", "--tpe chooses each trial"),
        ({"auto": True}, "a/b:c", "--auto chooses each trial"),
        ({"minutes": 5.0}, "a/b:c", "--minutes applies only to sweeps on this machine"),
    ],
)
def test_what_no_pipeline_can_do_is_refused(tmp_path, named, image, message):
    options = SweepOptions(config=Config(), settings=BATCHES, **named)
    with pytest.raises(ConfigError, match=message):
        compile_sweep(options, tmp_path / "sweep.yaml", image)


@pytest.mark.long
@pytest.mark.cluster
def test_a_compiled_halving_runs_on_the_local_runner_with_a_trial_that_fails(tmp_path):
    settings = (
        "training.strategy=single",
        "training.steps=90",
        "gate.min={accuracy: 0.1}",
        "training.optimizer.learning_rate=0.01,0.003,1.e30",
    )
    options = SweepOptions(config=Config(), settings=settings, halving=True)
    compile_sweep(options, tmp_path / "sweep.yaml")
    words = ["-c", ON_LOCAL_RUNNER, tmp_path / "sweep.yaml", tmp_path]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        [sys.executable, *map(str, words)], cwd=ROOT, env={**os.environ, "PATH": path}, check=True
    )
    (file,) = tmp_path.glob("*/trials/rung-1.json")
    ended = [json.loads(each.read_text()) for each in sorted(file.parent.glob("0*.json"))]
    assert [each["status"] for each in ended] == ["done", "done", "failed"]
    (best,) = json.loads(file.read_text())
    assert [each["steps"] for each in ended[best - 1]["results"]] == [30, 90]
    (version,) = list_models(root=tmp_path.as_uri())
    assert version.champion

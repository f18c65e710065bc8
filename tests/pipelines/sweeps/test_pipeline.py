"""The pipeline of a sweep: bounded loops, one choice, one promotion."""

import json

import pytest
import yaml

from pipelines.sweeps.pipeline import compile_sweep
from pipelines.sweeps.plan import SweepOptions
from trainer.config.schema import Config
from trainer.errors import ConfigError

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
    numbers = json.loads(loops[0]["parameterIterator"]["items"]["raw"])
    assert numbers == [str(number) for number in range(1, 10)]
    for name in ("prepare-data", "choose-trial", "check-gate", "export-model", "register-model"):
        assert count_of(spec, name) == 1, name
    given = spec["root"]["inputDefinitions"]["parameters"]
    assert given["training_steps"]["defaultValue"] == 900
    assert given["image"]["defaultValue"] == "host/name:tag"
    trials = json.loads(given["sweep"]["defaultValue"])["trials"]
    assert trials[2]["settings"] == {"training.batch_size": "32"}


@pytest.mark.slow
def test_halving_is_a_loop_and_a_choice_a_rung(tmp_path):
    sweep, spec = compiled(tmp_path, halving=True)
    assert sweep.rungs == (100, 300, 900)
    loops = [task for task in tasks_of(spec) if "parameterIterator" in task]
    assert len(loops) == 3
    assert count_of(spec, "choose-trial") == 3
    assert count_of(spec, "register-model") == 1


def test_a_wrong_image_is_refused(tmp_path):
    options = SweepOptions(config=Config(), settings=BATCHES)
    with pytest.raises(ConfigError, match="--image"):
        compile_sweep(options, tmp_path / "sweep.yaml", "Bad Image")

"""The code in the how-to guides runs unchanged."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from sklearn.datasets import load_iris

from pipelines.compile import compile_components
from tests.conftest import ROOT
from tests.docs.markdown import read
from tests.pipelines.called import call
from trainer import storage
from trainer.events import StepEnd, WarmStart

GUIDES = ROOT / "docs" / "how-to"
MODULES = {"own-dataset": "flowers", "own-model": "blocks", "custom-strategy": "turns"}


def guide(name):
    return read(GUIDES / f"{name}.md", ROOT)


@pytest.fixture
def folder(tmp_path):
    """A user's folder: the files that three guides ask for, and the table of the first."""
    for name, module in MODULES.items():
        block, *_ = guide(name).of("python")
        assert f"`{module}.py`" in guide(name).prose
        (tmp_path / f"{module}.py").write_text(block.text)
    configuration, *_ = guide("own-dataset").of("yaml")
    (tmp_path / "flowers.yaml").write_text(configuration.text)
    (tmp_path / "data").mkdir()
    source = load_iris()
    with (tmp_path / "data" / "flowers.csv").open("w") as lines:
        rows = zip(source.data.tolist(), source.target, strict=True)
        names = source.target_names
        csv.writer(lines).writerows([*row, names[species]] for row, species in rows)
    return tmp_path


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.timeout(1200)
def test_own_dataset_model_and_strategy_make_a_blessed_model(folder):
    chosen = ["model.name=blocks:residual", "training.strategy=turns:TakingTurns"]
    settings = [word for each in chosen for word in ("--set", each)]
    ended = call("run", folder / "runs", "flowers.yaml", *settings, cwd=folder)
    assert ended.code == 0, ended.err
    assert ended.answer["status"] == "blessed"
    assert ended.answer["global_step"] == 400
    assert ended.answer["metrics"]["accuracy"] >= 0.9
    published = ended.events(StepEnd)[1].metrics
    counts = re.search(r"(\d+) for training, (\d+) to validate, (\d+) to test", text("own-dataset"))
    assert [published[split] for split in ("train", "validation", "test")] == [
        int(number) for number in counts.groups()
    ]


@pytest.fixture
def fine_tuned(tmp_path):
    """A user's folder with the files of the guide to fine-tuning, and what it pretrains."""
    (block,), (configuration,) = guide("fine-tuning").of("python"), guide("fine-tuning").of("yaml")
    (tmp_path / "photographs.py").write_text(block.text)
    (tmp_path / "fine-tuned.yaml").write_text(configuration.text)
    python = [sys.executable, "photographs.py"]
    subprocess.run(python, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    return tmp_path


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.timeout(1200)
def test_a_pretrained_trunk_is_fine_tuned(fine_tuned):
    settings = ["--set", "training.strategy=single", "--set", "training.steps=100"]
    ended = call("train", fine_tuned / "runs", "fine-tuned.yaml", *settings, cwd=fine_tuned)
    assert ended.code == 0, ended.err
    assert {"global_step", "handed_on_step"} <= ended.answer.keys()
    (begun,) = ended.events(WarmStart)
    lines = " ".join(text("fine-tuning").split())
    assert begun.what in lines
    assert storage.local_path(begun.uri) == fine_tuned / "pretrained.keras"
    (step,) = [each for each in ended.events(StepEnd) if each.step == "train_model"]
    assert step.metrics["warm_start"] == begun.what
    pretrained = keras.saving.load_model(fine_tuned / "pretrained.keras")
    uri = ended.answer["artifacts"]["checkpoint"]
    trained = values(uri)
    for variable in pretrained.variables:
        if variable.path.startswith("edges"):
            key = f"model/{variable.path}"
            np.testing.assert_array_equal(trained[key], variable.numpy(), err_msg=key)
    assert (trained["model/shapes/kernel"] != pretrained.get_layer("shapes").kernel.numpy()).any()


def values(uri):
    """Return the variables of a checkpoint by path."""
    reader = tf.train.load_checkpoint(str(storage.local_path(uri) / "variables"))
    return {
        key.removeprefix("variables/").partition("/")[0].replace(".S", "/"): reader.get_tensor(key)
        for key in reader.get_variable_to_shape_map()
        if key.startswith("variables/")
    }


def text(name):
    return (GUIDES / f"{name}.md").read_text(encoding="utf-8")


def test_a_pipeline_of_ones_own_is_compiled_from_a_component(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    compile_components(tmp_path / "build" / "components")
    (block,) = guide("reuse-components").of("python")
    exec(compile(block.text, "guide", "exec", dont_inherit=True), {"__name__": "guide"})
    compiled = (tmp_path / "measure-again.yaml").read_text(encoding="utf-8")
    assert "evaluate-model" in compiled
    assert os.listdir(tmp_path / "build" / "components")

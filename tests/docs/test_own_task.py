"""The task of the guide: what it measures, that it keeps to the contract, and that it trains."""

from __future__ import annotations

import importlib
import json
import sys

import numpy as np
import pytest
from sklearn.metrics import mean_pinball_loss

from tests.conftest import ROOT
from tests.docs.markdown import read
from tests.pipelines.called import call
from tests.trainer.tasks.measuring import InParts, measured, target
from trainer import storage, user_code
from trainer.config.load import load_config
from trainer.errors import ConfigError
from trainer.training import dry_run

PAGE = read(ROOT / "docs" / "how-to" / "own-task.md", ROOT)
(CODE,), (CONFIGURATION,) = PAGE.of("python"), PAGE.of("yaml")
QUANTILES = (0.1, 0.5, 0.9)
RANDOM = np.random.default_rng(0)
LABELS = RANDOM.normal(150, 80, 60).astype("float32")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A user's folder with the files of the page."""
    (tmp_path / "quantiles.py").write_text(CODE.text)
    (tmp_path / "quantiles.yaml").write_text(CONFIGURATION.text)
    monkeypatch.setenv(user_code.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "quantiles", raising=False)
    return tmp_path


@pytest.fixture
def module(folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    return importlib.import_module("quantiles")


def test_it_is_one_file_of_at_most_150_lines():
    assert len(CODE.text.splitlines()) <= 150
    assert f"of {len(CODE.text.splitlines())} lines" in " ".join(
        (ROOT / "docs/decisions/0053-a-task-says-what-is-learned.md").read_text().split()
    )


@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_it_keeps_to_the_contract(module, dtype):
    task = module.Quantiles(target(LABELS.astype(dtype)))
    assert (task.name, task.output_shape) == ("quantiles", (3,))
    dry_run.require_task(task, {})


@pytest.mark.parametrize("weighted", [False, True])
def test_metrics_are_those_of_scikit_learn(module, weighted):
    task = module.Quantiles(target(LABELS))
    outputs = RANDOM.normal(size=(len(LABELS), 3)).astype("float32")
    weights = RANDOM.uniform(size=len(LABELS)).astype("float32") if weighted else None
    found = measured(task, InParts(LABELS, outputs, weights))
    low, middle, high = np.sort(outputs * LABELS.std() + LABELS.mean(), axis=1).T
    costs = [
        mean_pinball_loss(LABELS, each, alpha=q, sample_weight=weights)
        for q, each in zip(QUANTILES, (low, middle, high), strict=True)
    ]
    inside = (low <= LABELS) & (high >= LABELS)
    assert found == pytest.approx(
        {
            # As all of Keras's losses, a mean over the examples and not over their weights.
            "loss": np.mean(costs) / LABELS.std() * (1 if weights is None else weights.mean()),
            "pinball": np.mean(costs),
            "coverage": np.average(inside, weights=weights),
            "interval_width": np.average(high - low, weights=weights),
        },
        rel=1e-4,
    )


@pytest.mark.parametrize(
    ("dtype", "quantiles", "words"),
    [
        ("bool", QUANTILES, "it takes one number an example, not 'label' (one bool)"),
        ("float32", [0.9, 0.1], "quantiles: [0.9, 0.1] have to rise, between 0 and 1"),
        ("float32", [0, 0.5], "quantiles: [0, 0.5] have to rise, between 0 and 1"),
    ],
)
def test_what_it_does_not_take_is_refused(module, dtype, quantiles, words):
    with pytest.raises(ConfigError) as caught:
        module.Quantiles(target(LABELS.astype(dtype)), quantiles=quantiles)
    assert str(caught.value) == words


def fitted(folder):
    """Try the page's run, without preparing its dataset."""
    return dry_run.fit(load_config(folder / "quantiles.yaml"), folder / "scratch")


def test_a_dry_run_takes_it(folder):
    assert fitted(folder).task == "quantiles"


@pytest.mark.parametrize(
    ("right", "wrong", "words"),
    [
        ("tf.maximum(q * missed", "tf.maximum(q * missing", "name 'missing' is not defined"),
        ("    def answers(", "    def answer(", "it does not define answers"),
        ('"pinball": "lower"', '"pinball": "less"', "that of 'pinball' is 'less'; it has to be"),
        ("len(self.quantiles),)", "2,)", "fails: "),
        ("float(label)", "label", "described() has to be plain data"),
    ],
)
def test_a_mistake_in_it_is_one_line(folder, right, wrong, words):
    assert right in CODE.text
    (folder / "quantiles.py").write_text(CODE.text.replace(right, wrong))
    with pytest.raises(ConfigError) as caught:
        fitted(folder)
    assert str(caught.value).startswith("task quantiles:Quantiles: ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def evaluation(ended):
    """Return what the evaluation of a run says."""
    uri = ended.answer["artifacts"]["evaluation"]
    return json.loads((storage.local_path(uri) / "metrics.json").read_text(encoding="utf-8"))


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.timeout(1200)
def test_a_second_run_is_compared_with_the_first(folder):
    first, second = (
        call("run", folder / "runs", "quantiles.yaml", "--set", f"training.seed={seed}", cwd=folder)
        for seed in (0, 1)
    )
    for ended in (first, second):
        assert (ended.code, ended.answer["status"]) == (0, "blessed"), ended.err
        found = evaluation(ended)
        assert ended.answer["metrics"] == found["metrics"]
        assert found["metrics"].keys() == {"loss", "pinball", "coverage", "interval_width"}
        assert [row["examples"] for row in found["slices"]["progression"]] == [22, 22, 22, 22]
        model = storage.local_path(ended.answer["artifacts"]["model"])
        parity = json.loads((model / "parity.json").read_text(encoding="utf-8"))
        assert parity["formats"].keys() == {"saved_model", "keras", "tflite"}
        card = (model / "model_card.md").read_text(encoding="utf-8")
        assert "| `q10` | float32 | (n) |" in card
        assert "### Labels below each quantile" in card
    champion = found["champion"]
    assert champion["metrics"]["pinball"] == pytest.approx(
        first.answer["metrics"]["pinball"], rel=1e-4
    )
    assert (champion["paired"]["metric"], champion["paired"]["better"]) == ("pinball", "lower")
    (report,) = (storage.local_path(second.answer["artifacts"]["report"]),)
    assert "paired bootstrap-t" in report.read_text(encoding="utf-8")

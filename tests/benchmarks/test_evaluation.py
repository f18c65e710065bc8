"""The figure of evaluations: both sides give the same figures of the same examples."""

from __future__ import annotations

import json

import pytest

from benchmarks import evaluation
from trainer import storage
from trainer.evaluate import evaluate


def test_both_sides_measure_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "EXAMPLES", 500)
    subject = evaluation.subject_of(tmp_path)
    (tmp_path / "scratch").mkdir()
    output = storage.uri_of(tmp_path / "evaluation")
    evaluate(evaluation.CONFIG, subject.dataset, subject.checkpoint, output, tmp_path / "scratch")
    ours = json.loads(storage.read_file(output, "metrics.json"))
    bare = evaluation.figures_of(subject)
    assert ours["examples"] == 500
    assert ours["metrics"]["accuracy"] == pytest.approx(bare["accuracy"])
    assert 0.4 < bare["accuracy"] < 0.7
    assert ours["metrics"]["loss"] == pytest.approx(bare["loss"], rel=1e-4)
    assert ours["metrics"]["top_3_accuracy"] == pytest.approx(bare["top_3"])
    assert ours["confusion_matrix"] == bare["confusion"].tolist()
    assert [row["roc_auc"] for row in ours["per_class"]] == pytest.approx(
        [roc for roc, _ in bare["areas"]]
    )
    assert ours["intervals"]["accuracy"] == pytest.approx(bare["interval"], abs=0.02)


def test_the_figure_has_a_ratio_for_each_round(monkeypatch):
    monkeypatch.setattr(evaluation, "EXAMPLES", 300)
    monkeypatch.setattr(evaluation, "ROUNDS", 2)
    tree = evaluation.evaluation().tree()
    pairs = tree["examples_per_second"]
    assert len(pairs) == len(tree["rounds"]) == 2
    for (own, other), ratio in zip(pairs, tree["rounds"], strict=True):
        assert ratio == pytest.approx(own / other, rel=0.02)

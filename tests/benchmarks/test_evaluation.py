"""The comparison of evaluations: both sides compute the same metrics of the same examples."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from benchmarks import evaluation
from trainer import storage
from trainer.evaluation.evaluate import evaluate


def test_both_sides_measure_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "EXAMPLES", 500)
    subject = evaluation.subject_of(tmp_path)
    (tmp_path / "scratch").mkdir()
    output = storage.uri_of(tmp_path / "evaluation")
    evaluate(evaluation.CONFIG, subject.dataset, subject.checkpoint, output, tmp_path / "scratch")
    ours = json.loads(storage.read_file(output, "metrics.json"))
    bare = evaluation.metrics_of(subject)
    assert ours["examples"] == 500
    assert ours["metrics"]["accuracy"] == pytest.approx(bare["accuracy"])
    assert 0.4 < bare["accuracy"] < 0.7
    assert ours["metrics"]["loss"] == pytest.approx(bare["loss"], rel=1e-4)
    assert ours["metrics"]["top_3_accuracy"] == pytest.approx(bare["top_3"])
    assert ours["confusion_matrix"] == bare["confusion"].tolist()
    assert [row["auc"] for row in ours["per_class"]] == pytest.approx(
        [roc for roc, _ in bare["areas"]]
    )
    assert ours["intervals"]["accuracy"] == pytest.approx(bare["interval"], abs=0.02)


def test_the_comparison_has_a_ratio_for_each_round(monkeypatch):
    now = [0.0]

    def takes(seconds):
        def pass_by(*_args):
            now[0] += seconds

        return pass_by

    monkeypatch.setattr(evaluation, "EXAMPLES", 300)
    monkeypatch.setattr(
        evaluation,
        "subject_of",
        lambda folder: SimpleNamespace(dataset="", checkpoint="", folder=folder),
    )
    monkeypatch.setattr(evaluation.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(evaluation, "evaluate", takes(3.0))
    monkeypatch.setattr(evaluation, "metrics_of", takes(1.0))
    tree = evaluation.evaluation().tree()
    assert tree["rounds"] == [pytest.approx(1 / 3, abs=1e-4)] * evaluation.ROUNDS
    assert tree["examples_per_second"] == [[100, 300]] * evaluation.ROUNDS

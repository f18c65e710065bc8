"""The step that evaluates: what it publishes, what the UI shows of it, and how it fails."""

import json

import pytest
from kfp import dsl

from components import evaluate_model, ui
from tests.components.called_steps import (
    RUN,
    artifact_in,
    evaluated,
    no_larger_files_than,
    refused,
    text_of,
)
from tests.trainer.small_run import GLOBAL_STEP, TEST_EXAMPLES, small_run
from trainer import storage

pytestmark = pytest.mark.usefixtures("emitted")


@pytest.fixture
def artifacts(tmp_path):
    kinds = (dsl.Metrics, dsl.ClassificationMetrics, dsl.ClassificationMetrics)
    return [artifact_in(tmp_path, kind) for kind in kinds]


def test_it_fills_what_the_ui_shows(run, root, emitted, tmp_path):
    uri, metrics, confusion, roc = evaluated(run, root, tmp_path)
    assert uri.startswith(storage.join(root, RUN, "evaluation", f"step-{GLOBAL_STEP:08d}-"))
    written = json.loads(storage.read_file(uri, "metrics.json"))
    assert {**written["metrics"], "uri": uri} == metrics.metadata
    assert emitted()[-1].metrics == written["metrics"]
    assert emitted()[0].inputs == {"dataset": run.dataset}
    matrix = confusion.metadata["confusionMatrix"]
    names = [each["displayName"] for each in matrix["annotationSpecs"]]
    assert names == [str(digit) for digit in range(10)]
    assert sum(sum(row["row"]) for row in matrix["rows"]) == TEST_EXAMPLES
    points = roc.metadata["confidenceMetrics"]
    assert [
        [each[key] for key in ("falsePositiveRate", "recall", "confidenceThreshold")]
        for each in points
    ] == written["roc"]
    assert (points[0]["recall"], points[-1]["recall"]) == (0, 1)


def test_a_matrix_that_is_too_large_for_the_ui_is_left_out(run, root, monkeypatch, tmp_path):
    monkeypatch.setattr(ui, "MOST_CLASSES", 9)
    uri, metrics, confusion, _ = evaluated(run, root, tmp_path)
    assert confusion.metadata == {"left_out": "10 classes are more than 9"}
    assert metrics.metadata["uri"] == uri
    assert len(json.loads(storage.read_file(uri, "metrics.json"))["confusion_matrix"]) == 10


@pytest.mark.parametrize("size", [0, 6000])
def test_a_full_disk_is_one_line(run, root, capsys, size, artifacts):
    given = (text_of(run), root, "full", run.dataset, run.checkpoint, *artifacts)
    with no_larger_files_than(size):
        code, line = refused(evaluate_model.evaluate_model.python_func, *given, capsys=capsys)
    assert (code, "File too large" in line) == (1, True)
    assert not storage.names(storage.join(root, "full"))


def test_a_second_evaluation_is_the_first(run, root, tmp_path):
    assert evaluated(run, root, tmp_path)[0] == evaluated(run, root, tmp_path)[0]


def test_a_checkpoint_that_is_not_there(run, root, capsys, artifacts):
    given = (text_of(run), root, RUN, run.dataset, f"{run.checkpoint}9", *artifacts)
    code, line = refused(evaluate_model.evaluate_model.python_func, *given, capsys=capsys)
    assert code == 1
    assert f"{run.checkpoint}9 is not published" in line


def test_a_checkpoint_that_was_made_again_is_evaluated_again(root, tmp_path):
    run = small_run(tmp_path / "run")
    first, *_ = evaluated(run, root, tmp_path)
    storage.fetch(run.checkpoint, tmp_path / "again")
    fields = storage.read_manifest(run.checkpoint).fields
    storage.delete(run.checkpoint)
    storage.publish(tmp_path / "again", run.checkpoint, kind="checkpoint", fields=fields)
    second, *_ = evaluated(run, root, tmp_path)
    assert first != second
    assert len(storage.published(storage.join(root, RUN, "evaluation"))) == 2

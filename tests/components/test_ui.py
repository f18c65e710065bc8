"""What the KFP UI is given: finite, plain, drawable, and in the form that it asks for."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from kfp import dsl

from components import ui
from components.train_model import train_model
from tests.components.called_steps import artifact_in


def test_metrics_are_plain_and_finite():
    found = {"accuracy": np.float32(0.5), "loss": float("nan"), "worst": math.inf, "examples": 3}
    scalars = ui.scalars(found)
    assert scalars == {"accuracy": 0.5, "examples": 3.0}
    assert {type(value) for value in scalars.values()} == {float}


def test_a_confusion_matrix_has_the_true_classes_as_rows(tmp_path):
    confusion = artifact_in(tmp_path, dsl.ClassificationMetrics)
    ui.log_confusion(confusion, ["cat", "dog"], np.array([[3, 1], [0, 2]]))
    matrix = confusion.metadata["confusionMatrix"]
    assert [each["displayName"] for each in matrix["annotationSpecs"]] == ["cat", "dog"]
    assert [row["row"] for row in matrix["rows"]] == [[3, 1], [0, 2]]
    # There is something at the URI that the UI shows.
    assert json.loads(Path(confusion.path).read_text(encoding="utf-8")) == confusion.metadata


def test_classes_of_one_name_keep_their_rows(tmp_path):
    confusion = artifact_in(tmp_path, dsl.ClassificationMetrics)
    ui.log_confusion(confusion, ["crane", "dog", "crane"], [[1, 0, 0], [0, 2, 0], [0, 0, 3]])
    matrix = confusion.metadata["confusionMatrix"]
    names = [each["displayName"] for each in matrix["annotationSpecs"]]
    assert names == ["crane (0)", "dog", "crane (2)"]
    assert [row["row"] for row in matrix["rows"]] == [[1, 0, 0], [0, 2, 0], [0, 0, 3]]


@pytest.mark.parametrize("classes", [ui.MOST_CLASSES, ui.MOST_CLASSES + 1])
def test_a_matrix_that_nobody_can_look_at_is_left_out(classes, tmp_path):
    confusion = artifact_in(tmp_path, dsl.ClassificationMetrics)
    labels = [str(index) for index in range(classes)]
    ui.log_confusion(confusion, labels, np.eye(classes, dtype=int))
    drawn = "confusionMatrix" in confusion.metadata
    assert drawn == (classes <= ui.MOST_CLASSES)
    assert drawn or confusion.metadata["left_out"] == "51 classes are more than 50"


def test_a_roc_curve_is_points_by_their_names(tmp_path):
    roc = artifact_in(tmp_path, dsl.ClassificationMetrics)
    ui.log_roc(roc, [[0, 0, 1], [0.25, 0.75, 0.5], [1, 1, 0]])
    assert roc.metadata["confidenceMetrics"] == [
        {"confidenceThreshold": 1.0, "recall": 0.0, "falsePositiveRate": 0.0},
        {"confidenceThreshold": 0.5, "recall": 0.75, "falsePositiveRate": 0.25},
        {"confidenceThreshold": 0.0, "recall": 1.0, "falsePositiveRate": 1.0},
    ]


def test_without_a_curve_there_is_none(tmp_path):
    roc = artifact_in(tmp_path, dsl.ClassificationMetrics)
    ui.log_roc(roc, [])
    assert roc.metadata == {"left_out": "the evaluation has no curve"}
    assert json.loads(Path(roc.path).read_text(encoding="utf-8")) == roc.metadata


def viewers_of(tmp_path, logs):
    """Return the viewers that the UI is offered, and the metadata of their artifact."""
    artifact = dsl.Artifact(uri=str(tmp_path / "deep" / "viewers"))
    ui.write_viewers(artifact, logs)
    written = json.loads(Path(artifact.path).read_text(encoding="utf-8"))
    assert written["version"] == 1
    return written["outputs"], artifact.metadata


def test_the_ui_of_a_profile_learns_of_tensorboard(tmp_path, monkeypatch):
    monkeypatch.delenv("ML_PIPELINE_SERVICE_HOST", raising=False)
    source = "gs://bucket/run/checkpoints/logs"
    (words, board), metadata = viewers_of(tmp_path, f"{source}?endpoint=http://a:1")
    assert board == {"type": "tensorboard", "source": source}
    assert metadata == {"tensorboard": source}
    assert (words["type"], words["storage"]) == ("markdown", "inline")


@pytest.mark.parametrize(
    ("logs", "command"),
    [
        ("gs://b/r/logs", "tensorboard --logdir gs://b/r/logs"),
        ("file:///r/logs", "tensorboard --logdir /r/logs"),
        ("s3://b/r/logs?region=x", "aws s3 sync s3://b/r/logs logs && tensorboard --logdir logs"),
        (
            "minio://b/r/logs",
            "aws s3 sync --endpoint-url ENDPOINT s3://b/r/logs logs && tensorboard --logdir logs",
        ),
    ],
)
def test_a_ui_without_profiles_gets_the_command_alone(tmp_path, monkeypatch, logs, command):
    # The viewer fails there with "Namespace is required", and takes the others along.
    monkeypatch.setenv("ML_PIPELINE_SERVICE_HOST", "10.0.0.7")
    [words], metadata = viewers_of(tmp_path, logs)
    assert words == {
        "type": "markdown", "storage": "inline", "source": f"TensorBoard: `{command}`",
    }  # fmt: skip
    assert metadata == {"tensorboard": logs.partition("?")[0]}


def test_the_step_that_trains_has_the_file_under_the_name_that_the_ui_looks_for():
    # Any sign that is no letter is taken for a dash.
    assert ui.VIEWERS.replace("_", "-") == "mlpipeline-ui-metadata"
    output = train_model.component_spec.outputs[ui.VIEWERS]
    assert output.type.startswith("system.Artifact")

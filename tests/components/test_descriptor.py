"""Tests the artifacts between steps: each is small, optional and matches the URI next to it."""

import json
import math
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from kfp import dsl

from flotilla.components import descriptor
from flotilla.components.train_model import train_model
from flotilla.trainer import storage
from flotilla.trainer.runtime.errors import UserError
from tests.components.called_steps import RUN, artifact_in, text_of


@pytest.fixture
def published(tmp_path):
    """Return a function that publishes a directory below the root and returns its URI."""

    def publish(text="one", name="data"):
        folder = tmp_path / f"{name}-{text}"
        folder.mkdir()
        (folder / "file").write_text(text, encoding="utf-8")
        uri = storage.uri_of(tmp_path / "root" / name)
        storage.publish(folder, uri, kind="dataset", fields={"examples": 3})
        return uri

    return publish


@pytest.fixture
def described(published, tmp_path):
    artifact, uri = artifact_in(tmp_path, dsl.Dataset), published()
    descriptor.describe(artifact, uri, {"train": 3})
    return artifact, uri


def test_it_says_where_and_what(described):
    artifact, uri = described
    assert artifact.metadata == {"uri": uri, "train": 3}
    assert json.loads(Path(artifact.path).read_text(encoding="utf-8")) == {
        "kind": "dataset",
        "uri": uri,
        "digest": storage.read_manifest(uri).digest,
        "facts": {"train": 3},
    }
    descriptor.check(artifact, uri)


def test_nothing_is_described_that_is_not_published(tmp_path):
    with pytest.raises(storage.NotPublished):
        descriptor.describe(artifact_in(tmp_path), storage.uri_of(tmp_path / "nothing"), {})


def test_another_uri_is_refused(described, published):
    artifact, uri = described
    other = published(name="other")
    with pytest.raises(UserError) as refusal:
        descriptor.check(artifact, other)
    assert str(refusal.value) == (
        f"the artifact describes the dataset {uri}, but the step received the URI {other}; pass "
        "the artifact and the URI from the same step"
    )


def test_the_same_content_again_is_the_same(described):
    artifact, uri = described
    storage.delete(uri)
    storage.publish(
        storage.local_path(uri).parents[1] / "data-one", uri, kind="dataset", fields={"examples": 3}
    )
    descriptor.check(artifact, uri)


def test_another_content_at_the_same_uri_is_refused(described, published):
    artifact, uri = described
    storage.delete(uri)
    published("two")
    with pytest.raises(UserError, match="has changed since a step published the"):
        descriptor.check(artifact, uri)


def test_a_step_alone_has_none_and_kfp_may_have_deleted_it(described):
    artifact, uri = described
    descriptor.check(None, uri)
    Path(artifact.path).unlink()
    descriptor.check(artifact, uri)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"kind": "dataset", "uri": 7, "digest": ""}', None]
)
def test_the_artifact_of_another_step_is_one_line(published, tmp_path, text):
    path = Path((artifact := artifact_in(tmp_path)).path)
    path.parent.mkdir()
    if text is None:
        path.mkdir()
    else:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match="does not describe the output of a step: pass"):
        descriptor.check(artifact, published())


@pytest.fixture
def taking(run, root, tmp_path, described):
    """Return a function that runs a step with the descriptor of the wrong artifact."""
    outputs = [artifact_in(tmp_path) for _ in range(4)]
    evaluate_outputs = (str(tmp_path / "word"), *outputs)
    steps = {
        "train_model": (run.dataset, "", "", *outputs[:2]),
        "evaluate_model": (run.dataset, run.checkpoint, *evaluate_outputs),
        "export_model": (run.dataset, run.checkpoint, run.checkpoint, "", *outputs[:2]),
    }

    def take(step, wrong):
        body = getattr(import_module(f"flotilla.components.{step}"), step).python_func
        body(text_of(run), root, RUN, *steps[step], **{f"{wrong}_descriptor": described[0]})

    return take


@pytest.mark.usefixtures("emitted")
@pytest.mark.parametrize(
    ("step", "wrong"),
    [
        ("train_model", "dataset"),
        ("evaluate_model", "dataset"),
        ("evaluate_model", "checkpoint"),
        ("export_model", "dataset"),
        ("export_model", "checkpoint"),
        ("export_model", "decision"),
    ],
)
def test_each_step_refuses_the_descriptor_of_something_else(taking, step, wrong, described, capsys):
    with pytest.raises(SystemExit):
        taking(step, wrong)
    refusal = f"flotilla: {step}: the artifact describes the dataset {described[1]}, but"
    assert capsys.readouterr().err.startswith(refusal)


def test_metrics_are_plain_and_finite():
    found = {"accuracy": np.float32(0.5), "loss": float("nan"), "worst": math.inf, "examples": 3}
    scalars = descriptor.scalars(found)
    assert scalars == {"accuracy": 0.5, "examples": 3.0}
    assert {type(value) for value in scalars.values()} == {float}


@pytest.mark.parametrize(
    ("labels", "rows", "names"),
    [
        (["cat", "dog"], [[3, 1], [0, 2]], ["cat", "dog"]),
        # Classes of one name keep their rows.
        (
            ["crane", "dog", "crane"],
            [[1, 0, 0], [0, 2, 0], [0, 0, 3]],
            ["crane (0)", "dog", "crane (2)"],
        ),
    ],
)
def test_a_confusion_matrix_has_the_true_classes_as_rows(tmp_path, labels, rows, names):
    confusion = artifact_in(tmp_path, dsl.ClassificationMetrics)
    descriptor.log_confusion(confusion, labels, np.array(rows))
    matrix = confusion.metadata["confusionMatrix"]
    assert [each["displayName"] for each in matrix["annotationSpecs"]] == names
    assert [row["row"] for row in matrix["rows"]] == rows
    assert json.loads(Path(confusion.path).read_text(encoding="utf-8")) == confusion.metadata


@pytest.mark.parametrize("classes", [descriptor.MOST_CLASSES, descriptor.MOST_CLASSES + 1])
def test_a_matrix_that_nobody_can_look_at_is_left_out(classes, tmp_path):
    confusion = artifact_in(tmp_path, dsl.ClassificationMetrics)
    labels = [str(index) for index in range(classes)]
    descriptor.log_confusion(confusion, labels, np.eye(classes, dtype=int))
    said = "the matrix has 51 classes, but the UI shows at most 50"
    left_out = None if classes <= descriptor.MOST_CLASSES else said
    assert confusion.metadata.get("left_out") == left_out
    assert ("confusionMatrix" in confusion.metadata) == (left_out is None)


def test_a_roc_curve_is_points_by_their_names(tmp_path):
    roc = artifact_in(tmp_path, dsl.ClassificationMetrics)
    descriptor.log_roc(roc, [[0, 0, 1], [0.25, 0.75, 0.5], [1, 1, 0]])
    assert roc.metadata["confidenceMetrics"] == [
        {"confidenceThreshold": 1.0, "recall": 0.0, "falsePositiveRate": 0.0},
        {"confidenceThreshold": 0.5, "recall": 0.75, "falsePositiveRate": 0.25},
        {"confidenceThreshold": 0.0, "recall": 1.0, "falsePositiveRate": 1.0},
    ]


def test_without_a_curve_there_is_none(tmp_path):
    roc = artifact_in(tmp_path, dsl.ClassificationMetrics)
    descriptor.log_roc(roc, [])
    assert roc.metadata == {"left_out": "the evaluation has no ROC curve"}
    assert json.loads(Path(roc.path).read_text(encoding="utf-8")) == roc.metadata


def viewers_of(tmp_path, logs):
    artifact = dsl.Artifact(uri=str(tmp_path / "deep" / "viewers"))
    descriptor.write_viewers(artifact, logs)
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
    # Without a namespace, the viewer fails with "Namespace is required" and breaks other viewers.
    monkeypatch.setenv("ML_PIPELINE_SERVICE_HOST", "10.0.0.7")
    [words], metadata = viewers_of(tmp_path, logs)
    assert words == {
        "type": "markdown", "storage": "inline", "source": f"TensorBoard: `{command}`",
    }  # fmt: skip
    assert metadata == {"tensorboard": logs.partition("?")[0]}


def test_the_step_that_trains_has_the_file_under_the_name_that_the_ui_looks_for():
    output = train_model.component_spec.outputs["mlpipeline_ui_metadata"]
    assert output.type.startswith("system.Artifact")

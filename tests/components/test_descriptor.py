"""What flows between steps as an artifact: small, true to the URI next to it, and not needed."""

import json
from importlib import import_module
from pathlib import Path

import pytest
from kfp import dsl

from components import check_gate, descriptor
from tests.components.called_steps import RUN, artifact_in, evaluated, refused, text_of
from trainer import storage
from trainer.errors import UserError


@pytest.fixture
def published(tmp_path):
    """Publish a directory with this content at a URI below the root; return the URI."""

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
        f"the artifact describes the dataset {uri}, and the URI next to it is {other}: "
        "take both from the same step"
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
    with pytest.raises(UserError, match="was published again, with another content, after"):
        descriptor.check(artifact, uri)


def test_a_step_alone_has_none(published):
    descriptor.check(None, published())


def test_where_kfp_has_deleted_it_the_uri_has_to_do(described):
    artifact, uri = described
    Path(artifact.path).unlink()
    descriptor.check(artifact, uri)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kind": "dataset", "uri": 7, "digest": ""}'])
def test_the_artifact_of_another_step_is_one_line(published, tmp_path, text):
    artifact = artifact_in(tmp_path)
    Path(artifact.path).parent.mkdir()
    Path(artifact.path).write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match="is no descriptor of what a step has published: take it"):
        descriptor.check(artifact, published())


def test_the_folder_of_another_step_is_one_line(published, tmp_path):
    artifact = artifact_in(tmp_path)
    Path(artifact.path).mkdir(parents=True)
    with pytest.raises(UserError, match="is no descriptor"):
        descriptor.check(artifact, published())


def test_a_file_that_cannot_be_written_is_one_line(published, tmp_path):
    (tmp_path / "kfp").write_text("a file in the place of the folder", encoding="utf-8")
    with pytest.raises(UserError, match=r"cannot write .*; free some space"):
        descriptor.describe(artifact_in(tmp_path), published(), {})


@pytest.mark.usefixtures("emitted")
def test_the_metrics_describe_the_evaluation(run, root, tmp_path, capsys):
    uri, metrics, *_ = evaluated(run, root, tmp_path)
    word = tmp_path / "decision.txt"
    given = (text_of(run, accuracy=0.1), root, RUN)
    said = check_gate.check_gate.python_func(*given, uri, str(word), artifact_in(tmp_path), metrics)
    assert said == "blessed"
    elsewhere = (*given, run.checkpoint, str(word), artifact_in(tmp_path), metrics)
    code, line = refused(check_gate.check_gate.python_func, *elsewhere, capsys=capsys)
    assert code == 1
    assert line.startswith(f"the artifact describes the evaluation {uri}, and the URI next")


@pytest.fixture
def taking(run, root, tmp_path, described):
    """Return a function that runs a step with the descriptor of something else."""
    given = (text_of(run), root, RUN)
    outputs = [artifact_in(tmp_path) for _ in range(3)]
    steps = {
        "train_model": (run.dataset, "", "", *outputs[:2]),
        "evaluate_model": (run.dataset, run.checkpoint, *outputs),
        "check_gate": (run.checkpoint, str(tmp_path / "word"), outputs[0]),
        "export_model": (run.dataset, run.checkpoint, run.checkpoint, outputs[0]),
        "register_model": (run.checkpoint, "", outputs[0]),
    }

    def take(step, wrong):
        body = getattr(import_module(f"components.{step}"), step).python_func
        body(*given, *steps[step], **{f"{wrong}_descriptor": described[0]})

    return take


@pytest.mark.usefixtures("emitted")
@pytest.mark.parametrize(
    ("step", "wrong"),
    [
        ("train_model", "dataset"),
        ("evaluate_model", "dataset"),
        ("evaluate_model", "checkpoint"),
        ("check_gate", "evaluation"),
        ("export_model", "dataset"),
        ("export_model", "checkpoint"),
        ("export_model", "decision"),
        ("register_model", "model"),
    ],
)
def test_each_step_refuses_the_descriptor_of_something_else(taking, step, wrong, described, capsys):
    with pytest.raises(SystemExit):
        taking(step, wrong)
    refusal = f"flotilla: {step}: the artifact describes the dataset {described[1]}, and the URI"
    assert capsys.readouterr().err.startswith(refusal)

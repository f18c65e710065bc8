"""Tests that the exported champion is evaluated on the challenger's examples."""

import dataclasses
import json

import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer import storage
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.evaluation.champion import load_champion
from flotilla.trainer.evaluation.evaluate import evaluate
from flotilla.trainer.evaluation.signature import describe_inputs, list_labels
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.models import registry
from flotilla.trainer.models.spec import InputSpec
from flotilla.trainer.promotion import gate
from flotilla.trainer.report.headline import CLASS_MARGIN, MARGIN
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.tasks import registry as tasks
from tests.trainer import small_run
from tests.trainer.tasks.test_multi_output import created

GATE = parse_config({"gate": {"champion": {"margin": 0.07}}}).gate

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return small_run.small_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def champion(run):
    decision = small_run.decide(run, run.root, accuracy=0.5)
    output = storage.uri_of(run.root / "model")
    return small_run.export_model(run, decision, output, run.root / "scratch").uri


def measured(run, champion, folder):
    """Evaluate a run with a champion; return the URI, the metrics and the decision."""
    (folder / "scratch").mkdir(parents=True, exist_ok=True)
    output = storage.uri_of(folder / "evaluation")
    evaluate(run.config, run.dataset, run.checkpoint, output, folder / "scratch", champion)
    config = run.config.model_copy(update={"gate": GATE})
    decision = gate.check(config, output, storage.uri_of(folder / "decision"))
    return output, json.loads(storage.read_file(output, "metrics.json")), decision


def predictions(output, name):
    return storage.local_path(output) / "predictions" / f"{name}.npy"


@pytest.fixture(scope="module")
def unchanged(run, champion, tmp_path_factory):
    return measured(run, champion, tmp_path_factory.mktemp("unchanged"))


def test_an_unchanged_model_is_blessed(champion, unchanged):
    output, text, decision = unchanged
    assert decision.blessed
    assert text["champion"]["uri"] == champion
    assert text["champion"]["metrics"]["accuracy"] == text["metrics"]["accuracy"]
    assert text["champion"]["paired"]["pairs"]["only_champion_right"] == 0
    there, here = (np.load(predictions(output, name)) for name in ("champion_output", "output"))
    np.testing.assert_allclose(there, here, atol=1e-4)


def test_a_model_that_was_made_worse_is_refused(run, champion, tmp_path):
    model = small_run.template_model(run.config, *small_run.digits())
    kernel = model.variables[0].numpy()
    model.variables[0].assign(np.roll(kernel, 1, axis=1))
    checkpoint = small_run.publish_checkpoint(tmp_path / "checkpoints", model)
    worse = dataclasses.replace(run, checkpoint=checkpoint)
    _, text, decision = measured(worse, champion, tmp_path)
    assert not decision.blessed
    assert all(f"({key})" in "".join(decision.reasons) for key in (MARGIN, CLASS_MARGIN))
    assert text["champion"]["class_counts"]["lost"] > 1
    assert text["champion"]["metrics"]["accuracy"] > text["metrics"]["accuracy"]


def test_another_champion_makes_another_evaluation(run, unchanged, tmp_path):
    output, _, _ = unchanged
    with pytest.raises(storage.Conflict):
        evaluate(run.config, run.dataset, run.checkpoint, output, tmp_path)


def test_a_champion_of_other_classes_refuses_and_is_not_asked(run, champion, tmp_path):
    images, labels = small_run.digits()
    dataset = small_run.publish_dataset(tmp_path / "dataset", (images, labels), classes=11)
    spec = InputSpec(shape=(8, 8, 1), dtype="uint8", output_shape=(11,))
    model = registry.build(run.config.model, spec, 0)
    checkpoint = small_run.publish_checkpoint(tmp_path / "checkpoints", model)
    other = dataclasses.replace(run, dataset=dataset, checkpoint=checkpoint)
    output, text, decision = measured(other, champion, tmp_path)
    assert text["champion"]["incomparable"] == "it has 10 classes, but this model has 11"
    assert not decision.blessed
    assert not predictions(output, "champion_output").exists()


def test_what_is_no_model_can_be_no_champion(run, tmp_path):
    with pytest.raises(UserError, match="is a dataset, but the champion must be a model"):
        measured(run, run.dataset, tmp_path)


def test_a_damaged_champion_is_not_asked(run, champion, tmp_path):
    copy = changed(champion, tmp_path, lambda *_: None)
    path = next(storage.local_path(copy).rglob("saved_model.pb"))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(storage.Corrupt, match=r"saved_model\.pb has"):
        measured(run, copy, tmp_path)


def changed(champion, folder, change):
    storage.fetch(champion, folder / "fetched")
    fields = storage.read_manifest(champion).fields
    change(folder / "fetched", fields["saved_model"])
    copy = storage.uri_of(folder / "copy")
    storage.publish(folder / "fetched", copy, kind="model", fields=fields)
    return copy


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"owns": None}, "it has the outputs income, city, but this model has income, city, owns"),
        ({"city": ["0", "1"]}, "it has 2 classes of city, but this model has 3"),
        ({"city": ["a", "1", "2"]}, "its class 0 of city is 'a', but in this model it is '0'"),
    ],
)
def test_a_champion_of_other_outputs_is_not_asked(run, tmp_path, change, words):
    task = created()
    spec = DatasetSpec.from_manifest(storage.read_manifest(run.dataset))
    labels = {**list_labels(task), **change}
    fields = {
        "inputs": describe_inputs(spec),
        "task": task.name,
        "labels": {name: each for name, each in labels.items() if each is not None},
    }
    uri = described(tmp_path, fields)
    assert load_champion(uri, task, spec, tmp_path).incomparable == words


def test_a_champion_of_other_labels_is_not_asked(run, champion, tmp_path):
    text = "\n".join("1023456789")
    copy = changed(champion, tmp_path, lambda at, _: (at / "labels.txt").write_text(text))
    found = load_champion(copy, *task_and_spec(run), tmp_path)
    assert found.incomparable == "its class 0 is '1', but in this model it is '0'"


def test_a_champion_whose_input_has_other_classes_is_not_asked(run, champion, tmp_path):
    fields = {**storage.read_manifest(champion).fields}
    fields["reads"] = [{**each, "labels": ["new", "old"]} for each in fields["reads"]]
    uri = described(tmp_path, fields)
    found = load_champion(uri, *task_and_spec(run), tmp_path)
    assert found.incomparable.startswith(
        "its input 'image' has other classes than the input of this"
    )


def task_and_spec(run):
    spec = DatasetSpec.from_manifest(storage.read_manifest(run.dataset))
    return tasks.make_objective(run.config, spec).task, spec


def described(folder, fields):
    """Publish an empty model with these fields."""
    (folder / "model").mkdir()
    uri = storage.uri_of(folder / "published")
    storage.publish(folder / "model", uri, kind="model", fields=fields)
    return uri


@pytest.mark.parametrize("wrong", [{"name": "other"}, {"key": "scores"}])
def test_a_champion_with_a_wrong_signature_is_named(run, champion, tmp_path, wrong):
    copy = served(champion, tmp_path, **wrong)
    with pytest.raises(UserError) as error:
        measured(run, copy, tmp_path)
    assert str(error.value).startswith(f"the champion {copy} cannot be evaluated: ")
    assert "\n" not in str(error.value)


def test_a_champion_without_finite_answers_is_not_compared(run, champion, tmp_path):
    copy = served(champion, tmp_path, value=float("nan"))
    _, text, decision = measured(run, copy, tmp_path)
    assert text["champion"]["incomparable"] == "it returns non-finite numbers for 97 of 97 examples"
    assert not decision.blessed


def served(champion, folder, *, name="serving_default", key="logits", value=0.0):
    """Publish the champion with a SavedModel that returns the same value for every example."""

    class Constant(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec((None, 8, 8, 1), tf.uint8, name="image")])
        def answer(self, image):
            return {key: tf.fill([tf.shape(image)[0], 10], value)}

    own = Constant()
    return changed(
        champion,
        folder,
        lambda at, place: tf.saved_model.save(own, str(at / place), signatures={name: own.answer}),
    )

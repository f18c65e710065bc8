"""Tests the exported model: its contents, equal outputs after loading, and failed exports."""

from __future__ import annotations

import dataclasses
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer import storage
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.schema import Config
from flotilla.trainer.export.export import make_template
from tests.trainer import small_run

# Keras's `save` converts TensorFlow tensors in a way that NumPy 2 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


SERVED = f"serving/digits/{small_run.GLOBAL_STEP}"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return small_run.small_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def blessed(run):
    return small_run.decide(run, run.root, accuracy=0.5)


@pytest.fixture(scope="module")
def exported(run, blessed):
    output = storage.uri_of(run.root / "model")
    result = small_run.export_as_in_production(run, blessed, output, run.root / "scratch")
    return result, storage.local_path(output)


def test_the_model_holds_every_form_and_what_belongs_to_it(exported):
    result, folder = exported
    manifest = storage.verify(result.uri)
    assert manifest.kind == "model"
    paths = {entry.path for entry in manifest.files}
    assert paths >= {
        "model.keras",
        "serving/digits/7/saved_model.pb",
        "model_card.md",
        "request.json",
        "kserve.yaml",
        "labels.txt",
        "config.json",
        "parity.json",
    }
    assert (folder / "labels.txt").read_text().splitlines() == list("0123456789")


def test_the_manifest_says_what_the_model_is(run, blessed, exported):
    fields = storage.read_manifest(exported[0].uri).fields
    assert fields["name"] == run.config.name
    assert fields["global_step"] == small_run.GLOBAL_STEP
    assert fields["formats"] == ["saved_model", "keras"]
    assert fields["num_labels"] == 10
    assert (fields["task"], fields["main_metric"]) == ("classification", "accuracy")
    assert fields["outputs"] == [
        {"name": name, "shape": [10], "dtype": "float32"} for name in ("logits", "probabilities")
    ]
    assert fields["decision"] == blessed
    assert fields["made_from"]["checkpoint"] == run.checkpoint
    assert fields["inputs"] == [
        {"feature": "image", "name": "image", "shape": [8, 8, 1], "dtype": "uint8"}
    ]


def test_the_configuration_of_the_run_can_be_read_back(run, exported):
    assert parse_config(json.loads((exported[1] / "config.json").read_text())) == run.config


def test_parity_was_measured_on_real_examples(exported):
    result, folder = exported
    assert json.loads((folder / "parity.json").read_text()) == result.parity
    assert result.parity["examples"] == small_run.TEST_EXAMPLES
    assert set(result.parity["formats"]) == {"saved_model", "keras"}
    for metrics in result.parity["formats"].values():
        assert metrics["tolerance"] == 1e-5
        assert 0 <= metrics["max_difference"] <= 1e-5
    assert result.parity["smoke"]["max_difference"] <= 1e-5
    assert result.parity["smoke"]["milliseconds"] > 0


def test_the_serving_signature_takes_the_feature_by_its_name(run, exported):
    signature = tf.saved_model.load(exported[1] / SERVED).signatures["serving_default"]
    (positional, named) = signature.structured_input_signature
    assert positional == ()
    assert {name: (spec.shape.as_list(), spec.dtype) for name, spec in named.items()} == {
        "image": ([None, 8, 8, 1], tf.uint8)
    }
    assert set(signature.structured_outputs) == {"logits", "probabilities"}
    answers = signature(image=tf.constant(run.images))
    np.testing.assert_allclose(answers["logits"], run.logits, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(answers["probabilities"].numpy().sum(axis=1), 1, rtol=1e-5)


def test_the_keras_form_gives_logits(run, exported):
    model = keras.models.load_model(exported[1] / "model.keras", compile=False)
    np.testing.assert_allclose(model(run.images).numpy(), run.logits, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_nothing_is_printed(run, blessed, tmp_path, capfd):
    output = storage.uri_of(tmp_path / "model")
    small_run.export_as_in_production(run, blessed, output, tmp_path / "scratch")
    assert capfd.readouterr().out == ""


def test_a_second_time_is_a_no_op(run, blessed, exported, tmp_path):
    result, _ = exported
    before = storage.read_manifest(result.uri)
    assert small_run.export_model(run, blessed, result.uri, tmp_path / "scratch") == result
    assert storage.read_manifest(result.uri) == before


@pytest.mark.slow
def test_another_checkpoint_does_not_replace_a_model(run, exported, tmp_path):
    other = small_run.publish_checkpoint(tmp_path / "checkpoints", run.model, step=8)
    later = dataclasses.replace(run, checkpoint=other)
    decision = small_run.decide(later, tmp_path, accuracy=0.5)
    with pytest.raises(storage.Conflict):
        small_run.export_model(later, decision, exported[0].uri, tmp_path / "scratch")
    assert storage.verify(exported[0].uri).fields["global_step"] == small_run.GLOBAL_STEP


@pytest.mark.slow
def test_only_the_forms_that_were_asked_for_leave(run, blessed, tmp_path):
    output = storage.uri_of(tmp_path / "model")
    only = small_run.with_formats(run, "saved_model")
    result = small_run.export_model(only, blessed, output, tmp_path / "scratch")
    assert list(result.parity["formats"]) == ["saved_model"]
    assert (storage.local_path(output) / SERVED).exists()
    assert not list(storage.local_path(output).glob("model*.keras"))


def test_a_refused_model_does_not_leave(run, tmp_path):
    refused = small_run.decide(run, tmp_path, accuracy=0.999)
    message = small_run.refused_export(run, refused, tmp_path)
    assert message.startswith("nothing is exported: the gate refused the model (Accuracy is 0.")
    assert "at least 0.999 (gate.min)" in message


def test_a_model_without_a_decision_does_not_leave(run, tmp_path):
    absent = storage.uri_of(tmp_path / "absent")
    assert absent in small_run.refused_export(run, absent, tmp_path)


def test_a_blessing_of_another_checkpoint_does_not_count(run, blessed, tmp_path):
    other = small_run.publish_checkpoint(tmp_path / "checkpoints", run.model, step=8)
    later = dataclasses.replace(run, checkpoint=other)
    assert small_run.refused_export(later, blessed, tmp_path) == (
        f"nothing is exported: {blessed} was made for another checkpoint ({run.checkpoint}); "
        f"evaluate {other} and run the gate first"
    )


def test_something_else_in_the_place_of_a_decision(run, tmp_path):
    assert small_run.refused_export(run, run.checkpoint, tmp_path) == (
        f"{run.checkpoint} is a checkpoint, not a decision: pass the decision of the gate"
    )


def test_a_decision_that_was_changed_by_hand_does_not_count(run, tmp_path):
    decision = small_run.decide(run, tmp_path, accuracy=0.999)
    path = storage.local_path(decision) / "decision.json"
    path.write_text(path.read_text().replace('"refused"', '"blessed"'))
    assert "decision.json" in small_run.refused_export(run, decision, tmp_path)


def training_of(config: Config) -> str:
    template = make_template()
    return "".join(
        template.blocks["training"](
            template.new_context({"config": config, "program": "", "step": 3})
        )
    )


def test_it_names_the_bundle_of_the_users_modules_where_there_is_one():
    uri = f"s3://team/flotilla/code/{'a' * 64}"
    assert training_of(Config(code=uri)).endswith(f"in the bundle `{uri}`.\n")
    assert "bundle" not in training_of(Config())

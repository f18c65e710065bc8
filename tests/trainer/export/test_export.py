"""Tests the exported model: its contents, equal outputs after loading, and failed exports."""

from __future__ import annotations

import dataclasses
import json
import sys
import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf
import yaml

from flotilla.trainer import storage
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.schema import Config
from flotilla.trainer.data.blocks import encode_blocks
from flotilla.trainer.data.columns import make_columns, make_table
from flotilla.trainer.evaluation.signature import SERIALIZED, SERVING
from flotilla.trainer.export.export import make_template
from flotilla.trainer.export.formats import FORMATS, SMOKE_EXAMPLES, Subject
from flotilla.trainer.models import registry
from flotilla.trainer.models.spec import InputSpec
from flotilla.trainer.report.wording import interval_text, round_value
from tests.trainer import small_run
from tests.trainer.objectives import of_classes

# Keras's `save` converts TensorFlow tensors in a way that NumPy 2 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


ALL = ("saved_model", "keras", "tflite", "tflite_int8")
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
    every = small_run.with_formats(run, *ALL)
    result = small_run.export_as_in_production(every, blessed, output, run.root / "scratch")
    return result, storage.local_path(output)


def test_the_model_holds_every_form_and_what_belongs_to_it(exported):
    result, folder = exported
    manifest = storage.verify(result.uri)
    assert manifest.kind == "model"
    paths = {entry.path for entry in manifest.files}
    assert paths >= {
        "model.keras", "serving/digits/7/saved_model.pb", "model_card.md", "request.json",
        "kserve.yaml", "labels.txt", "config.json", "parity.json",
    }  # fmt: skip
    assert (folder / "labels.txt").read_text().splitlines() == list("0123456789")


def test_the_manifest_says_what_the_model_is(run, blessed, exported):
    fields = storage.read_manifest(exported[0].uri).fields
    assert fields["name"] == run.config.name
    assert fields["global_step"] == small_run.GLOBAL_STEP
    assert fields["formats"] == list(ALL)
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
    config = small_run.with_formats(run, *ALL).config
    assert parse_config(json.loads((exported[1] / "config.json").read_text())) == config


def test_parity_was_measured_on_real_examples(exported):
    result, folder = exported
    assert json.loads((folder / "parity.json").read_text()) == result.parity
    assert result.parity["examples"] == small_run.TEST_EXAMPLES
    assert result.parity["smoke"]["max_difference"] <= 1e-5
    assert result.parity["smoke"]["milliseconds"] > 0
    formats = result.parity["formats"]
    assert list(formats) == list(ALL)
    for name, tolerance in zip(ALL, (1e-5, 1e-5, 1e-4), strict=False):
        assert formats[name]["tolerance"] == tolerance
        assert 0 <= formats[name]["max_difference"] <= tolerance
    rounded = formats["tflite_int8"]
    assert rounded["metric"] == "accuracy"
    assert rounded["original"] - rounded["value"] == pytest.approx(rounded["lost"])
    assert rounded["lost"] <= 0.0104
    assert rounded["examples"] == small_run.TEST_EXAMPLES
    assert rounded["max_difference"] > 1e-4, "it would not be rounded"


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
    every = small_run.with_formats(run, *ALL)
    assert small_run.export_model(every, blessed, result.uri, tmp_path / "scratch") == result
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


def test_a_blessing_of_another_checkpoint_does_not_count(run, blessed, tmp_path):
    other = small_run.publish_checkpoint(tmp_path / "checkpoints", run.model, step=8)
    later = dataclasses.replace(run, checkpoint=other)
    assert small_run.refused_export(later, blessed, tmp_path) == (
        f"nothing is exported: {blessed} was made for another checkpoint ({run.checkpoint}); "
        f"evaluate {other} and run the gate first"
    )


def test_what_is_no_decision_or_was_changed_by_hand_does_not_count(run, tmp_path):
    absent = storage.uri_of(tmp_path / "absent")
    assert absent in small_run.refused_export(run, absent, tmp_path)
    assert small_run.refused_export(run, run.checkpoint, tmp_path) == (
        f"{run.checkpoint} is a checkpoint, not a decision: pass the decision of the gate"
    )
    decision = small_run.decide(run, tmp_path, accuracy=0.999)
    path = storage.local_path(decision) / "decision.json"
    path.write_text(path.read_text().replace('"refused"', '"blessed"'))
    assert "decision.json" in small_run.refused_export(run, decision, tmp_path)


def training_of(config: Config) -> str:
    template = make_template()
    context = template.new_context({"config": config, "program": "", "step": 3})
    return "".join(template.blocks["training"](context))


def test_it_names_the_bundle_of_the_users_modules_where_there_is_one():
    uri = f"s3://team/flotilla/code/{'a' * 64}"
    assert training_of(Config(code=uri)).endswith(f"in the bundle `{uri}`.\n")
    assert "bundle" not in training_of(Config())


def test_eight_bits_are_smaller(exported):
    _, folder = exported
    sizes = [(folder / FORMATS[name].path).stat().st_size for name in ("tflite", "tflite_int8")]
    assert sizes[1] < sizes[0]


def test_the_saved_model_takes_serialized_examples(run, exported):
    loaded = tf.saved_model.load(exported[1] / SERVED)
    batch = {"image": run.images[:4], "label": run.labels[:4]}
    table = make_table(small_run.FEATURES, make_columns(small_run.FEATURES, batch))
    records = tf.constant(list(encode_blocks(small_run.FEATURES, table, 1)))
    answers = loaded.signatures[SERIALIZED](examples=records)
    np.testing.assert_allclose(answers["logits"], run.logits[:4], rtol=1e-4, atol=1e-5)


def test_the_request_holds_real_examples(run, exported):
    request = json.loads((exported[1] / "request.json").read_text())
    assert request["signature_name"] == "serving_default"
    assert len(request["instances"]) == SMOKE_EXAMPLES
    images = np.array([each["image"] for each in request["instances"]], np.uint8)
    assert images.shape == (3, 8, 8, 1)
    subject = Subject(model=run.model, task=of_classes(10).task, spec=None)
    assert subject.call({"image": images}).shape == (3, 10)


def test_the_card_says_what_was_measured(run, exported):
    card = (exported[1] / "model_card.md").read_text()
    measured = storage.read_json(storage.uri_of(run.root / "evaluation"), "metrics.json")
    interval = measured["intervals"]["accuracy"]
    accuracy = round_value(measured["metrics"]["accuracy"], interval)
    assert card.startswith("# digits\n")
    for words in [
        f"\ndigits: accuracy {accuracy}, constant ",
        f"| accuracy | {accuracy} | {interval_text(interval)} | 0.",
        "\nConstant: always ",
        "| input | type | shape | column |\n|---|---|---|---|\n"
        "| `image` | uint8 | (n, 8, 8, 1) | image |\n",
        "| `logits` | float32 | (n, 10) |\n| `probabilities` | float32 | (n, 10) |\n\nClasses",
        f"| test | {small_run.TEST_EXAMPLES} |",
        "## The gate: blessed",
        "| `tflite_int8` |",
        "## What is not known",
        "--model_base_path=$PWD/serving/digits",
    ]:
        assert words in card
    assert card.count("### Where it is weakest, by label") == 1


def test_a_service_for_kserve(exported):
    result, folder = exported
    service = yaml.safe_load((folder / "kserve.yaml").read_text())
    model = service["spec"]["predictor"]["model"]
    storage_uri = f"{result.uri}/serving/digits"
    assert model == {"modelFormat": {"name": "tensorflow"}, "storageUri": storage_uri}
    versions = [path.name for path in (folder / "serving" / "digits").iterdir()]
    assert versions == ["7"], "a number, and nothing next to it"


@pytest.mark.slow
@pytest.mark.parametrize(
    "altered",
    [("keras", 1e-3), ("keras", float("nan")), ("saved_model", 1e-3), ("saved_model", -np.inf)],
)
def test_a_form_that_answers_otherwise_does_not_leave(run, blessed, tmp_path, monkeypatch, altered):
    form, change = altered

    def write_other_weights(subject, path, calibration):
        weights = subject.model.get_weights()
        subject.model.set_weights([weights[0], weights[1] + change])
        genuine.write(subject, path, calibration)
        subject.model.set_weights(weights)

    genuine = FORMATS[form]
    replaced = dataclasses.replace(genuine, write=write_other_weights)
    monkeypatch.setitem(FORMATS, form, replaced)
    message = small_run.refused_export(run, blessed, tmp_path)
    assert message.startswith(
        f"nothing is exported: in the format {form}, the model's predictions for 97 test "
        "examples differ by up to "
    )


@pytest.mark.slow
@pytest.mark.parametrize("where", [(0, 0), (0, 1), (1, 0)])
def test_a_nan_is_found_wherever_it_is(run, blessed, tmp_path, monkeypatch, where):
    reader, column = where

    def read(subject, path):
        readers = genuine.read(subject, path)

        def undefined(inputs):
            answers = dict(readers[0](inputs))
            name = list(answers)[column]
            return {**answers, name: answers[name] * np.nan}

        return (readers[0],) * reader + (undefined,)

    genuine = FORMATS["saved_model"]
    monkeypatch.setitem(FORMATS, "saved_model", dataclasses.replace(genuine, read=read))
    message = small_run.refused_export(run, blessed, tmp_path)
    assert "97 test examples differ by up to nan" in message


def test_a_form_that_cannot_be_written_is_named(run, blessed, tmp_path, monkeypatch):
    def no_space(subject, path, calibration):  # noqa: ARG001
        raise OSError(28, "No space left on device", str(path))

    altered = dataclasses.replace(FORMATS["keras"], write=no_space)
    monkeypatch.setitem(FORMATS, "keras", altered)
    message = small_run.refused_export(run, blessed, tmp_path)
    assert message.startswith("the model cannot be written as keras: OSError: ")
    assert "No space left on device" in message


OWN = """
    import keras

    class Own(keras.Model):
        def __init__(self, layer):
            super().__init__()
            self.flatten = keras.layers.Flatten()
            self.dense = layer

        def call(self, x):
            return self.dense(self.flatten(keras.ops.cast(x, "float32")))

    def model(spec):
        return Own(keras.layers.Dense(*spec.output_shape))
"""


@pytest.fixture
def own_run(run, tmp_path, monkeypatch):
    """Return a run whose model class Keras cannot load from a file, and its decision."""
    (tmp_path / "own_exported.py").write_text(textwrap.dedent(OWN))
    monkeypatch.syspath_prepend(tmp_path)
    tree = {"model": {"name": "own_exported:model"}, "export": {"formats": ["saved_model"]}}
    config = parse_config(tree)
    spec = InputSpec(shape=(8, 8, 1), dtype="uint8", output_shape=(10,))
    model = registry.build(config.model, spec, 0)
    checkpoint = small_run.publish_checkpoint(tmp_path / "checkpoints", model)
    own = dataclasses.replace(run, config=config, checkpoint=checkpoint, model=model)
    yield own, small_run.decide(own, tmp_path, accuracy=0.0)
    sys.modules.pop("own_exported", None)


@pytest.mark.slow
def test_an_own_class_leaves_as_a_saved_model(own_run, tmp_path):
    output = storage.uri_of(tmp_path / "model")
    result = small_run.export_as_in_production(*own_run, output, tmp_path / "scratch")
    assert result.parity["formats"]["saved_model"]["max_difference"] <= 1e-5


def test_an_own_class_that_keras_cannot_read_back_is_named(own_run, tmp_path):
    run, blessed = own_run
    both = small_run.with_formats(run, "saved_model", "keras")
    message = small_run.refused_export(both, blessed, tmp_path)
    assert message.startswith("export.formats: the model cannot be saved as keras and loaded again")
    assert message.endswith(", or leave keras out")


@pytest.mark.slow
def test_a_model_with_convolutions_and_dropout_leaves_too(run, tmp_path):
    args = {"filters": [4], "hidden_units": [8], "dropout": 0.5}
    config = parse_config({"model": {"name": "cnn", "args": args}})
    spec = InputSpec(shape=(8, 8, 1), dtype="uint8", output_shape=(10,))
    model = registry.build(config.model, spec, 3)
    checkpoint = small_run.publish_checkpoint(tmp_path / "checkpoints", model)
    deep = dataclasses.replace(run, config=config, checkpoint=checkpoint)
    decision = small_run.decide(deep, tmp_path, accuracy=0.0)
    output = storage.uri_of(tmp_path / "model")
    result = small_run.export_model(deep, decision, output, tmp_path / "scratch")
    signature = tf.saved_model.load(tmp_path / "model/serving/digits/7").signatures[SERVING]
    expected = model(run.images, training=False).numpy()
    answers = signature(image=tf.constant(run.images))["logits"].numpy()
    np.testing.assert_allclose(answers, expected, rtol=1e-4, atol=1e-5)
    assert len(result.parity["formats"]) == 2

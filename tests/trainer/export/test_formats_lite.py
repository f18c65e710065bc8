"""TensorFlow Lite, in floats and in 8 bits, and what else an exported model comes with."""

from __future__ import annotations

import dataclasses
import json

import keras
import numpy as np
import pytest
import tensorflow as tf
import yaml

from tests.trainer import small_run
from tests.trainer.objectives import of_classes
from tests.trainer.tasks.measuring import target
from trainer import storage
from trainer.data.records import encode
from trainer.data.spec import DatasetSpec, FeatureSpec
from trainer.errors import UserError
from trainer.evaluation.signature import SERIALIZED
from trainer.export.formats import FORMATS, called
from trainer.export.parity import SMOKE_EXAMPLES, Original, answered, fresh_process, prove
from trainer.promotion import kserve
from trainer.tasks.binary_classification import BinaryClassification
from trainer.tasks.objective import Objective

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
ALL = ("saved_model", "keras", "tflite", "tflite_int8")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = small_run.small_run(tmp_path_factory.mktemp("run"))
    return small_run.with_formats(run, *ALL)


@pytest.fixture(scope="module")
def exported(run):
    decision = small_run.decide(run, run.root, accuracy=0.5)
    output = storage.uri_of(run.root / "model")
    result = small_run.export_model(run, decision, output, run.root / "scratch")
    return result, storage.local_path(output)


@pytest.fixture
def subject(run):
    spec = DatasetSpec.from_manifest(storage.read_manifest(run.dataset))
    inputs = {"image": tf.constant(run.images)}
    batch = (inputs, (inputs["image"], run.labels, None))
    objective = of_classes(10)
    return Original(
        model=run.model,
        task=objective.task,
        objective=objective,
        spec=spec,
        batches=lambda: iter([batch]),
        calibration=inputs,
    )


def test_every_form_kept_to_its_tolerance(exported):
    formats = exported[0].parity["formats"]
    assert list(formats) == list(ALL)
    for name in ("saved_model", "keras"):
        assert formats[name]["max_difference"] <= 1e-5
    assert formats["tflite"]["max_difference"] <= 1e-4
    rounded = formats["tflite_int8"]
    assert rounded["metric"] == "accuracy"
    assert rounded["original"] - rounded["value"] == pytest.approx(rounded["lost"])
    assert rounded["lost"] <= 0.0104
    assert rounded["examples"] == small_run.TEST_EXAMPLES
    assert rounded["max_difference"] > 1e-4, "it would not be rounded"


def test_eight_bits_are_smaller(exported):
    _, folder = exported
    sizes = [(folder / FORMATS[name].path).stat().st_size for name in ("tflite", "tflite_int8")]
    assert sizes[1] < sizes[0]


def test_the_saved_model_takes_serialized_examples(run, exported):
    loaded = tf.saved_model.load(exported[1] / f"serving/digits/{small_run.GLOBAL_STEP}")
    batch = {"image": run.images[:4], "label": run.labels[:4]}
    records = tf.constant(list(encode(small_run.FEATURES, batch)))
    answers = loaded.signatures[SERIALIZED](examples=records)
    np.testing.assert_allclose(answers["logits"], run.logits[:4], rtol=1e-4, atol=1e-5)


def test_a_rounded_form_that_loses_accuracy_does_not_leave(subject, tmp_path, monkeypatch):
    def turned(of, path):
        (ask,) = genuine.read(of, path)
        return (lambda inputs: {n: -v for n, v in ask(inputs).items()},)

    genuine = FORMATS["tflite_int8"]
    monkeypatch.setitem(FORMATS, "tflite_int8", dataclasses.replace(genuine, read=turned))
    with pytest.raises(UserError) as error:
        prove(subject, {"tflite_int8": "m.tflite"}, tmp_path)
    assert str(error.value).startswith("nothing is exported: as tflite_int8 the model has ")
    assert str(error.value).endswith("leave tflite_int8 out of export.formats")


def test_a_model_that_lite_cannot_hold_is_named(subject, tmp_path):
    class Impossible(keras.Model):
        def call(self, inputs):
            text = tf.strings.as_string(tf.cast(inputs, tf.int32))
            return tf.reshape(tf.strings.to_number(text), (-1, 64))[:, :10]

    unable = dataclasses.replace(subject, model=Impossible())
    with pytest.raises(UserError) as error:
        prove(unable, {"tflite": "m.tflite"}, tmp_path)
    message = str(error.value)
    assert message.startswith("the model cannot be written as tflite and read back: ")
    assert message.endswith("; leave tflite out of export.formats")
    assert "\n" not in message


@pytest.mark.slow
@pytest.mark.parametrize("layer", [keras.layers.LSTM, keras.layers.GRU])
def test_a_recurrent_layer_takes_one_example_at_a_time(subject, tmp_path, layer):
    given = keras.Input((8, 8, 1), dtype="uint8")
    rows = keras.layers.Reshape((8, 8))(keras.layers.Rescaling(1 / 16)(given))
    model = keras.Model(given, keras.layers.Dense(10)(layer(4)(rows)))
    proof = prove(dataclasses.replace(subject, model=model), {"tflite": "m.tflite"}, tmp_path)
    assert proof["formats"]["tflite"]["max_difference"] <= 1e-4


@pytest.mark.slow
class TestSmoke:
    """A fresh process, and what it finds out."""

    @pytest.fixture
    def folder(self, subject, tmp_path):
        FORMATS["saved_model"].write(subject, tmp_path / "served", None)
        return tmp_path

    def failed(self, subject, folder):
        with pytest.raises(UserError) as error, fresh_process(folder) as process:
            answered(subject, folder, "served", process)
        message = str(error.value)
        assert message.startswith("nothing is exported: a fresh process ")
        assert "\n" not in message
        return message

    def test_it_notices_other_weights(self, subject, folder):
        other = dataclasses.replace(subject, model=lambda x, training: -subject.model(x))  # noqa: ARG005
        assert "otherwise than the original" in self.failed(other, folder)

    def test_it_notices_a_truncated_file(self, subject, folder):
        path = folder / "served" / "saved_model.pb"
        path.write_bytes(path.read_bytes()[:1000])
        assert "cannot serve the model" in self.failed(subject, folder)


def test_the_request_holds_real_examples(run, exported):
    request = json.loads((exported[1] / "request.json").read_text())
    assert request["signature_name"] == "serving_default"
    assert len(request["instances"]) == SMOKE_EXAMPLES
    images = np.array([each["image"] for each in request["instances"]], np.uint8)
    assert images.shape == (3, 8, 8, 1)
    assert called(run.model, of_classes(10).task, {"image": images}).shape == (3, 10)


def test_the_card_says_what_was_measured(run, exported):
    card = (exported[1] / "model_card.md").read_text()
    measured = json.loads(
        storage.read_file(storage.uri_of(run.root / "evaluation"), "metrics.json")
    )
    low, high = measured["intervals"]["accuracy"]
    accuracy = measured["metrics"]["accuracy"]
    assert card.startswith("# digits\n")
    for words in [
        f"| accuracy | {accuracy:.4f} | {low:.4f} to {high:.4f} |",
        "| `image` | uint8 | (n, 8, 8, 1) |",
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
    assert service["kind"] == "InferenceService"
    model = service["spec"]["predictor"]["model"]
    assert model["modelFormat"] == {"name": "tensorflow"}
    assert model["storageUri"] == f"{result.uri}/serving/digits"
    versions = [path.name for path in (folder / "serving" / "digits").iterdir()]
    assert versions == ["7"], "a number, and nothing next to it"


@pytest.mark.parametrize(
    ("name", "service"), [("digits", "digits"), ("a_b.c-1", "a-b-c-1"), ("7up", "model-7up")]
)
def test_a_name_that_kubernetes_takes(name, service):
    assert kserve.service_name(name) == service


@pytest.mark.parametrize("defined", [True, False])
def test_the_loss_replaces_a_main_metric_that_is_not_defined(defined, tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 4)).astype(np.float32)
    labels = (x[:, 0] > 0).astype(int) if defined else np.zeros(64, int)
    given = keras.Input((4,), name="x")
    model = keras.Model(given, keras.layers.Dense(1)(given))
    objective = Objective(BinaryClassification(target([0, 1])))
    inputs = {"x": tf.constant(x)}
    original = Original(
        model=model,
        task=objective.task,
        objective=objective,
        spec=DatasetSpec(
            features={"x": FeatureSpec(shape=(4,), dtype="float32", stored="raw")},
            inputs=("x",),
            targets=("label",),
            shards={},
        ),
        batches=lambda: iter([(inputs, (x, labels, None))]),
        calibration=inputs,
    )
    rounded = prove(original, {"tflite_int8": "m.tflite"}, tmp_path)["formats"]["tflite_int8"]
    assert rounded["metric"] == ("auc" if defined else "loss")
    assert rounded["value"] == pytest.approx(rounded["original"], rel=0.05)

"""Tests two local runs of a user's task with two outputs and its own dataset and model."""

import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf
from ai_edge_litert.interpreter import Interpreter
from sklearn.datasets import load_digits

from flotilla.trainer import storage
from flotilla.trainer.promotion import registry
from tests.pipelines.called import call, setting

MODULE = '''
"""The upper and the lower half of a digit: which one it is, and how much ink it has."""

import keras
import numpy as np
import tensorflow_datasets as tfds
from sklearn.datasets import load_digits


class Halves(tfds.core.GeneratorBasedBuilder):
    """Digits in two halves."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        half = tfds.features.Tensor(shape=(4, 8), dtype=np.float32)
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict({
                "upper": half, "lower": half, "ink": np.float32,
                "digit": tfds.features.ClassLabel(num_classes=10),
            }),
            supervised_keys=tuple({name: name for name in names.split()}
                                  for names in ("upper lower", "digit ink")),
        )

    def _split_generators(self, dl_manager):
        parts = {"train": (0, 1437), "test": (1437, 1797)}
        return {name: self._generate_examples(*part) for name, part in parts.items()}

    def _generate_examples(self, begin, end):
        digits = load_digits()
        for index in range(begin, end):
            image = (digits.images[index] / 16).astype(np.float32)
            digit, ink = int(digits.target[index]), float(image.mean())
            yield index, {"upper": image[:4], "lower": image[4:], "digit": digit, "ink": ink}


@keras.saving.register_keras_serializable("halves")
class Share(keras.layers.Layer):
    """Scales each of its inputs by a share that is learned."""

    def build(self, shape):
        self.share = self.add_weight(shape=(shape[-1],), initializer="ones", name="share")

    def call(self, inputs):
        return inputs * keras.ops.sigmoid(self.share)


def model(spec, *, units=64):
    given = spec.symbols()
    flat = [keras.layers.Flatten(name=f"flat_{name}")(given[name]) for name in given]
    x = Share(name="share")(keras.layers.Concatenate(name="both")(flat))
    x = keras.layers.Dense(units, activation="relu", name="hidden")(x)
    outputs = {name: keras.layers.Dense(n, name=name)(x) for name, n in [("digit", 10), ("ink", 1)]}
    built = keras.Model(given, outputs)
    built.compile(
        loss={"digit": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "ink": "mse"},
        loss_weights={"digit": 1.0, "ink": 5.0},
        metrics={"digit": [keras.metrics.SparseTopKCategoricalAccuracy(2, name="first_two")]},
        weighted_metrics={"ink": [keras.metrics.LogCoshError(name="log_cosh")]},
    )
    return built
'''

HALVES_CONFIG = """
name: halves
data: {dataset: "halves:Halves", shards: 4}
task: {outputs: {digit: {class_weights: balanced}, ink: {weight: 5}}}
model: {name: "halves:model"}
training: {strategy: single, steps: 1000, checkpoint_every: 500, validate_every: 500}
gate:
  min: {digit_accuracy: 0.8, digit_first_two: 0.9}
  max: {ink_mean_absolute_error: 0.15, ink_log_cosh: 0.05}
  champion: {metric: digit_accuracy, margin: 0.04}
export: {formats: [saved_model, keras, tflite]}
"""

ACCURACY = "digit_accuracy"
ANSWERS = {"digit_logits", "digit_probabilities", "ink_prediction"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder with the user's files, from which `flotilla` is called."""
    folder = tmp_path_factory.mktemp("halves")
    (folder / "halves.py").write_text(MODULE, encoding="utf-8")
    (folder / "halves.yaml").write_text(textwrap.dedent(HALVES_CONFIG), encoding="utf-8")
    return folder


def ran(folder, **settings):
    return call("run", folder / "runs", "halves.yaml", *setting(**settings), cwd=folder)


@pytest.fixture(scope="module")
def halves_first(folder):
    called = ran(folder)
    assert called.code == 0, called.err
    return called


@pytest.fixture(scope="module")
def halves_second(folder, halves_first):
    """Run with another seed; the champion is the model of the first run.

    The first run has every export format and a baseline.
    """
    assert halves_first.answer["status"] == "blessed"
    given = {"export__formats": ["saved_model"], "evaluation__baseline": "none"}
    return ran(folder, training__seed=7, **given)


@pytest.fixture(scope="module")
def examples():
    """Return real examples from the test split, in a user's format, and their labels."""
    digits = load_digits()
    images = (digits.images[1437:] / 16).astype(np.float32)
    inputs = {"upper": images[:, :4], "lower": images[:, 4:]}
    return inputs, digits.target[1437:], images.mean(axis=(1, 2))


def served(folder, place, inputs):
    signature = tf.saved_model.load(str(folder / place)).signatures["serving_default"]
    given = {name: tf.constant(values) for name, values in inputs.items()}
    return {name: values.numpy() for name, values in signature(**given).items()}


def test_metrics_of_the_task_and_of_the_compiled_model_are_measured(halves_first):
    metrics = halves_first.answer["metrics"]
    assert {"loss", ACCURACY, "digit_first_two", "ink_log_cosh"} <= set(metrics)
    assert metrics[ACCURACY] > 0.8
    assert metrics["ink_mean_absolute_error"] < 0.15


def test_every_form_was_held_against_the_original_on_the_test_split(halves_first):
    manifest = storage.read_manifest(halves_first.answer["artifacts"]["model"])
    assert manifest.fields["formats"] == ["saved_model", "keras", "tflite"]
    assert {each["name"] for each in manifest.fields["outputs"]} == ANSWERS
    assert {each["name"] for each in manifest.fields["inputs"]} == {"upper", "lower"}
    assert manifest.fields["labels"] == {"digit": [*map(str, range(10))], "ink": []}
    parity = halves_first.read("model", "parity.json")
    assert parity["examples"] == 360
    for found in parity["formats"].values():
        assert found["max_difference"] <= found["tolerance"] <= 1e-4


def test_every_form_answers_the_same_to_a_plain_program(
    halves_first, folder, examples, monkeypatch
):
    monkeypatch.syspath_prepend(folder)
    # Importing the module registers its layer by name.
    __import__("halves")
    inputs, digit, ink = examples
    exported = halves_first.path_of("model")
    manifest = storage.read_manifest(halves_first.answer["artifacts"]["model"])
    answers = served(exported, manifest.fields["saved_model"], inputs)
    assert set(answers) == ANSWERS
    measured = halves_first.answer["metrics"]
    accuracy = (answers["digit_probabilities"].argmax(axis=1) == digit).mean()
    assert accuracy == pytest.approx(measured[ACCURACY], abs=1e-6)
    error = np.abs(answers["ink_prediction"] - ink).mean()
    assert error == pytest.approx(measured["ink_mean_absolute_error"], rel=1e-4)
    model = keras.saving.load_model(exported / "model.keras")
    given = model.predict(inputs, verbose=0)
    np.testing.assert_allclose(given["digit"], answers["digit_logits"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(given["ink"][:, 0], answers["ink_prediction"], rtol=1e-5, atol=1e-5)
    runner = Interpreter(str(exported / "model.tflite")).get_signature_runner("serving_default")
    lite = runner(**inputs)
    assert set(lite) == ANSWERS
    for name, values in answers.items():
        np.testing.assert_allclose(lite[name], values, rtol=1e-4, atol=1e-4, err_msg=name)


def test_the_second_run_is_compared_with_the_champion_and_promoted_or_refused(
    halves_first, halves_second
):
    assert halves_second.code in (0, 3), halves_second.err
    compared = halves_second.read("evaluation", "metrics.json")["champion"]
    root = storage.uri_of(halves_second.workdir)
    versions = registry.versions(root, "halves")
    assert compared["uri"] == versions[0].uri
    assert compared["metrics"][ACCURACY] == pytest.approx(halves_first.answer["metrics"][ACCURACY])
    assert (compared["paired"]["metric"], compared["paired"]["examples"]) == (ACCURACY, 360)
    decision = halves_second.read("decision", "decision.json")
    rule = next(each for each in decision["rules"] if each["key"] == "gate.champion.margin")
    found = registry.champion(root, "halves")
    assert found is not None
    assert rule["metric"] == f"{ACCURACY}_difference"
    assert rule["passed"] == (halves_second.code == 0)
    if rule["passed"]:
        assert [each.number for each in versions] == [1, 2]
        assert found.number == 2
    else:
        (line,) = decision["reasons"]
        assert line.startswith(f"{ACCURACY}_difference")
        assert line in halves_second.err
        assert [each.number for each in versions] == [1]
    assert "Traceback" not in halves_second.err

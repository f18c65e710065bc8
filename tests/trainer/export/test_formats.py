"""The forms of an exported model: parity from disk, the user's own classes, names and inputs."""

from __future__ import annotations

import dataclasses
import sys
import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.trainer import small_run
from tests.trainer.objectives import of_classes
from trainer import storage
from trainer.config.load import parse_config
from trainer.data.spec import DatasetSpec, FeatureSpec
from trainer.evaluation.signature import SERVING, serving_name
from trainer.export.formats import FORMATS, Subject
from trainer.models import registry
from trainer.models.spec import InputSpec

# Keras's `save` hands TensorFlow's tensors to NumPy 2 in the old way.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return small_run.small_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def blessed(run):
    return small_run.decide(run, run.root, accuracy=0.5)


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
        f"nothing is exported: as {form} the model's answers to 97 test examples differ by up to "
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
    """A run of a model class that Keras cannot make from a file, and its blessing."""
    (tmp_path / "own_exported.py").write_text(textwrap.dedent(OWN))
    monkeypatch.syspath_prepend(tmp_path)
    config = parse_config(
        {"model": {"name": "own_exported:model"}, "export": {"formats": ["saved_model"]}}
    )
    spec = InputSpec(shape=(8, 8, 1), dtype="uint8", output_shape=(10,))
    model = registry.build(config.model, spec, 0)
    checkpoint = small_run.publish_checkpoint(tmp_path / "checkpoints", model)
    own = dataclasses.replace(run, config=config, checkpoint=checkpoint, model=model)
    yield own, small_run.decide(own, tmp_path, accuracy=0.0)
    sys.modules.pop("own_exported", None)


@pytest.mark.slow
def test_an_own_class_leaves_as_a_saved_model(own_run, tmp_path):
    output = storage.uri_of(tmp_path / "model")
    result = small_run.export_model(*own_run, output, tmp_path / "scratch")
    assert result.parity["formats"]["saved_model"]["max_difference"] <= 1e-5


def test_an_own_class_that_keras_cannot_read_back_is_named(own_run, tmp_path):
    run, blessed = own_run
    both = small_run.with_formats(run, "saved_model", "keras")
    message = small_run.refused_export(both, blessed, tmp_path)
    assert message.startswith("the model cannot be written as keras and read back: ")
    assert message.endswith("or leave keras out of export.formats")


@pytest.mark.slow
def test_a_model_with_convolutions_and_dropout_leaves_too(run, tmp_path):
    args = {"filters": [4], "hidden_units": [8], "dropout": 0.5}
    config = parse_config({"model": {"name": "cnn", "args": args}})
    spec = InputSpec(shape=(8, 8, 1), dtype="uint8", output_shape=(10,))
    model = registry.build(config.model, spec, 3)
    checkpoint = small_run.publish_checkpoint(tmp_path / "checkpoints", model)
    deep = dataclasses.replace(run, config=config, checkpoint=checkpoint)
    decision = small_run.decide(deep, tmp_path, accuracy=0.0)
    result = small_run.export_model(
        deep, decision, storage.uri_of(tmp_path / "model"), tmp_path / "scratch"
    )
    signature = tf.saved_model.load(tmp_path / "model/serving/digits/7").signatures[SERVING]
    expected = model(run.images, training=False).numpy()
    answers = signature(image=tf.constant(run.images))["logits"].numpy()
    np.testing.assert_allclose(answers, expected, rtol=1e-4, atol=1e-5)
    assert len(result.parity["formats"]) == 2


@pytest.mark.parametrize(
    ("feature", "name"),
    [
        ("image", "image"),
        ("sepal length (cm)", "sepal_length__cm_"),
        ("image/encoded", "image_encoded"),
        ("1st", "input_1st"),
        ("Größe", "Gr__e"),
        ("_hidden", "input__hidden"),
    ],
)
def test_names_of_features_fit_a_signature(tmp_path, feature, name):
    assert serving_name(feature) == name
    spec = DatasetSpec(
        features={feature: FeatureSpec(shape=(4,), dtype="float32", stored="raw")},
        inputs=(feature,),
        targets=("label",),
        shards={},
    )
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    form = FORMATS["saved_model"]
    subject = Subject(model=model, task=of_classes(2).task, spec=spec)
    form.write(subject, tmp_path / "saved", None)
    for ask in form.read(subject, tmp_path / "saved"):
        assert ask({feature: tf.ones((3, 4))})["probabilities"].shape == (3, 2)


def test_several_inputs_are_taken_by_their_names(tmp_path):
    spec = DatasetSpec(
        features={
            "wide": FeatureSpec(shape=(3,), dtype="float32", stored="raw"),
            "age": FeatureSpec(shape=(), dtype="float32", stored="float"),
        },
        inputs=("wide", "age"),
        targets=("label",),
        shards={},
    )
    given = InputSpec.of(spec.features, spec.inputs, (2,)).symbols()
    joined = keras.layers.Concatenate()([given["wide"], keras.layers.Reshape((1,))(given["age"])])
    model = keras.Model(given, keras.layers.Dense(2)(joined))
    batch = {"wide": tf.ones((5, 3)), "age": tf.range(5, dtype=tf.float32)}
    form = FORMATS["saved_model"]
    subject = Subject(model=model, task=of_classes(2).task, spec=spec)
    form.write(subject, tmp_path / "saved", None)
    for ask in form.read(subject, tmp_path / "saved"):
        logits = ask(batch)["logits"]
        np.testing.assert_allclose(logits, model(batch).numpy(), rtol=1e-5, atol=1e-6)

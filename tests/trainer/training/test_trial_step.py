"""A step, a validation and the conversions of made-up examples, before there is a dataset."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from trainer.config.load import parse_config
from trainer.data.spec import DatasetSpec, FeatureSpec
from trainer.errors import ConfigError
from trainer.evaluation import evaluate
from trainer.tasks import registry as tasks
from trainer.training import dry_run, trial_step

SPEC = DatasetSpec(
    features={
        "image": FeatureSpec(shape=(4, 4, 1), dtype="uint8", stored="raw"),
        "word": FeatureSpec(shape=(), dtype="string", stored="bytes"),
        "user": FeatureSpec(shape=(), dtype="int64", stored="int"),
        "size": FeatureSpec(shape=(2,), dtype="float32", stored="raw"),
        "label": FeatureSpec(shape=(), dtype="int64", stored="int", num_classes=3),
        "importance": FeatureSpec(shape=(), dtype="float32", stored="float"),
    },
    inputs=("image",),
    targets=("label",),
    weight="importance",
    shards={},
)
MODULE = """
import keras
from trainer.models.spec import scaled_input

def net(spec, end=lambda x: x, kind=keras.Model, **compiled):
    given, x = scaled_input(spec)
    x = keras.layers.Flatten()(x)
    return kind(given, end(keras.layers.Dense(spec.num_classes)(x)))

def logs(spec):
    return net(spec, lambda x: keras.ops.log(0 * x))

def roots(spec):
    return net(spec, lambda x: keras.ops.sqrt(0 * x))

def huge(spec):
    return net(spec, lambda x: keras.layers.Rescaling(1e8, dtype="float16")(x))

def constant(spec):
    return net(spec, lambda x: 0 * x)

class Silent(keras.Model):
    def train_step(self, data):
        return {"d_loss": 1.0}

def silent(spec):
    return net(spec, kind=Silent)

class Broken(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return y_pred.no_such_thing

def broken(spec):
    return net(spec, kind=Broken)

class Eager(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return float(y_pred[0, 0])

def eager(spec):
    return net(spec, kind=Eager)

def compiled(spec):
    model = net(spec, keras.ops.softmax)
    model.compile(loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return model

def other_loss(spec):
    model = net(spec)
    model.compile(loss=lambda labels, outputs: outputs.no_such_thing)
    return model
"""


@pytest.fixture(autouse=True)
def _own(tmp_path, monkeypatch):
    (tmp_path / "tried_models.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.dont_write_bytecode", True)


def tried(name, **tree):
    config = parse_config(
        {"model": {"name": name}, "training": {"strategy": "single"}, "gate": {"min": {}}, **tree}
    )
    objective = tasks.objective_of(config, SPEC)
    model = evaluate.build_model(config, SPEC, objective)
    dry_run._try_out(config, SPEC, model, objective)
    return model


def test_examples_have_the_form_of_the_dataset(tmp_path):
    roles = DatasetSpec(**{**vars(SPEC), "inputs": ("image", "word", "user", "size")})
    (batch,) = trial_step.batches_of(roles, tmp_path)
    inputs, labels, weights = batch
    assert inputs["image"].shape == (2, 4, 4, 1)
    assert np.unique(inputs["image"]).size > 2
    assert inputs["word"].numpy().tolist() == [b"a", b"a"]
    assert inputs["user"].numpy().tolist() == [0, 1]
    assert 0 <= inputs["size"].numpy().min() < inputs["size"].numpy().max() <= 1
    assert (labels.numpy().tolist(), weights.numpy().tolist()) == ([0, 1], [1, 1])


@pytest.mark.parametrize("name", ["mlp", "tried_models:compiled"])
def test_a_model_that_fits_passes(name):
    tried(name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("logs", "its loss on two examples is nan: look for a logarithm, a root or a "),
        ("roots", "the gradient of dense/kernel on two examples is not finite, though "),
        ("constant", "no variable has a gradient: the loss does not depend on what the model "),
        ("silent", "its train_step returns no loss, but d_loss"),
        ("broken", "a step on two examples fails: AttributeError: "),
        ("eager", "a step on two examples fails: "),
        ("other_loss", "its loss does not fit labels and outputs: "),
    ],
)
def test_a_step_that_fails_is_refused_in_one_line(name, message):
    with pytest.raises(ConfigError) as error:
        tried(f"tried_models:{name}")
    assert str(error.value).startswith(f"model tried_models:{name}: {message}")
    assert "\n" not in str(error.value)


def test_a_loss_beyond_float16_says_so():
    training = {"strategy": "single", "mixed_precision": "float16"}
    with pytest.raises(ConfigError, match=", or for a value beyond 65504, the most of float16"):
        tried("tried_models:huge", training=training)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["tflite", "tflite_int8"])
def test_a_form_that_cannot_be_written_is_refused(form, monkeypatch):
    formats = {"export": {"formats": ["saved_model", form]}}
    tried("mlp", **formats)

    def refuse(*_args, **_kwargs):
        raise ValueError("Op type not supported")

    monkeypatch.setattr(tf.lite.TFLiteConverter, "convert", refuse)
    with pytest.raises(ConfigError) as error:
        tried("mlp", **formats)
    assert str(error.value) == (
        f"export.formats: the model cannot be written as {form}: Op type not supported; leave "
        f"{form} out"
    )

"""Whether model and dataset fit, before there is one and with one: `trainer fit`."""

from __future__ import annotations

import numpy as np
import pytest

from tests.trainer.small_run import digits, publish_dataset
from trainer.config.load import parse_config
from trainer.errors import ConfigError
from trainer.training import dry_run

MODULE = """
import keras
from trainer.models.spec import scaled_input

def net(spec, end=lambda x: x, units=8, middle="hidden", last=None):
    given, x = scaled_input(spec)
    x = end(keras.layers.Flatten()(x))
    x = keras.layers.Dense(units, name=middle)(x)
    return keras.Model(given, keras.layers.Dense(spec.num_classes, activation=last)(x))

def compiled(spec, units=8):
    model = net(spec, units=units, last="softmax")
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model

def loaded(spec, path):
    return keras.models.load_model(path)

def darkness(spec):
    return net(spec, lambda x: keras.ops.log(x))

def dictionary(spec):
    model = net(spec)
    return keras.Model(model.input, {"label": model.output})

def swish(x):
    return x * keras.ops.sigmoid(x)

def own_function(spec):
    return net(spec, keras.layers.Activation(swish, name="own"))
"""


@pytest.fixture(autouse=True)
def _own(tmp_path, monkeypatch):
    (tmp_path / "fitted_models.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.dont_write_bytecode", True)


def fitted(tmp_path, name, uri="", **args):
    model = {"name": f"fitted_models:{name}", "args": args}
    config = parse_config({"model": model, "training": {"strategy": "single"}, "gate": {"min": {}}})
    return dry_run.fit(config, tmp_path / "scratch", uri)


def test_a_compiled_model_fits(tmp_path):
    fit = fitted(tmp_path, "compiled")
    assert (fit.task, fit.parameters) == ("classification", 610)


def test_a_large_model_gets_few_values(tmp_path):
    units = 10**9
    assert fitted(tmp_path, "compiled", units=units).parameters == units * (64 + 1 + 10) + 10


def test_a_model_that_is_loaded_fits(tmp_path):
    import fitted_models  # noqa: PLC0415

    from trainer.models.spec import InputSpec  # noqa: PLC0415

    spec = InputSpec(shape=(8, 8, 1), dtype="uint8", output_shape=(10,))
    model = fitted_models.compiled(spec)
    model.optimizer.build(model.trainable_variables)
    model.save(path := tmp_path / "known.keras")
    assert fitted(tmp_path, "loaded", path=str(path)).parameters == 610


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["scaled_input", "scale", "input", "image", "label", "rescaling", "logits"]
)
def test_a_layer_may_have_any_name(tmp_path, name):
    assert fitted(tmp_path, "net", middle=name).parameters == 610


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dictionary", "its output is a dict ('label'), and the task has one output; return the"),
        (
            "own_function",
            "its layer own (Activation) cannot be written in the format keras and read back: "
            "Could not locate function 'swish': decorate swish with @keras.saving.register_keras",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(tmp_path, name, message):
    with pytest.raises(ConfigError) as error:
        fitted(tmp_path, name)
    assert str(error.value).startswith(f"model fitted_models:{name}: {message}")
    assert "\n" not in str(error.value)


def test_the_first_examples_of_a_dataset_are_tried(tmp_path):
    # No made-up byte is zero.
    images = np.full((20, 8, 8, 1), 255, np.uint8)
    labels = np.arange(20) % 10
    uri = publish_dataset(tmp_path / "dataset", (images, labels), test=0)
    assert fitted(tmp_path, "darkness", uri).parameters == 610
    images[:] = 0
    uri = publish_dataset(tmp_path / "dark", (images, labels), test=0)
    with pytest.raises(ConfigError, match="its loss on two examples is nan: look for a logarithm"):
        fitted(tmp_path, "darkness", uri)


def test_of_a_large_shard_no_example_is_fetched(tmp_path, monkeypatch):
    monkeypatch.setattr(dry_run.trial_step, "MOST_BYTES", 1)
    monkeypatch.setattr(dry_run.trial_step, "stage_shards", lambda *_, **__: pytest.fail("fetched"))
    uri = publish_dataset(tmp_path / "dataset", digits())
    assert fitted(tmp_path, "net", uri).parameters == 610

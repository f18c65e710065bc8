"""An error in the user's own model: one line that names its place, wherever it is raised."""

from __future__ import annotations

import pytest

from tests.cluster.launched import launched
from trainer import user_code
from trainer.events import AttemptBegin, Restart, UserCodeFailed

pytestmark = pytest.mark.cluster

MODULE = """
import keras
import tensorflow as tf


class Late(keras.layers.Layer):
    def __init__(self, error, **settings):
        super().__init__(**settings)
        self.error = error

    def call(self, inputs, training=False):
        if not training:
            return inputs
        if self.error == "traced":
            return self.reshaped(inputs)
        tf.debugging.assert_less(tf.reduce_sum(inputs), -1.0, message="too much")
        return inputs

    def reshaped(self, inputs):
        raise ValueError("bad shape")


def late(spec, error):
    inputs = keras.Input(spec.shape, dtype=spec.dtype)
    flat = keras.layers.Flatten()(keras.layers.Rescaling(1 / 16)(inputs))
    return keras.Model(inputs, keras.layers.Dense(spec.num_classes)(Late(error)(flat)))


def frozen(spec):
    inputs = keras.Input(spec.shape, dtype=spec.dtype)
    flat = keras.layers.Flatten()(keras.layers.Rescaling(1 / 16)(inputs))
    model = keras.Model(inputs, keras.layers.Dense(spec.num_classes)(flat))
    model.trainable = False
    return model


def never(spec):
    raise ValueError("no weights here")
"""


def line_with(text):
    return next(number for number, line in enumerate(MODULE.splitlines(), 1) if text in line)


@pytest.fixture
def fail(dataset, tmp_path, monkeypatch):
    """Train a model of the user's that fails; return the event that says so."""
    (tmp_path / "blocks.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.setenv(user_code.FOLDER_VARIABLE, str(tmp_path))

    def run(strategy, model, **args):
        settings = {
            "model": {"name": f"blocks:{model}", "args": args},
            "training": {"strategy": strategy, "steps": 50, "validate_every": 0},
            "cluster": {"workers": 1},
            # Its layer has no get_config.
            "export": {"formats": ["saved_model"]},
        }
        with launched(settings, dataset, tmp_path / "run") as run:
            code, said = run.end()
        assert run.events(Restart) == []
        (failed,) = run.events(UserCodeFailed)
        log = (tmp_path / "run" / "cluster" / "chief-0" / "log.txt").read_text(encoding="utf-8")
        assert "Traceback (most recent call last):" in log
        assert said.count("\n") == 1
        assert said.startswith(" ".join(failed.error.split()))
        assert code == 1
        return failed

    return run


@pytest.mark.slow
def test_a_function_that_raises(fail):
    failed = fail("single", "never")
    line = line_with("no weights here")
    assert failed.error == f"model blocks:never: ValueError: no weights here (blocks.py:{line})"
    assert 'raise ValueError("no weights here")' in failed.traceback


@pytest.mark.parametrize(
    "strategy",
    [
        "multi_worker_mirrored",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in (
                "single",
                "async_parameter_server",
                "sync_parameter_server",
                "in_graph",
            )
        ),
    ],
)
@pytest.mark.slow
def test_a_model_with_nothing_to_train(dataset, tmp_path, monkeypatch, strategy):
    (tmp_path / "blocks.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.setenv(user_code.FOLDER_VARIABLE, str(tmp_path))
    settings = {
        "model": {"name": "blocks:frozen"},
        "training": {"strategy": strategy, "steps": 50},
        "cluster": {"workers": 1},
    }
    with launched(settings, dataset, tmp_path / "run") as run:
        code, said = run.end()
    assert code == 1
    assert said.startswith(
        "model blocks:frozen: it has nothing to train: all of its variables are frozen, by its "
        "layers or by training.freeze ("
    )
    assert run.events(AttemptBegin) == []


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", "async_parameter_server"])
def test_a_layer_that_raises_only_while_it_is_trained(fail, strategy):
    failed = fail(strategy, "late", error="traced")
    line = line_with('ValueError("bad shape")')
    assert failed.error == (
        f"the code that it was given raised ValueError: bad shape (blocks.py:{line})"
    )
    assert "in reshaped" in failed.traceback


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", "async_parameter_server"])
def test_a_layer_whose_graph_fails_on_an_example(fail, strategy):
    failed = fail(strategy, "late", error="run")
    line = line_with("assert_less")
    assert "too much" in failed.error
    assert failed.error.endswith(f"(blocks.py:{line})")

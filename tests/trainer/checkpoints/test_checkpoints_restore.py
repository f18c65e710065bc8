"""The model of a checkpoint in a plain process, whatever the checkpoint was made by."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer import storage
from trainer.checkpoints.checkpoints import Checkpoints, restore_model
from trainer.config.optimizer import OptimizerConfig
from trainer.config.schema import ModelConfig, TrainingConfig
from trainer.errors import UserError
from trainer.models import registry
from trainer.models.spec import InputSpec
from trainer.strategies.strategy import checkpoint_variables
from trainer.training.optimizers import build_optimizer

SPEC = InputSpec(shape=(8, 8, 1), dtype="uint8", output_shape=(10,))


def model_of(name="mlp", seed=0, **args):
    return registry.build(ModelConfig(name=name, args=args), SPEC, seed)


def with_state(spec):
    return keras.Sequential(
        [
            keras.Input(spec.shape),
            keras.layers.Flatten(name="flatten"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dropout(0.5, name="dropout"),
            keras.layers.Dense(spec.num_classes, name="logits"),
        ],
        name="with_state",
    )


@pytest.fixture
def published(tmp_path):
    def publish(model, optimizer="adam"):
        settings = OptimizerConfig(name=optimizer)
        updates = build_optimizer(TrainingConfig(optimizer=settings))
        updates.build(model.trainable_variables)
        saved = Checkpoints(storage.uri_of(tmp_path / "run"), keep=3, scratch=tmp_path / "saving")
        return saved.save(checkpoint_variables(model, updates), io_device=None, fields={})

    return publish


def weights(model):
    return {variable.path: variable.numpy() for variable in model.variables}


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "muon"])
@pytest.mark.parametrize("name", ["softmax", "mlp", "cnn"])
def test_a_model_gets_its_weights_back(published, tmp_path, name, optimizer):
    trained = model_of(name, seed=1)
    uri = published(trained, optimizer)
    model = model_of(name, seed=2)
    manifest = restore_model(uri, model, tmp_path / "scratch")
    assert manifest.fields["global_step"] == 0
    expected = weights(trained)
    assert weights(model).keys() == expected.keys()
    for path, value in weights(model).items():
        np.testing.assert_array_equal(value, expected[path])


def test_state_comes_back_as_well_as_weights(published, tmp_path):
    registry.reset_uids()
    trained = with_state(SPEC)
    for number, variable in enumerate(trained.variables):
        variable.assign(tf.cast(tf.fill(variable.shape, number + 1), variable.dtype))
    uri = published(trained)
    registry.reset_uids()
    model = with_state(SPEC)
    restore_model(uri, model, tmp_path / "scratch")
    found = weights(model)
    assert any("moving_variance" in path for path in found)
    assert any("seed" in path for path in found)
    for path, value in weights(trained).items():
        np.testing.assert_array_equal(found[path], value)


def test_it_may_be_read_again_into_the_same_folder(published, tmp_path):
    first = published(model_of(seed=1))
    (tmp_path / "run").rename(tmp_path / "first")
    first = first.replace("/run/", "/first/")
    second = published(model_of(seed=2))
    model = model_of(seed=3)
    for uri, seed in ((first, 1), (second, 2), (first, 1)):
        restore_model(uri, model, tmp_path / "scratch")
        np.testing.assert_array_equal(model.get_weights()[0], model_of(seed=seed).get_weights()[0])


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"hidden_units": [50]}, "hidden_0/kernel is float32 [64, 100] there and float32 [64, 50]"),
        ({"hidden_units": [100, 100]}, "(it has no model/hidden_1/kernel)"),
        ({"name": "cnn"}, "(it has no model/convolution_0/kernel)"),
    ],
)
def test_another_model_does_not_fit(published, tmp_path, other, said):
    uri = published(model_of())
    with pytest.raises(UserError) as caught:
        restore_model(uri, model_of(**{"name": "mlp", **other}), tmp_path / "scratch")
    message = str(caught.value)
    assert message.startswith(f"the checkpoint {uri} does not fit model and optimizer of the conf")
    assert said in message
    assert len(message.splitlines()) == 1


def test_what_is_no_checkpoint_is_refused(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    uri = storage.uri_of(tmp_path / "data")
    storage.publish(source, uri, kind="dataset")
    with pytest.raises(UserError, match=f"{uri} is of kind 'dataset' and not a checkpoint"):
        restore_model(uri, model_of(), tmp_path / "scratch")
    with pytest.raises(UserError, match="is not published"):
        restore_model(storage.uri_of(tmp_path / "absent"), model_of(), tmp_path / "scratch")


def test_a_damaged_one_is_refused(published, tmp_path):
    uri = published(model_of())
    (storage.local_path(uri) / "variables.index").write_bytes(b"")
    with pytest.raises(UserError, match=r"is damaged: variables\.index has 0 bytes"):
        restore_model(uri, model_of(), tmp_path / "scratch")

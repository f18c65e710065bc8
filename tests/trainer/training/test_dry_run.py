"""What is configured and cannot be done with the model is refused before training."""

from __future__ import annotations

import keras
import pytest

from tests.trainer.objectives import of_classes
from trainer.config.load import parse_config
from trainer.errors import ConfigError
from trainer.training import dry_run


class Kept(keras.layers.Layer):
    """A layer that cannot be read back."""

    def __init__(self, function, **settings):
        super().__init__(**settings)
        self.function = function

    def call(self, inputs):
        return self.function(inputs)


def net(*layers, trainable=True):
    inputs = keras.layers.Input((4,))
    model = keras.Sequential([inputs, *layers, keras.layers.Dense(3, name="logits")])
    model.trainable = trainable
    return model


def frozen():
    """Freeze each layer, as `include_top` models are used, and not the model."""
    model = net()
    for layer in model.layers:
        layer.trainable = False
    return model


MODELS = {
    "plain": net,
    "frozen": lambda: net(trainable=False),
    "frozen layers": frozen,
    "without variables": lambda: keras.Sequential([keras.layers.Input((3,))]),
    "lambda": lambda: net(keras.layers.Lambda(lambda x: x / 2, name="half")),
    "own": lambda: net(Kept(keras.ops.relu, name="kept")),
}
SAVED_ALONE = {"export": {"formats": ["saved_model"]}}
SERVERS = {"parameter_servers": 2}


def require(config, model):
    """Check a model as the chief does, without what its task says."""
    dry_run.require(config, model, of_classes(3))


def configured(tree):
    return parse_config({"model": {"name": "some:model"}, "gate": {"min": {}}, **tree})


@pytest.mark.parametrize(
    ("model", "tree", "message"),
    [
        ("frozen", {}, "it has nothing to train: all of its variables are frozen"),
        ("frozen layers", SAVED_ALONE, "it has nothing to train: all of its variables are frozen"),
        ("without variables", {}, "it has nothing to train: it has no variables"),
        ("lambda", {}, "its layer half (Lambda) cannot be written in the format keras and read "),
        ("own", {}, "its layer kept (Kept) cannot be written in the format keras and read back: "),
    ],
)
def test_a_model_that_cannot_be_trained_or_exported_is_refused(model, tree, message):
    with pytest.raises(ConfigError) as error:
        require(configured(tree), MODELS[model]())
    assert str(error.value).startswith(f"model some:model: {message}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("model", ["lambda", "own"])
def test_without_the_format_keras_nothing_has_to_be_read_back(model):
    require(configured(SAVED_ALONE), MODELS[model]())


def test_a_glob_that_fits_no_variable_is_refused():
    tree = {"cluster": {**SERVERS, "placement": {"hidden/*": "ps:1"}}}
    model = net()
    with pytest.raises(ConfigError, match=r"^cluster.placement: 'hidden/\*' fits no variable"):
        require(configured(tree), model)
    require(configured({**tree, "training": {"strategy": "single"}}), model)


def test_a_model_that_fits_is_left_as_it_is():
    model = net()
    before = [variable.path for variable in model.variables]
    tree = {"cluster": {**SERVERS, "placement": {before[0]: "ps:1"}}}
    require(configured(tree), model)
    assert [variable.path for variable in model.variables] == before


def test_a_glob_of_a_warm_start_that_fits_nothing_is_refused():
    warm_start = {"from": "gs://b/c", "exclude": ["logit/*"]}
    with pytest.raises(ConfigError, match=r"^training.warm_start.exclude: 'logit/\*' fits no var"):
        require(configured({"training": {"warm_start": warm_start}}), net())


class Strange(keras.layers.Layer):
    """A layer that only the module that it is in knows."""

    def call(self, inputs):
        return inputs


def test_a_layer_that_is_not_registered_is_refused_with_the_remedy():
    with pytest.raises(ConfigError) as error:
        require(configured({}), net(Strange(name="odd")))
    assert str(error.value) == (
        "model some:model: its layer odd (Strange) cannot be written in the format keras and read "
        "back: Could not locate class 'Strange': decorate Strange with "
        "@keras.saving.register_keras_serializable(), or leave keras out of export.formats"
    )


class Stepped(keras.Model):
    """Applies its updates."""

    def __init__(self, *args, own=None, **settings):
        super().__init__(*args, **settings)
        self.own = own

    def train_step(self, data):
        return super().train_step(data)


def stepped(own=None):
    inputs = keras.Input((4,))
    return Stepped(inputs, keras.layers.Dense(3)(inputs), own=own)


@pytest.mark.parametrize("strategy", ["single", "multi_worker_mirrored"])
def test_a_train_step_of_the_models_own_is_run_by(strategy):
    require(configured({"training": {"strategy": strategy}, **SAVED_ALONE}), stepped())


@pytest.mark.parametrize(
    ("training", "own", "message"),
    [
        (
            {"strategy": "in_graph"},
            None,
            "model some:model: it has a train_step of its own, which single and "
            "multi_worker_mirrored run, and not training.strategy in_graph: ",
        ),
        ({}, None, "model some:model: it has a train_step of its own, which single and multi_work"),
        (
            {"strategy": "single", "jit_compile": True},
            None,
            "training.jit_compile: model some:model has a train_step of its own, which runs as it ",
        ),
        (
            {"strategy": "single"},
            keras.optimizers.SGD,
            "model some:model: its train_step has an optimizer of its own (own), which no checkpo",
        ),
    ],
)
def test_a_train_step_of_the_models_own_is_refused_where_it_cannot_run(training, own, message):
    with pytest.raises(ConfigError) as error:
        # That it is not registered either is said after it.
        require(configured({"training": training}), stepped(own and own()))
    assert str(error.value).startswith(message)


def accepted(**compiled):
    model = net()
    model.compile(**compiled)
    objective = of_classes(3)
    objective.accept(model, model(keras.Input((4,))))
    return model, objective


def test_xla_that_only_the_model_asks_for_is_refused():
    model, objective = accepted(jit_compile=True)
    with pytest.raises(ConfigError, match=r"it is compiled with jit_compile=True, and training.ji"):
        dry_run.require(configured({}), model, objective)
    dry_run.require(configured({"training": {"jit_compile": True}}), model, objective)


def test_an_optimizer_that_is_not_used_is_named(caplog):
    caplog.set_level("INFO")
    dry_run.require(configured({}), *accepted(optimizer=keras.optimizers.Lamb()))
    assert (
        "the optimizer Lamb that the model is compiled with is not used: training.optimizer "
        in (caplog.text)
    )


def test_a_metric_that_nothing_measures_is_refused():
    tree = {"gate": {"min": {"accuracy": 0.5, "accuracy@label": 0.1}}}
    require(configured(tree), net())
    for gate, key in (
        ({"max": {"acuracy": 1}}, "max"),
        ({"champion": {"metric": "acuracy"}}, "cha"),
    ):
        with pytest.raises(ConfigError, match=rf"^gate\.{key}.*'acuracy'; did you mean 'accuracy'"):
            dry_run.require(configured({"gate": gate}), net(), of_classes(3))
    objective = of_classes(3)
    objective.task.directions = {"loss": "lower", "r2_score": "higher"}
    with pytest.raises(ConfigError) as error:
        dry_run.require(configured(tree), net(), objective)
    assert str(error.value) == (
        "gate.min.accuracy: classification and the model measure no 'accuracy' (measured: "
        "loss, r2_score)"
    )


def test_xla_is_refused_for_inputs_of_any_length():
    given = keras.Input((None,), dtype="int64", name="tokens")
    pooled = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(9, 4)(given))
    model = keras.Model(given, keras.layers.Dense(3)(pooled))
    config = configured({"training": {"jit_compile": True}, "export": {"formats": ["saved_model"]}})
    with pytest.raises(ConfigError, match=r"jit_compile: the input tokens varies in length"):
        dry_run.require(config, model, of_classes(3))

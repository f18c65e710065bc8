"""Tests that models, tasks, datasets and tables that cannot be trained are rejected beforehand."""

import sys
from contextlib import nullcontext
from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer.config.load import parse_config
from flotilla.trainer.evaluation import evaluate
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.models.spec import InputSpec
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.tasks import registry
from flotilla.trainer.training import dry_run
from tests.trainer.objectives import of_classes
from tests.trainer.small_run import digits, publish_dataset
from tests.trainer.training import own_models

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


@pytest.fixture(autouse=True)
def _own_models(monkeypatch):
    monkeypatch.setitem(sys.modules, "own_models", own_models)


class Kept(keras.layers.Layer):
    """A layer without `get_config`, which Keras cannot load from a file."""

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
    """Freeze each layer but not the model, as users of `include_top` do."""
    model = net()
    for layer in model.layers:
        layer.trainable = False
    return model


MODELS = {
    "frozen": lambda: net(trainable=False),
    "frozen layers": frozen,
    "without variables": lambda: keras.Sequential([keras.layers.Input((3,))]),
    "lambda": lambda: net(keras.layers.Lambda(lambda x: x / 2, name="half")),
    "own": lambda: net(Kept(keras.ops.relu, name="kept")),
}
SAVED_ALONE = {"export": {"formats": ["saved_model"]}}
SERVERS = {"parameter_servers": 2}


def require(config, model):
    """Check a model as the chief does, but with a fixed objective."""
    dry_run.require(config, model, of_classes(3))


def configured(tree):
    return parse_config({"model": {"name": "some:model"}, "gate": {"min": {}}, **tree})


@pytest.mark.parametrize(
    ("model", "tree", "message"),
    [
        ("frozen", {}, "nothing can be trained, because all variables are frozen, by"),
        ("frozen layers", SAVED_ALONE,
         "nothing can be trained, because all variables are frozen, by"),
        ("without variables", {}, "nothing can be trained, because the model has no"),
        ("lambda", {}, "layer half (Lambda) cannot be saved as .keras and loaded "),
        ("own", {}, "layer kept (Kept) cannot be saved as .keras and loaded again: "),
    ],
)  # fmt: skip
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
    with pytest.raises(ConfigError, match=r"^cluster.placement: 'hidden/\*' matches no variable"):
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
    with pytest.raises(
        ConfigError, match=r"^training.warm_start.exclude: 'logit/\*' matches no var"
    ):
        require(configured({"training": {"warm_start": warm_start}}), net())


class Strange(keras.layers.Layer):
    """A layer that is known only in this module."""

    def call(self, inputs):
        return inputs


def test_a_layer_that_is_not_registered_is_refused_with_the_remedy():
    with pytest.raises(ConfigError) as error:
        require(configured({}), net(Strange(name="odd")))
    assert str(error.value) == (
        "model some:model: layer odd (Strange) cannot be saved as .keras and loaded "
        "again: Could not locate class 'Strange'; decorate Strange with "
        "@keras.saving.register_keras_serializable(), or leave keras out of export.formats"
    )


class Stepped(keras.Model):
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
        ({"strategy": "in_graph"}, None,
         "model some:model has a custom train_step, which training.strategy in_graph cannot run"
         "; use single or multi_worker_mirrored, or "),
        ({}, None, "model some:model has a custom train_step, which training.strategy "),
        ({"strategy": "single", "jit_compile": True}, None,
         "training.jit_compile: model some:model has a custom train_step, which runs without "
         "XLA; "),
        ({"strategy": "single"}, keras.optimizers.SGD,
         "model some:model: its train_step has a separate optimizer (own), which no checkpo"),
    ],
)  # fmt: skip
def test_a_train_step_of_the_models_own_is_refused_where_it_cannot_run(training, own, message):
    with pytest.raises(ConfigError) as error:
        # This error is reported instead of the missing registration.
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
    with pytest.raises(ConfigError, match=r"is compiled with jit_compile=True, but training.jit"):
        dry_run.require(configured({}), model, objective)
    dry_run.require(configured({"training": {"jit_compile": True}}), model, objective)


def test_an_optimizer_that_is_not_used_is_named(caplog):
    caplog.set_level("INFO")
    dry_run.require(configured({}), *accepted(optimizer=keras.optimizers.Lamb()))
    assert "ignoring the optimizer Lamb of the compiled model, because training" in caplog.text


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
        "gate.min.accuracy: classification and the model do not measure 'accuracy' (measured: "
        "loss, r2_score)"
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("acuracy",
         "classification and the model do not measure 'acuracy'; did you mean 'accuracy'?"),
        ("accuracy@label=2", "classification and the model do not measure 'accuracy@label=2'"),
        ("share", "cannot tell which value of 'share' is better; set gate"),
        ("accuracy", ""),
    ],
)  # fmt: skip
def test_a_main_metric_has_to_be_measured_and_to_have_a_direction(name, words):
    objective = of_classes(3)
    objective.task.directions = {**objective.task.directions, "share": None}
    config = configured({"task": {"main_metric": name}})
    with pytest.raises(ConfigError) if words else nullcontext() as error:
        dry_run.require(config, net(), objective)
    assert not words or str(error.value).startswith(f"task.main_metric: {words}")


def test_xla_is_refused_for_inputs_of_any_length():
    given = keras.Input((None,), dtype="int64", name="tokens")
    pooled = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(9, 4)(given))
    model = keras.Model(given, keras.layers.Dense(3)(pooled))
    config = configured({"training": {"jit_compile": True}, "export": {"formats": ["saved_model"]}})
    with pytest.raises(ConfigError, match=r"jit_compile: the input tokens varies in length"):
        dry_run.require(config, model, of_classes(3))


def tried(name, **tree):
    config = parse_config(
        {"model": {"name": name}, "training": {"strategy": "single"}, "gate": {"min": {}}, **tree}
    )
    objective = registry.make_objective(config, SPEC)
    model = evaluate.build_model(config, SPEC, objective)
    dry_run._try_out(config, SPEC, model, objective)
    return model


def test_examples_have_the_form_of_the_dataset(tmp_path):
    roles = DatasetSpec(**{**vars(SPEC), "inputs": ("image", "word", "user", "size")})
    (batch,) = dry_run.make_batch(roles, tmp_path)
    inputs, labels, weights = batch
    assert inputs["image"].shape == (2, 4, 4, 1)
    assert np.unique(inputs["image"]).size > 2
    assert inputs["word"].numpy().tolist() == [b"a", b"a"]
    assert inputs["user"].numpy().tolist() == [0, 1]
    assert 0 <= inputs["size"].numpy().min() < inputs["size"].numpy().max() <= 1
    assert (labels.numpy().tolist(), weights.numpy().tolist()) == ([0, 1], [1, 1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("logs", "its loss on a few examples is nan: look for a logarithm, a root or a norm "),
        ("roots", "the gradient of dense/kernel on a few examples is not finite, although "),
        ("constant", "no variable has a gradient: the loss does not depend on what the model "),
        ("silent", "its train_step must return a loss, but it returns d_loss"),
        ("broken", "a step on a few examples failed: AttributeError: "),
        ("eager", "a step on a few examples failed: "),
        ("other_loss", "the loss does not fit the labels and outputs: "),
    ],
)
def test_a_step_that_fails_is_refused_in_one_line(name, message):
    with pytest.raises(ConfigError) as error:
        tried(f"own_models:{name}")
    assert str(error.value).startswith(f"model own_models:{name}: {message}")
    assert "\n" not in str(error.value)


def test_a_loss_beyond_float16_says_so():
    training = {"strategy": "single", "mixed_precision": "float16"}
    with pytest.raises(ConfigError, match=", or for a value beyond 65504, the largest float16"):
        tried("own_models:huge", training=training)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["tflite", "tflite_int8"])
def test_a_form_that_cannot_be_written_is_refused(form, monkeypatch):
    formats = {"export": {"formats": ["saved_model", form]}}
    tried("mlp", **formats)

    def refuse(*_args, **_kwargs):
        raise ValueError("Op type not supported")

    monkeypatch.setattr(tf.lite.TFLiteConverter, "from_saved_model", refuse)
    with pytest.raises(ConfigError) as error:
        tried("mlp", **formats)
    message = str(error.value)
    assert message.startswith(f"export.formats: the model cannot be saved as {form} and loaded ")
    assert "ValueError: Op type not supported" in message
    assert message.endswith(f"; leave {form} out")


def fitted(tmp_path, name, uri="", **args):
    model = {"name": f"own_models:{name}", "args": args}
    config = parse_config({"model": model, "training": {"strategy": "single"}, "gate": {"min": {}}})
    return dry_run.fit(config, tmp_path / "scratch", uri)


def test_a_compiled_a_large_and_a_loaded_model_fit(tmp_path):
    fit = fitted(tmp_path, "trained")
    assert (fit.task, fit.parameters) == ("classification", 610)
    # A large model gets few values.
    units = 10**9
    assert fitted(tmp_path, "trained", units=units).parameters == units * (64 + 1 + 10) + 10
    model = own_models.trained(InputSpec(shape=(8, 8, 1), dtype="uint8", output_shape=(10,)))
    model.optimizer.build(model.trainable_variables)
    model.save(path := tmp_path / "known.keras")
    assert fitted(tmp_path, "loaded", path=str(path)).parameters == 610


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        ("async_parameter_server", "0.01 GB, more than the memory limit of ps (2 x 4Mi); raise"),
        ("multi_worker_mirrored", "0.01 GB, more than the memory limit of worker (1 x 4Mi); "),
        ("single", ""),
    ],
)
def test_variables_beyond_the_memory_of_pods_are_refused(strategy, said):
    limits = {"resources": {"limits": {"memory": "4Mi"}}}
    pods = {"ps": limits, "worker": limits}
    cluster = {**SERVERS, "launcher": "tfjob", "kubernetes": pods}
    config = configured({"training": {"strategy": strategy}, "cluster": cluster})
    model = net(keras.layers.Dense(2_500_000 // 8))
    with pytest.raises(ConfigError) if said else nullcontext() as error:
        require(config, model)
    start = "cluster.kubernetes: the variables of model some:model take "
    assert not said or str(error.value).startswith(start + said)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["scaled_input", "scale", "input", "image", "label", "rescaling", "logits"]
)
def test_a_layer_may_have_any_name(tmp_path, name):
    assert fitted(tmp_path, "hidden", middle=name).parameters == 610


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dictionary", "the output is a dict ('label'), but the task has one output; return the"),
        ("own_function",
         "layer own (Activation) cannot be saved as .keras and loaded again: "
         "Could not locate function 'swish'; decorate swish with @keras.saving.register_keras"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line(tmp_path, name, message):
    with pytest.raises(ConfigError) as error:
        fitted(tmp_path, name)
    assert str(error.value).startswith(f"model own_models:{name}: {message}")
    assert "\n" not in str(error.value)


def test_the_first_examples_of_a_dataset_are_tried(tmp_path):
    # The artificial bytes contain no zero.
    images = np.full((20, 8, 8, 1), 255, np.uint8)
    labels = np.arange(20) % 10
    uri = publish_dataset(tmp_path / "dataset", (images, labels), test=0)
    assert fitted(tmp_path, "darkness", uri).parameters == 610
    images[:] = 0
    uri = publish_dataset(tmp_path / "dark", (images, labels), test=0)
    with pytest.raises(
        ConfigError, match="its loss on a few examples is nan: look for a logarithm"
    ):
        fitted(tmp_path, "darkness", uri)


def test_two_examples_that_say_nothing_are_no_reason(tmp_path):
    images, labels = digits()
    # With two dead layers, only the last bias has a gradient.
    images[:2] = 0
    uri = publish_dataset(tmp_path / "dataset", (images, labels), test=0)
    assert fitted(tmp_path, "without_bias", uri).parameters == 640
    images[:] = 0
    uri = publish_dataset(tmp_path / "dark", (images, labels), test=0)
    with pytest.raises(ConfigError, match="without_bias: no variable has a gradient: the loss"):
        fitted(tmp_path, "without_bias", uri)


def test_first_rows_that_all_say_nothing_are_no_reason(tmp_path):
    images, labels = digits()
    images[:] = 0
    uri = publish_dataset(tmp_path / "dark", (images, labels), test=0)
    config = parse_config({"model": {"name": "own_models:without_bias"}})
    assert dry_run.fit(config, tmp_path, uri, whole=False).parameters == 640


def test_of_a_large_shard_no_example_is_fetched(tmp_path, monkeypatch):
    monkeypatch.setattr(dry_run, "MOST_BYTES", 1)
    monkeypatch.setattr(dry_run, "stage_shards", lambda *_, **__: pytest.fail("fetched"))
    uri = publish_dataset(tmp_path / "dataset", digits())
    assert fitted(tmp_path, "hidden", uri).parameters == 610


def churn(*labels, **features):
    """Return a dataset of a table whose label has these classes in the first rows."""
    number = FeatureSpec(shape=(), dtype="float32", stored="float")
    label = replace(SPEC.features["label"], num_classes=len(labels), labels=labels)
    inputs = {"age": number, **features}
    return DatasetSpec(
        features={**inputs, "churn": label},
        inputs=tuple(inputs),
        targets=("churn",),
        shards={},
        target_counts={"churn": {"train": [1] * len(labels)}},
        target_moments={"churn": {"min": 0.0, "max": 0.0, "mean": 0.0, "std": 0.0}},
    )


@pytest.fixture
def refused(tmp_path, monkeypatch):
    """Return a function that returns the error for a dataset and a configuration, or ""."""

    def said(dataset, tree, *, whole=False, tries=False):
        if not tries:
            monkeypatch.setattr(dry_run, "_try_out", lambda *_: None)
        monkeypatch.setattr(dry_run, "find_dataset", lambda *_: dataset)
        training = {"strategy": "single", **tree.pop("training", {})}
        config = parse_config({"model": {"name": "tabular"}, **tree, "training": training})
        try:
            dry_run.fit(config, tmp_path, whole=whole)
        except ConfigError as error:
            return str(error)
        return ""

    return said


@pytest.mark.parametrize(
    ("labels", "tree", "whole_said"),
    [
        (("no",), {}, "task classification: all examples of the split 'train' have the same"),
        (("no",), {"task": {"positive": "yes"}}, "task.positive: "),
        (("no", "yes"), {"gate": {"min": {"macro_f1": 0.1}}}, "gate.min.macro_f1: "),
        (("no", "yes"), {"gate": {"min": {"accuracy@churn=maybe": 0.1}}},
         "gate.min.accuracy@churn=maybe: 'churn' has no class 'maybe'; did you mean 'yes'?"),
        (("a", "b", "c"), {"training": {"class_weights": {"d": 2.0}}},
         "training.class_weights: there is no class 'd'"),
        (("a", "b", "c"), {"training": {"class_weights": "balanced"}}, ""),
        (("a", "b", "c"), {"model": {"name": "own_models:seven"}},
         "model own_models:seven: the output must be floats of shape (batch, 3) for class"),
    ],
)  # fmt: skip
def test_classes_that_first_rows_do_not_have_are_no_reason(refused, labels, tree, whole_said):
    assert refused(churn(*labels), dict(tree)) == ""
    assert refused(churn(*labels), dict(tree), whole=True).startswith(whole_said)


@pytest.mark.parametrize(
    ("labels", "tree"),
    [
        (("1", "2"), {"task": {"name": "regression"}}),
        (("0",), {"gate": {"max": {"mean_absolute_error": 1.0}}}),
    ],
)
def test_classes_that_are_whole_numbers_may_be_a_quantity(refused, labels, tree):
    tree["data"] = {"source": "t.csv"}
    assert refused(churn(*labels), dict(tree)) == ""
    assert refused(churn(*labels), dict(tree), whole=True)
    assert refused(churn("no", "yes"), dict(tree))
    tree["data"] = {"source": "t.csv", "types": {"churn": "class"}}
    assert refused(churn(*labels), dict(tree))


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"task": {"positive": "maybe"}}, "task.positive: 'churn' has no class 'maybe'; did you "),
        ({"gate": {"min": {"macro_f2": 0.1}}}, "gate.min.macro_f2: binary_classification and "),
        ({"gate": {"min": {"pr_auc": 0.1}}}, "gate.min.pr_auc: binary_classification and the "),
        ({"gate": {"champion": {"metric": "f1", "better": "lower"}}},
         "gate.champion.better: f1 is better when higher; leave the key out"),
        ({"evaluation": {"slices": ["aeg"]}},
         "evaluation.slices: 'aeg' is not a feature of the da"),
        ({"training": {"optimizer": {"args": {"beta": 1}}}}, "training.optimizer.args.beta: "),
        ({"training": {"strategy": "own_models:net"}}, "training.strategy: 'own_models:net' is"),
        ({"data": {"buckets": [4]}}, "data.buckets: no input or label varies in length; "),
        ({"model": {"name": "own_models:leaves"}}, "model own_models:leaves: SystemExit: 3 ("),
        ({"model": {"name": "own_models:seven"}, "task": {"name": "binary_classification"}},
         "model own_models:seven: the output must be floats of shape (batch, 1) for binary_"),
        ({"model": {"name": "own_models:chance"}, **SAVED_ALONE},
         "export.formats: after saving as saved_model and loading again, predictions differ by "),
        ({"task": {"name": "own_models:Failing"}},
         "task own_models:Failing failed: ValueError: not today ("),
        ({"task": {"name": "own_models:Asking"}},
         "task.args: own_models:Asking needs 'scale' (it takes scale) ("),
        ({"model": {"name": "own_models:certain"}},
         "model own_models:certain: the last layer is a"),
        ({"model": {"name": "own_models:choice"}},
         "model own_models:choice does not accept the dataset's input of shape () and type "
         "float32: OperatorNotAllowedInGraphError: Using a symbolic `tf.Tensor` as a Python"),
        ({"model": {"name": "own_models:table"}, **SAVED_ALONE},
         "export.formats: the model cannot be saved as saved_model and loaded again: it uses"),
        ({"model": {"name": "own_models:python", "args": {"units": 1}}, **SAVED_ALONE},
         "export.formats: the model calls Python through tf.py_function or "
         "tf.numpy_function, which"),
    ],
)  # fmt: skip
# Keras warns about a softmax over an axis of length 1.
@pytest.mark.filterwarnings("ignore:You are using a softmax over axis -1")
def test_what_no_further_rows_can_change_is_refused_by_first_ones(refused, tree, said):
    tries = "export" in tree
    assert refused(churn("no", "yes"), tree, tries=tries).startswith(said)


def test_of_several_readings_the_one_that_fits_best_says_what_is_wrong(refused):
    tree = {"gate": {"min": {"accuracy@churn=maybe": 0.1, "recall": 0.1}}}
    # The first rows lack the class "maybe".
    assert refused(churn("no"), tree).startswith("gate.min.recall: classification and the model")


@pytest.mark.parametrize(
    ("name", "shape", "stored"), [("tabular", (), "bytes"), ("sequence", (None,), "sequence")]
)
def test_texts_are_refused_for_tensorflow_lite(refused, name, shape, stored):
    city = FeatureSpec(shape=shape, dtype="string", stored=stored)
    tree = {"model": {"name": name}, "export": {"formats": ["saved_model", "tflite"]}}
    assert refused(churn("no", "yes", city=city), tree) == (
        "export.formats: TensorFlow Lite does not support string operations, which "
        "city_vocabulary needs to look up known texts; remove tflite, or drop the column"
    )

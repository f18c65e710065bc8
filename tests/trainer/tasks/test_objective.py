"""Tests that a compiled model keeps its loss and metrics, and that conflicts are rejected."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.tasks import named
from flotilla.trainer.tasks.base import Part, Target
from flotilla.trainer.tasks.classification import BinaryClassification, Classification
from flotilla.trainer.tasks.compiled import read_compiled, weights_by_class
from flotilla.trainer.tasks.objective import Objective
from flotilla.trainer.tasks.registry import class_weights
from flotilla.trainer.tasks.regression import Regression
from tests.trainer.refusal import refusal
from tests.trainer.tasks.measuring import InParts, target

CLASSES = 3
INPUTS = np.array([[0.1, 2.0], [1.0, -1.0], [0.5, 0.5], [-2.0, 0.3]], np.float32)
LABELS = np.array([0, 2, 1, 1], np.int64)
WEIGHTS = np.array([1.0, 0.0, 3.0, 0.5], np.float32)


def task(**target):
    return Classification(
        Target(name="label", shape=(), dtype="int64", num_classes=CLASSES, **target)
    )


def net(activation=None, **compiled):
    keras.utils.set_random_seed(3)
    inputs = keras.Input((2,))
    model = keras.Model(inputs, keras.layers.Dense(CLASSES, activation)(inputs))
    if compiled:
        model.compile(**compiled)
    return model


def accepted(model, **settings):
    objective = Objective(task(), **settings)
    objective.accept(model, model(keras.Input((2,))))
    return objective


def batches(weights=None):
    arrays = (INPUTS, LABELS) if weights is None else (INPUTS, LABELS, weights)
    return tf.data.Dataset.from_tensor_slices(arrays).batch(3)


def measured(objective, model, weights=None):
    return objective.means(objective.totals(model, batches(weights)).numpy())


def by_keras(model, weights=None):
    found = model.evaluate(INPUTS, LABELS, sample_weight=weights, return_dict=True, verbose=0)
    return {name: pytest.approx(value, rel=1e-5) for name, value in found.items()}


def average_error(labels, outputs):
    return tf.reduce_mean(tf.abs(tf.one_hot(tf.cast(labels, tf.int32), CLASSES) - outputs), -1)


def in_two(name):
    return keras.metrics.SparseTopKCategoricalAccuracy(2, name=name)


LOGITS = keras.losses.SparseCategoricalCrossentropy
SPARSE = "sparse_categorical_crossentropy"
COMPILED = {
    "name": ("softmax", {"loss": SPARSE, "metrics": ["accuracy"]}),
    "object": (None, {"loss": LOGITS(from_logits=True), "weighted_metrics": ["acc"]}),
    "by shape": ("softmax", {"loss": "crossentropy", "metrics": ["accuracy"]}),
    "function": (
        "softmax",
        {"loss": average_error, "loss_weights": 0.5, "metrics": [average_error]},
    ),
    "several": (
        "softmax",
        {"loss": SPARSE, "metrics": ["in top_2"], "weighted_metrics": ["in weighed"]},
    ),
}


def fresh(metrics):
    """Return metrics with new objects, because an object must not be shared by several models."""
    return [in_two(each[3:]) if str(each).startswith("in ") else each for each in metrics]


@pytest.mark.slow
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["alike", "weighted"])
@pytest.mark.parametrize("kind", COMPILED)
def test_loss_and_metrics_are_those_of_keras(kind, weights):
    activation, compiled = COMPILED[kind]

    def model_of():
        given = {
            name: fresh(each) if "metrics" in name else each for name, each in compiled.items()
        }
        return net(activation, optimizer="sgd", **given)

    expected = by_keras(model_of(), weights)
    model = model_of()
    found = measured(accepted(model), model, weights)
    # With weights, `accuracy` is the task's own metric, which is weighted.
    common = expected.keys() - ({"accuracy"} if weights is not None else set())
    assert {name: found[name] for name in common} == {name: expected[name] for name in common}


def test_the_gradient_is_that_of_keras():
    compiled = {"optimizer": keras.optimizers.SGD(1.0), "loss": "sparse_categorical_crossentropy"}
    expected, model = net("softmax", **compiled), net("softmax", **compiled)
    expected.train_on_batch(INPUTS, LABELS, WEIGHTS)
    check_step(accepted(model), model, (INPUTS, LABELS, WEIGHTS), expected)


def check_step(objective, model, batch, expected):
    """Check that a step with the learning rate 1 gives a model the weights of another one."""
    before = model.get_weights()
    with tf.GradientTape() as tape:
        loss = objective.loss(model, batch, model(INPUTS, training=True))
    gradient = tape.gradient(loss, [each.value for each in model.trainable_variables])
    for start, step, end in zip(before, gradient, expected.get_weights(), strict=True):
        np.testing.assert_allclose(start - step, end, atol=1e-6)


class TestProbabilities:
    def test_outputs_are_their_logits(self):
        model = net("softmax", loss="sparse_categorical_crossentropy")
        found = accepted(model).task
        answers = found.answers(found.outputs(model(INPUTS)))
        np.testing.assert_allclose(answers["probabilities"], model(INPUTS), atol=1e-6)
        np.testing.assert_allclose(found.given(answers["logits"]), model(INPUTS), atol=1e-6)

    def test_a_certain_answer_stays_finite(self):
        found = task()
        found.from_probabilities = True
        assert np.isfinite(found.outputs(tf.constant([[1.0, 0.0, 0.0]]))).all()

    @pytest.mark.parametrize("activation", [None, "softmax"])
    def test_a_loss_by_name_takes_what_the_model_gives(self, activation):
        found = accepted(net(activation), loss="sparse_categorical_crossentropy")
        assert found.task.from_probabilities == (activation == "softmax")

    def test_the_configured_loss_goes_before_the_compiled_one(self):
        model = net(None, loss="mse")
        value = measured(accepted(model, loss="sparse_categorical_crossentropy"), model)["loss"]
        assert value == pytest.approx(measured(accepted(net()), net())["loss"])


def last(layer):
    inputs = keras.Input((2,))
    return keras.Model(inputs, layer(keras.layers.Dense(CLASSES)(inputs)))


@pytest.mark.parametrize(
    "model",
    [
        lambda: net("softmax", loss=LOGITS(from_logits=True)),
        lambda: last(keras.layers.Activation("softmax")),
        lambda: last(keras.ops.softmax),
        lambda: keras.Sequential([keras.Input((2,)), net("softmax")]),
    ],
)
def test_probabilities_without_a_loss_for_them_are_refused(model):
    with pytest.raises(ConfigError, match="the model must return logits; remove the softmax from"):
        accepted(model())


def test_a_wrapper_of_a_loss_of_probabilities_may_pass_logits():
    inner = keras.losses.sparse_categorical_crossentropy
    wrapper = functools.wraps(inner)(lambda *given: inner(*given, from_logits=True))
    assert not accepted(net(None, loss=wrapper)).task.from_probabilities


LOSS_FAILS, METRICS_FAIL = (
    f"the model's compile({each}=...) fails: " for each in ("loss", "metrics")
)


@pytest.mark.parametrize(
    ("activation", "compiled", "begin", "end"),
    [
        (
            None,
            {"loss": "sparse_categorical_crossentropy"},
            "the loss needs probabilities, but",
            "",
        ),
        (None, {"steps_per_execution": 8}, "the model is compiled with steps_per_execution=8", ""),
        (None, {"run_eagerly": True}, "the model is compiled with run_eagerly=True, but the", ""),
        ("softmax", {"loss": {"other": "mse"}}, LOSS_FAILS, ""),
        (
            "softmax",
            {"loss": "mean_sqared_error"},
            LOSS_FAILS,
            "did you mean 'mean_squared_error'?",
        ),
        (None, {"metrics": ["acuracy"]}, METRICS_FAIL, "acuracy; did you mean 'accuracy'?"),
        (
            "softmax",
            {"loss": "categorical_crossentropy"},
            "the loss does not fit the labels and outputs: ",
            "; for labels that are class numbers, use sparse_categorical_crossentropy",
        ),
        (
            None,
            {"metrics": [keras.metrics.MeanSquaredError(name="accuracy")]},
            "two metrics are called 'accuracy'; rename one in the",
            "",
        ),
    ],
)
def test_what_contradicts_a_run_is_refused_in_one_line(activation, compiled, begin, end):
    message = refusal(accepted, net(activation, **compiled))
    assert message.startswith(begin)
    assert message.endswith(end)


def test_xla_is_asked_for_by_name():
    assert read_compiled(net(loss="mse", jit_compile=True)).jit_compile
    assert not read_compiled(net(loss="mse")).jit_compile


def test_the_optimizer_is_known_and_leaves_the_model(tmp_path):
    model = net(None, optimizer=keras.optimizers.SGD(0.25), loss=LOGITS(from_logits=True))
    assert accepted(model).compiled.optimizer.get_config()["learning_rate"] == 0.25
    model.save(tmp_path / "model.keras")
    assert not keras.models.load_model(tmp_path / "model.keras").compiled


def test_a_model_that_was_not_compiled_keeps_the_loss_of_the_task():
    assert read_compiled(net()) is None
    model = net(metrics=["accuracy"])
    assert accepted(model).compiled.loss is None
    plain = net()
    assert measured(accepted(model), model) == measured(accepted(plain), plain)


class OwnLoss(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        del x, y, sample_weight
        return keras.ops.mean(keras.ops.square(y_pred)) + (0.0 if training else 100.0)


def test_a_loss_that_the_model_computes_is_measured():
    inputs = keras.Input((2,))
    model = OwnLoss(inputs, keras.layers.Dense(CLASSES)(inputs))
    objective = accepted(model)
    value = np.square(model(INPUTS)).mean()
    assert float(objective.loss(model, (INPUTS, LABELS), model(INPUTS))) == pytest.approx(value)
    assert measured(objective, model)["loss"] == pytest.approx(100 + value)


def test_a_loss_of_the_users_takes_standardized_labels():
    target = Target(name="y", shape=(), dtype="float32", moments={"mean": 10.0, "std": 2.0})
    objective = Objective(Regression(target, standardize=True), loss="mean_absolute_error")
    inputs = keras.Input((2,))
    model = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer="zeros")(inputs))
    objective.accept(model, model.output)
    labels = tf.constant([12.0, 10.0, 9.0, 10.0])
    value = objective.loss(model, (INPUTS, labels), model(INPUTS))
    assert float(value) == pytest.approx(1.5 / 4)


SYMBOLS = keras.KerasTensor((None,), "int64"), keras.KerasTensor((None, 3))
NUMBER = 3


def third(_labels, outputs):
    return keras.ops.mean(keras.ops.abs(outputs), -1) / 3


def made():
    return in_two("in_two")


class Kept(keras.losses.Loss):
    def call(self, y_true, y_pred):
        del y_true
        return keras.ops.mean(y_pred**2, -1)


def broken():
    raise ValueError("no such file")


@pytest.mark.parametrize(
    ("name", "reported", "direction"),
    [
        ("AUC", "auc", "higher"),
        ("mae", "mae", "lower"),
        ("RootMeanSquaredError", "root_mean_squared_error", "lower"),
        ("sparse_categorical_crossentropy", "sparse_categorical_crossentropy", "lower"),
        ("false_positives", "false_positives", None),
        ("cosine_similarity", "cosine_similarity", "higher"),
    ],
)
def test_a_metric_of_keras_has_its_name_and_direction(name, reported, direction):
    found = named.metric(name, "task.metrics", *SYMBOLS)
    assert (found.name, named.find_direction(found)) == (reported, direction)


def test_metrics_and_losses_of_the_users_own():
    function = named.metric(f"{__name__}:third", "task.metrics", *SYMBOLS)
    assert (function.name, named.find_direction(function)) == ("third", None)
    assert named.metric(f"{__name__}:made", "task.metrics", *SYMBOLS).name == "in_two"
    assert isinstance(named.loss(f"{__name__}:Kept", "task.loss", logits=True), keras.losses.Loss)
    model, own = net(), {"loss": f"{__name__}:third", "metrics": [f"{__name__}:made"]}
    found = measured(accepted(model, **own), model)
    assert found["in_two"] >= found["accuracy"]


@pytest.mark.parametrize(
    ("key", "name", "message"),
    [
        ("metrics", "acuracy", "there is no metric 'acuracy'; did you mean 'accuracy'?"),
        ("metrics", "xyzzy", "there is no metric 'xyzzy' (see keras.metrics, or use package."),
        ("metrics", "MeanIoU", "MeanIoU cannot be created without arguments: TypeError: "),
        (
            "metrics",
            f"{__name__}:thrid",
            f"{__name__} has no metric 'thrid'; did you mean 'third'?",
        ),
        ("metrics", f"{__name__}:NUMBER", f"{__name__}:NUMBER is a int, not a metric"),
        ("metrics", f"{__name__}:broken", f"{__name__}:broken cannot be created without arguments"),
        ("metrics", "no_such:thing", "cannot import no_such: "),
        ("loss", "mean_sqared_error", "there is no loss 'mean_sqared_error'; did you mean "),
        ("loss", f"{__name__}:NUMBER", f"{__name__}:NUMBER is a int, not a loss"),
    ],
)
def test_another_metric_or_loss_is_refused_in_one_line(key, name, message):
    found = refusal(accepted, net(), **{key: name if key == "loss" else [name]})
    assert found.startswith(f"task.{key}: {message}")


def test_a_metric_that_does_not_fit_the_labels_is_refused():
    message = refusal(accepted, net(), metrics=["mean_squared_error"])
    assert message.startswith("the metrics do not fit the labels and outputs: Inv")


def test_a_further_metric_takes_predictions():
    model = net()
    objective = accepted(model, metrics=["sparse_categorical_crossentropy"])
    found = measured(objective, model)
    assert found["sparse_categorical_crossentropy"] == pytest.approx(found["loss"], rel=1e-5)
    assert objective.directions["sparse_categorical_crossentropy"] == "lower"


def test_variables_without_values_get_none_when_another_scope_ends():
    made = []

    def create(next_creator, **kwargs):
        made.append(kwargs["name"])
        return next_creator(**kwargs)

    with named.skip_initial_values():
        keras.metrics.Mean().update_state([1.0])
    with tf.variable_creator_scope(create), keras.StatelessScope():
        pass
    assert made == []


class Seen(keras.Metric):
    """Counts examples, and returns its variable itself as the result."""

    def __init__(self, name="seen"):
        super().__init__(name=name)
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        del y_true, sample_weight
        self.count.assign_add(tf.cast(tf.shape(y_pred)[0], tf.float32))

    def result(self):
        return {"seen": self.count, "twice": 2 * self.count}


def test_a_metric_that_returns_its_variable_has_its_value():
    labels = np.arange(20, dtype="float32")
    objective = Objective(Regression(target(labels)), metrics=[f"{__name__}:Seen"])
    parts = InParts(labels, labels[:, np.newaxis]).parts()
    found = objective.means(np.sum([objective.sums(part) for part in parts], axis=0))
    assert (found["seen"], found["twice"]) == (20, 40)


def turned(_labels, predictions):
    def turn(row):
        if row[0] > 0:
            return row
        return -row

    return tf.map_fn(turn, tf.reshape(predictions, [-1, 1]))[:, 0]


def test_what_a_metric_maps_over_examples_may_branch():
    labels = np.arange(4, dtype="float32")
    objective = Objective(Regression(target(labels)), metrics=[f"{__name__}:turned"])
    (part,) = InParts(labels, np.float32([[-1], [2], [-3], [4]])).parts()
    assert objective.means(objective.sums(part))["turned"] == 2.5


KEY = "training.class_weights"
NAMES = ("cat", "dog", "cow")


def of(*counts, labels=NAMES):
    return task(labels=labels, counts={"train": counts})


def test_they_are_those_of_fit():
    weights = {0: 2.0, 1: 0.5, 2: 1.0}
    expected, model = net(), net()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    expected.compile(keras.optimizers.SGD(1.0), loss)
    expected.train_on_batch(INPUTS, LABELS, class_weight=weights)
    objective = Objective(task(), weights={"": np.array([2.0, 0.5, 1.0], np.float32)})
    objective.attach(model)
    check_step(objective, model, (tf.constant(INPUTS), tf.constant(LABELS)), expected)


def test_a_validation_knows_none():
    heavy = {"": np.full(CLASSES, 9.0, np.float32)}
    found = [measured(Objective(task(), weights=weights), net()) for weights in (None, heavy)]
    assert found[0] == found[1]


class Several(Classification):
    """A task in which an example may have several labels."""

    link = "sigmoid"

    def __init__(self):
        super().__init__(Target(name="label", shape=(), dtype="int64", num_classes=CLASSES))
        self.target = Target(name="labels", shape=(CLASSES,), dtype="int64")

    def loss(self):
        return keras.losses.BinaryCrossentropy(from_logits=True)


def test_of_several_labels_each_one_that_an_example_has_weighs():
    labels = tf.constant([[1, 0, 1], [0, 0, 0]])
    table = np.array([4.0, 3.0, 0.5], np.float32)
    found = weights_by_class(table, Several(), labels, tf.constant([1.0, 2.0]))
    np.testing.assert_allclose(found, [[4.0, 1.0, 0.5], [2.0, 2.0, 2.0]])
    objective, model = Objective(Several(), weights={"": table}), net()
    objective.attach(model)
    outputs = tf.constant([[1.0, -1.0, 0.5], [0.0, 2.0, -0.5]])
    expected = np.mean(
        tf.nn.weighted_cross_entropy_with_logits(tf.cast(labels, tf.float32), outputs, table)
    )
    value = objective.loss(model, (tf.constant(INPUTS[:2]), labels), outputs)
    assert float(value) == pytest.approx(expected)


def test_balanced_classes_weigh_the_same_together():
    counts = np.array([2, 8, 10])
    found = class_weights("balanced", of(*counts), KEY)
    np.testing.assert_allclose(found * counts, 20 / 3)
    assert class_weights("balanced", task(), KEY) is None
    assert class_weights("", of(*counts), KEY) is None
    np.testing.assert_allclose(class_weights({"dog": 2.0, "2": 3.0}, of(), KEY), [1, 2, 3])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dgo": 1.0}, "there is no class 'dgo'; did you mean 'dog'?"),
        ({"7": 1.0}, "there is no class '7' (the classes are cat, dog, "),
        ("balanced", "'balanced' needs training examples of each class"),
    ],
)
def test_a_class_that_does_not_exist_is_refused(given, message):
    found = refusal(class_weights, given, of(5, 0, 1), KEY)
    assert found.startswith(f"training.class_weights: {message}")


@pytest.mark.parametrize(
    ("units", "loss", "words"),
    [
        (2, None, r"has two columns, but binary_classification of 'y' .* end with Dense\(1\), or"),
        (1, LOGITS(from_logits=True), "the loss needs an output for each class, but binary_class"),
        (1, "categorical_crossentropy", "needs an output for each class"),
    ],
)
def test_a_model_of_two_outputs_says_how_two_classes_are_trained(units, loss, words):
    objective = Objective(BinaryClassification(Target(name="y", shape=(), dtype="int64")))
    given = keras.Input((3,))
    model = keras.Model(given, keras.layers.Dense(units)(given))
    if loss:
        model.compile(loss=loss)
    with pytest.raises(ConfigError, match=f"{words}.*set task.name to classification"):
        objective.accept(model, model.output)


def test_few_parts_are_measured_without_a_trace_and_many_of_any_size_by_one(monkeypatch):
    traces = []
    traced = Objective._sums

    def counted(self, *given, **options):
        if not tf.executing_eagerly():
            traces.append(None)
        return traced(self, *given, **options)

    monkeypatch.setattr(Objective, "_sums", counted)
    labels = np.arange(60, dtype="float32")
    objective = Objective(Regression(target(labels)))
    outputs, begin, total = labels[:, np.newaxis] + 1, 0, 0.0
    for size in (3, 5, 1, 4, 2, 3, 5, 1, 4, 2, 7, 6, 5, 12):
        rows = slice(begin, begin + size)
        part = Part(labels[rows], outputs[rows], None, {})
        total, begin = total + objective.sums(part), begin + size
        assert len(traces) == (begin > 24)
    assert objective.means(total)["mean_absolute_error"] == pytest.approx(1.0)

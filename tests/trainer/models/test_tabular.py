"""Tests the tabular model: numbers with missing values, classes, texts, and errors."""

from __future__ import annotations

from itertools import cycle

import keras
import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer.config.schema import ModelConfig
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.features.statistics.statistics import FeatureStatistics
from flotilla.trainer.models import registry
from flotilla.trainer.models.spec import InputSpec
from flotilla.trainer.runtime.errors import ConfigError
from tests.trainer.models.known import learnt
from tests.trainer.odd_names import ODD

COLUMNS = {
    "age": FeatureSpec(shape=(), dtype="float32", stored="float"),
    "rooms": FeatureSpec(shape=(), dtype="int64", stored="int"),
    "city": FeatureSpec(shape=(), dtype="string", stored="bytes"),
    "review": FeatureSpec(shape=(), dtype="string", stored="bytes"),
    "grade": FeatureSpec(shape=(), dtype="int64", stored="int", num_classes=3),
    "scan": FeatureSpec(shape=(2, 2), dtype="uint8", stored="raw"),
    "steps": FeatureSpec(shape=(None, 2), dtype="float32", stored="sequence"),
    "steps_length": FeatureSpec(shape=(), dtype="int64", stored="int"),
    "ticks": FeatureSpec(shape=(None,), dtype="int64", stored="sequence"),
    "lines": FeatureSpec(shape=(None,), dtype="string", stored="sequence"),
    "tags": FeatureSpec(shape=(2,), dtype="string", stored="bytes"),
}
KNOWN = {
    "age": FeatureStatistics(kind="number", examples=9, missing=2, mean=30.0, std=5.0),
    "rooms": FeatureStatistics(kind="number", examples=9, mean=3.0, std=1.0),
    "city": FeatureStatistics(kind="text", examples=9, counts={"Rome": 5, "Oslo": 4}),
    "review": FeatureStatistics(
        kind="text", examples=90, distinct=80, counts={"a": 1}, words={"good": 9, "film": 9}
    ),
    "grade": FeatureStatistics(kind="class", examples=9, counts={"0": 9}),
    "price": FeatureStatistics(kind="number", examples=9, mean=1e5, std=1e4),
    "scan": FeatureStatistics(kind="tensor", examples=9, mean=100.0, std=50.0),
    "steps": FeatureStatistics(kind="tensor", examples=9, mean=4.0, std=2.0),
    "steps_length": FeatureStatistics(kind="number", examples=9, mean=3.0, std=1.0),
    "ticks": FeatureStatistics(kind="tensor", examples=9, mean=4.0, std=2.0),
    "tags": FeatureStatistics(kind="text", examples=9, counts={"a": 9}),
}
EXAMPLES = {
    "age": np.array([25.0, np.nan, 40.0], np.float32),
    "rooms": np.array([1, 2, 3]),
    "city": np.array(["Rome", "Paris", ""], object),
    "review": np.array(["Good film!", "", "none of these"], object),
    "grade": np.array([0, 2, 1]),
    "scan": np.arange(12, dtype=np.uint8).reshape(3, 2, 2),
}


def spec_of(*names, output=(2,), in_units=("price",), **known):
    features = {**KNOWN, **known}
    return InputSpec.of(
        COLUMNS, names, output, targets=["price"], in_units=in_units, learnt=learnt(features)
    )


def built(*names, output=(2,), **args):
    return registry.build(ModelConfig(name="tabular", args=args), spec_of(*names, output=output), 0)


def given(*names):
    tensors = {name: tf.constant(EXAMPLES[name]) for name in names}
    return tensors if len(names) > 1 else tensors[names[0]]


@pytest.mark.parametrize("names", [tuple(EXAMPLES), ("scan",), ("grade",)])
def test_every_kind_of_column_gives_finite_outputs(names):
    found = built(*names)(given(*names)).numpy()
    assert found.shape == (3, 2)
    assert np.isfinite(found).all()


def test_a_gap_differs_from_the_mean():
    model = built("age")
    mean, gap = model(tf.constant([30.0, np.nan])).numpy()
    assert not np.allclose(mean, gap)


def test_a_mean_comes_of_words_that_are_there():
    model = built("review", hidden_units=[])
    once, twice, other = model(tf.constant(["good", "good good", "film"])).numpy()
    np.testing.assert_allclose(once, twice, rtol=1e-5)
    assert not np.allclose(once, other)


def test_numbers_have_a_linear_regression_without_hidden_layers():
    model = built("age", "rooms", output=(1,), hidden_units=[], pieces=0)
    # There are two weights for the numbers, one weight for missing values, and the bias.
    assert model.count_params() == 4


def test_a_number_is_predicted_in_its_own_units():
    found = built("age", output=(1,))(given("age")).numpy()
    assert np.all(np.abs(found - 1e5) < 1e5)
    assert found.dtype == np.float32
    several = built("age", output={"price": (1,), "other": (2,)})(given("age"))
    assert np.all(np.abs(several["price"].numpy() - 1e5) < 1e5)
    assert np.all(np.abs(several["other"].numpy()) < 1e3)


def test_outputs_are_scaled_only_where_the_task_asks_for_it():
    config = ModelConfig(name="tabular")
    model = registry.build(config, spec_of("age", output=(1,), in_units=()), 0)
    assert np.all(np.abs(model(given("age")).numpy()) < 1e3)


def quantiles_of(*values):
    middle = {"mean": float(np.mean(values)), "std": float(np.std(values))}
    quantiles = np.quantile(values, np.linspace(0, 1, 1001), method="nearest")
    found = tuple(quantiles.astype(float).tolist())
    return FeatureStatistics(kind="number", examples=9, quantiles=found, **middle)


def test_an_outlier_makes_no_equals_of_other_numbers():
    spec = spec_of("rooms", rooms=quantiles_of(*range(200), 10**15))
    model = registry.build(ModelConfig(name="tabular"), spec, 0)
    low, high, far, further = model(tf.constant([3, 150, 10**15, 10**18])).numpy()
    assert np.abs(low - high).max() > 1e-3
    np.testing.assert_array_equal(far, further)


def test_each_value_of_few_is_a_piece_of_its_own():
    spec = spec_of("rooms", rooms=quantiles_of(*[0] * 970, *[1] * 20, *[5] * 10))
    model = registry.build(ModelConfig(name="tabular"), spec, 0)
    pieces = keras.Model(model.inputs, model.get_layer("flotilla_pieces").input)
    filled = pieces(tf.constant([-1, 0, 1, 3, 9])).numpy().sum((1, 2))
    np.testing.assert_allclose(filled, [0, 0, 1, 1.5, 2], atol=1e-6)


def test_units_of_a_column_begin_as_different_ones():
    kernel = built("age", "rooms").get_layer("flotilla_pieces").kernel.numpy()
    assert abs(kernel.mean()) < kernel.std() / 4
    assert kernel.std() == pytest.approx(0.25, rel=0.25)


def test_infinite_and_unseen_gaps_give_finite_outputs():
    model = registry.build(
        ModelConfig(name="tabular"), spec_of("age", age=quantiles_of(1, 2, 3)), 0
    )
    numbers = model(tf.constant([np.inf, -np.inf, np.nan, 3e38, 2.0])).numpy()
    assert np.isfinite(numbers).all()
    # No value was missing in training, so a missing value is replaced by the median.
    np.testing.assert_allclose(numbers[2], numbers[4], rtol=1e-5)


def test_without_pieces_it_has_the_variables_of_before():
    names = ("age", "rooms", "city", "grade")
    model = built(*names, pieces=0, hidden_units=[64, 32], dropout=0.0)
    found = {each.path: tuple(each.shape) for each in model.variables}
    assert found == {
        "city_embedding/shard_0": (3, 16),
        "grade_embedding/shard_0": (3, 16),
        "hidden_0/kernel": (35, 64),
        "hidden_0/bias": (64,),
        "hidden_1/kernel": (64, 32),
        "hidden_1/bias": (32,),
        "logits/kernel": (32, 2),
        "logits/bias": (2,),
    }


def test_values_that_come_again_are_categories_whatever_words_they_have():
    layers = {layer.name for layer in built("city", "review").layers}
    assert {"city_vocabulary", "review_words"} <= layers


def test_every_row_of_an_embedding_gets_a_gradient():
    model = built(*EXAMPLES)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(given(*EXAMPLES)) ** 2)
    assert all(each is not None for each in tape.gradient(loss, model.trainable_variables))


KINDS = ("age", "city", "grade")


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_columns_and_targets_of_any_name_are_trained_on():
    targets = ("a b", "a_b", "a-b", "größe (€)")
    kinds = dict(zip((*ODD[:12], *ODD[-24:]), cycle(KINDS), strict=False))
    columns = {name: COLUMNS[kind] for name, kind in kinds.items()}
    known = {name: KNOWN[kind] for name, kind in kinds.items()}
    known |= {name: KNOWN["price"] for name in targets if name not in known}
    outputs = dict.fromkeys(targets, (1,))
    spec = InputSpec.of(columns, [*columns], outputs, targets=targets, learnt=learnt(known))
    model = registry.build(ModelConfig(name="tabular"), spec, 0)
    inputs = {name: tf.constant(EXAMPLES[kind]) for name, kind in kinds.items()}

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            found = model(inputs, training=True)
            loss = tf.add_n([tf.reduce_sum(each**2) for each in found.values()])
        return tape.gradient(loss, model.trainable_variables)

    assert all(each is not None for each in step())
    assert model(inputs).keys() == set(targets)
    registry.require_readable("tabular", model)
    before = model(inputs)["a b"].numpy()
    for name, kind in [*kinds.items()][::6]:
        other = {**inputs, name: tf.constant(EXAMPLES[kind][[1, 2, 0]])}
        assert not np.array_equal(model(other)["a b"].numpy(), before), name


def test_keras_reads_it_back():
    registry.require_readable("tabular", built(*EXAMPLES))


@pytest.mark.parametrize(
    ("names", "args", "line"),
    [
        (("lines",), {}, "'lines' must be a sequence of numbers or vectors, not string"),
        (("tags",), {}, r"'tags' must be one string per example, but has the shape \[2\]"),
        (("age",), {"words": 0}, "words: 0 is not allowed"),
        (("age",), {"dimension": 0}, "dimension: 0 is not allowed"),
        (("age",), {"hidden_units": [0]}, "hidden_units"),
        (("age",), {"pieces": -1}, "pieces: -1 is not allowed"),
        (("age",), {"unit": 3}, "tabular has no argument 'unit'"),
    ],
)
def test_what_it_cannot_do_is_named(names, args, line):
    with pytest.raises(ConfigError, match=line):
        built(*names, **args)


def test_a_sequence_of_any_length_has_the_same_output_whatever_it_is_padded_with():
    model = built("steps", "steps_length", "age")
    registry.require_readable("tabular", model)
    steps = np.array([[[1, 2], [0, 0], [0, 0]], [[1, 2], [0, 0], [np.nan, 5]]], np.float32)
    given = {
        "steps": steps,
        "steps_length": np.array([2, 3]),
        "age": np.array([25.0, np.nan], np.float32),
    }
    before = model(given).numpy()
    padded = {**given, "steps": np.pad(steps, [(0, 0), (0, 9), (0, 0)], constant_values=7)}
    np.testing.assert_allclose(model(padded).numpy(), before, rtol=1e-5)
    # A zero within the length counts as a value, even at the end.
    shorter = {**given, "steps_length": np.array([1, 3])}
    assert not np.allclose(model(shorter).numpy()[0], before[0])
    none = {**given, "steps_length": np.array([0, 0])}
    assert np.isfinite(model(none).numpy()).all()


def test_without_its_length_a_sequence_ends_before_its_last_zeros():
    model = built("ticks")
    registry.require_readable("tabular", model)
    ticks = np.array([[3, 0, 4], [5, 0, 0]])
    before = model(ticks).numpy()
    np.testing.assert_allclose(model(np.pad(ticks, [(0, 0), (0, 6)])).numpy(), before, rtol=1e-5)
    np.testing.assert_allclose(model(ticks[1:, :1]).numpy(), before[1:], rtol=1e-5)

"""Tests how a model's inputs are derived from a dataset's features."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.features.statistics.statistics import FeatureStatistics
from flotilla.trainer.models.spec import InputSpec
from flotilla.trainer.runtime.errors import ConfigError
from tests.trainer.models.known import learnt


def column(shape, dtype, classes=0):
    return FeatureSpec(shape=shape, dtype=dtype, stored="raw", num_classes=classes)


FEATURES = {
    "image": column((28, 28, 1), "uint8"),
    "age": column((), "float32"),
    "label": column((), "int64"),
}


def test_one_feature_is_a_plain_tensor():
    spec = InputSpec.of(FEATURES, ["image"], (10,))
    assert (spec.shape, spec.dtype, spec.output_shape) == ((28, 28, 1), "uint8", (10,))
    assert spec.names == ("image",)
    symbol = spec.symbols()
    assert (symbol.shape, symbol.dtype) == ((None, 28, 28, 1), "uint8")


def test_several_features_keep_their_names():
    spec = InputSpec.of(FEATURES, ("image", "age"), (2,))
    assert spec.shape == {"image": (28, 28, 1), "age": ()}
    assert spec.dtype == {"image": "uint8", "age": "float32"}
    symbols = spec.symbols()
    shapes = {name: symbol.shape for name, symbol in symbols.items()}
    assert shapes == {"image": (None, 28, 28, 1), "age": (None,)}
    assert [symbol.name for symbol in symbols.values()] == ["image", "age"]


TABLE = {
    "age": column((), "float32"),
    "city": column((), "string"),
    "grade": column((), "int64", 3),
}
KNOWN = {
    "age": FeatureStatistics(kind="number", examples=4, missing=1, mean=30.0, std=5.0),
    "same": FeatureStatistics(kind="number", examples=4, mean=7.0, std=0.0),
    "city": FeatureStatistics(
        kind="text", examples=4, counts={"Rome": 2, "Köln": 1, "": 1}, words={"old": 2, "new": 1}
    ),
    "grade": FeatureStatistics(kind="class", examples=4, counts={"a": 4}),
}


def table():
    return InputSpec.of(TABLE, ["age", "city", "grade"], (2,), learnt=learnt(KNOWN))


def test_a_model_gets_what_is_known_of_a_feature():
    spec = table()
    assert spec.statistics("age") == KNOWN["age"]
    assert spec.classes == {"grade": 3}
    assert spec.vocabulary("city").values == ["Rome", "Köln", ""]
    assert spec.vocabulary("city", most=1).values == ["Rome"]
    assert spec.words("city", 5).values == ["old", "new"]


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [("age", [25.0, 40.0, np.nan], [-1.0, 2.0, np.nan]), ("same", [7.0, 9.0], [0.0, 2.0])],
)
def test_numbers_are_normalized(name, values, expected):
    found = table().normalization(name)(tf.constant(values))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("ask", "line"),
    [
        (lambda spec: spec.statistics("agee"), "no feature 'agee'; did you mean 'age'"),
        (lambda spec: spec.statistics("zzz"), r"no feature 'zzz' \(it has age, same, city, grade"),
        (lambda spec: spec.vocabulary("age"), "'age' is a number, not a text"),
        (lambda spec: spec.words("grade", 3), "'grade' is a class, not a text"),
        (lambda spec: spec.normalization("city"), "'city' is a text, which has no mean"),
        (lambda spec: spec.vocabulary("city", most=-1), "most: -1 is not allowed"),
    ],
)
def test_what_nobody_knows_is_named(ask, line):
    with pytest.raises(ConfigError, match=line):
        ask(table())


def test_before_a_dataset_is_prepared_nothing_is_known():
    spec = InputSpec.of(TABLE, ["age", "city"], (2,))
    assert spec.vocabulary("city").size == 1
    np.testing.assert_allclose(spec.normalization("age")(tf.constant([3.0])), [3.0])
    with pytest.raises(ConfigError, match="no feature 'grade'"):
        spec.statistics("grade")

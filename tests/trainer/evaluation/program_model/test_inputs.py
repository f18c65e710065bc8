"""Tests how features of a dataset are matched with the inputs of a program's model."""

import numpy as np
import pytest

from flotilla.trainer.evaluation.program_model.inputs import Argument, convert, match_arguments
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.runtime.errors import UserError


def feature(dtype, *shape):
    return FeatureSpec(shape=shape, dtype=dtype, stored="raw")


def spec_of(**features):
    return DatasetSpec(features=features, inputs=tuple(features), targets=(), shards={})


def argument(dtype, *sizes):
    return Argument(name="x", shape=(None, *sizes), dtype=dtype)


@pytest.mark.parametrize(
    ("given", "wanted", "shape"),
    [
        (feature("uint8", 8, 8, 1), argument("float32", 8, 8, 1), (2, 8, 8, 1)),
        (feature("uint8", 8, 8), argument("uint8", 8, 8, 1), (2, 8, 8, 1)),
        (feature("uint8", 8, 8, 1), argument("float32", 64), (2, 64)),
        (feature("float64", 3), argument("float32", None), (2, 3)),
        (feature("int64"), argument("float32", 1), (2, 1)),
        (feature("float32", 1), argument("float32"), (2,)),
        (feature("int64"), argument("int32"), (2,)),
        (feature("bool"), argument("float32"), (2,)),
    ],
)
def test_what_is_safe_is_converted(given, wanted, shape):
    spec = spec_of(column=given)
    assert match_arguments(spec, {"x": wanted}) == {"x": "column"}
    values = np.ones((2, *given.shape), given.dtype)
    converted = np.asarray(convert(values, given, wanted))
    assert (converted.shape, converted.dtype.name) == (shape, wanted.dtype)
    np.testing.assert_array_equal(converted, np.ones(shape))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (feature("float32", 3), argument("int32", 3)),
        (feature("string"), argument("float32")),
        (feature("int64"), argument("string")),
        (feature("float32", 3), argument("float32", 4)),
        (feature("float32", None, 3), argument("float32", 12)),
    ],
)
def test_what_is_not_safe_is_refused_by_both_names(given, wanted):
    with pytest.raises(
        UserError, match=r"the argument 'x' .* does not accept the feature 'column'"
    ):
        match_arguments(spec_of(column=given), {"x": wanted})


def test_arguments_have_the_names_of_features_or_of_a_signature():
    spec = spec_of(**{"user age": feature("float32"), "clicks": feature("float32")})
    takes = {name: argument("float32") for name in ("clicks", "user_age")}
    assert match_arguments(spec, takes) == {"clicks": "clicks", "user_age": "user age"}
    # A model need not use every feature.
    assert match_arguments(spec, {"clicks": argument("float32")}) == {"clicks": "clicks"}


def test_an_argument_that_is_no_feature_is_refused_with_the_nearest():
    spec = spec_of(clicks=feature("float32"), age=feature("float32"))
    with pytest.raises(
        UserError, match=r"'x' .* is not an input of the dataset; did you mean 'clicks'"
    ):
        match_arguments(spec, {"click": argument("float32")})

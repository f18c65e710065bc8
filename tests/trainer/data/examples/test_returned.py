"""Values that a function returns, as arrays that can be stored."""

import numpy as np
import pytest
import tensorflow as tf

from trainer.data.examples.returned import (
    UnsuitableError,
    as_said,
    dtype_of,
    example_of,
    leaf_for,
    stored,
    value_of,
)
from trainer.data.spec import FeatureSpec


@pytest.mark.parametrize(
    ("value", "dtype", "shape"),
    [
        (1, "int64", ()),
        (True, "bool", ()),
        (1.5, "float32", ()),
        (np.float64(1.5), "float32", ()),
        (np.uint8(3), "uint8", ()),
        ([1, 2], "int64", (2,)),
        ([[1.0], [2.0]], "float32", (2, 1)),
        ("text", "string", ()),
        (b"a\x00", "string", ()),
        (["a", "bc"], "string", (2,)),
        ([], "float32", (0,)),
        (np.array(["a"]), "string", (1,)),
        (tf.constant([1, 2]), "int32", (2,)),
        (tf.constant("a"), "string", ()),
    ],
)
def test_values(value, dtype, shape):
    found = value_of("x", value)
    assert (dtype_of(found), found.shape) == (dtype, shape)


def test_texts_are_their_bytes():
    assert value_of("x", "ä").item() == "ä".encode()
    assert value_of("x", b"\xff\x00").item() == b"\xff\x00"
    assert value_of("x", "\udcff").item() == b"\xff"


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (None, "gives None for 'x'"),
        ([1, None], "which cannot be stored"),
        ([[1], [1, 2]], "lists of different lengths"),
        ({1}, "type set"),
        (np.datetime64("2020-01-01"), "cannot be stored"),
        (1j, "complex128"),
    ],
)
def test_what_cannot_be_stored(value, what):
    with pytest.raises(UnsuitableError, match=what):
        value_of("x", value)


@pytest.mark.parametrize("result", [[1], "x", {1: 2}, {}])
def test_what_is_no_example(result):
    with pytest.raises(UnsuitableError, match="dict"):
        example_of(result)


@pytest.mark.parametrize(
    ("value", "said", "dtype"),
    [
        ("12", "int", "int64"),
        ("1.5", "float", "float32"),
        (12, "text", "string"),
        (1, "bool", "bool"),
        (1, "class", "int64"),
    ],
)
def test_a_type_that_is_said(value, said, dtype):
    assert dtype_of(as_said("x", value_of("x", value), said)) == dtype


def test_a_type_that_it_is_not():
    with pytest.raises(UnsuitableError, match="gives 'x' as string, which is no int"):
        as_said("x", value_of("x", "twelve"), "int")


def test_a_feature_holds_all_of_its_first_values():
    leaf = leaf_for("x", [value_of("x", [1, 2]), value_of("x", [0.5, 1.0, 2.0])])
    assert (leaf.shape, leaf.dtype) == ((None,), "float32")
    with pytest.raises(UnsuitableError, match="of shape"):
        leaf_for("x", [value_of("x", [1]), value_of("x", 1)])


def test_only_a_wider_type_is_made_of_a_value():
    spec = FeatureSpec(shape=(), dtype="float32", stored="float")
    assert stored("x", value_of("x", 1), spec, None).dtype == np.float32
    whole = FeatureSpec(shape=(), dtype="int64", stored="int")
    with pytest.raises(UnsuitableError, match="gives 'x' as float32, and the first examples as"):
        stored("x", value_of("x", 1.5), whole, None)

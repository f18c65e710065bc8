"""Tests that hashes depend only on the content of an example."""

import numpy as np
import pyarrow as pa
import pytest

from flotilla.trainer.features.statistics.hashing import hashes


def texts(*values):
    return pa.array(values, pa.large_binary())


def test_equal_examples_have_equal_hashes_wherever_they_are():
    columns = {"age": np.array([1.0, 2.0, 1.0]), "city": texts(b"a", b"b", b"a")}
    found = hashes(columns, 0)
    assert found[0] == found[2] != found[1]
    one = {name: values[1:2] for name, values in columns.items()}
    assert hashes(one, 0)[0] == found[1]
    assert hashes(dict(reversed(columns.items())), 0).tolist() == found.tolist()


def test_the_seed_makes_others():
    columns = {"age": np.arange(100.0)}
    assert not set(hashes(columns, 0).tolist()) & set(hashes(columns, 1).tolist())


def test_a_value_in_another_column_is_another_example():
    first = hashes({"a": np.array([1.0]), "b": np.array([2.0])}, 0)
    second = hashes({"a": np.array([2.0]), "b": np.array([1.0])}, 0)
    assert first[0] != second[0]


def test_gaps_in_a_column_change_no_other_hash():
    whole = hashes({"age": np.array([1, 2, 3])}, 0)
    gaps = hashes({"age": np.array([1.0, np.nan, 3.0])}, 0)
    assert whole[[0, 2]].tolist() == gaps[[0, 2]].tolist()


@pytest.mark.parametrize(
    "column",
    [
        np.arange(5000.0),
        np.arange(5000),
        np.arange(20_000).reshape(5000, 4) % 5003,
        texts(*[b"%d" % each for each in range(5000)]),
    ],
    ids=["floats", "integers", "rows", "texts"],
)
def test_different_values_have_different_hashes_evenly_spread(column):
    found = hashes({"x": column}, 3)
    assert len(set(found.tolist())) == 5000
    halves = (found > np.uint64(2**63)).mean()
    assert 0.47 < halves < 0.53

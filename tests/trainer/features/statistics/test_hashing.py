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
    assert not set(hashes(columns, 1).tolist()) & set(found.tolist())
    # Texts that repeat often are digested once each.
    often = {"age": np.tile([1.0, 2.0], 2000), "city": texts(*[b"a", b"b"] * 2000)}
    assert hashes(often, 0).tolist() == found[:2].tolist() * 2000


def test_columns_tell_values_apart_and_gaps_change_no_other_hash():
    first, second = (
        hashes({"a": np.array([a]), "b": np.array([b])}, 0) for a, b in ((1.0, 2.0), (2.0, 1.0))
    )
    assert first[0] != second[0]
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

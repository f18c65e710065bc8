"""Columns on disk: what was written is read back, in any parts, and NumPy reads the files."""

from __future__ import annotations

import numpy as np
import pytest

from trainer.evaluation import columns
from trainer.evaluation.columns import OTHER, Column


def written(path, batches):
    column = Column(path, sum(map(len, batches)))
    for batch in batches:
        column.add(batch)
    column.end()
    return column


@pytest.mark.parametrize("shape", [(), (3,), (2, 5)])
@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.bool_, np.uint8])
def test_values_come_back_in_order(tmp_path, shape, dtype):
    values = np.random.default_rng(0).integers(0, 2, (17, *shape)).astype(dtype)
    column = written(tmp_path / "folder" / "label.npy", [values[:5], values[5:6], values[6:]])
    np.testing.assert_array_equal(column.read(0, 17), values)
    np.testing.assert_array_equal(column.read(4, 9), values[4:9])
    np.testing.assert_array_equal(np.load(column.path, allow_pickle=False), values)


def test_texts_come_back(tmp_path):
    values = np.array([b"a", b"", b"b", b"a", "ö".encode()], dtype=object)
    column = written(tmp_path / "text.npy", [values[:3], values[3:]])
    assert column.read(0, 5).tolist() == values.tolist()
    assert column.read(3, 4).tolist() == [b"a"]


def test_the_first_of_endless_texts_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(columns, "MOST_TEXTS", 2)
    values = np.array([b"a", b"b", b"c", b"a", b"d"], dtype=object)
    column = written(tmp_path / "text.npy", [values])
    assert column.read(0, 5).tolist() == [b"a", b"b", OTHER, b"a", OTHER]


def test_a_part_of_wide_values_is_short(tmp_path):
    narrow = written(tmp_path / "narrow.npy", [np.zeros((4, 1), np.float32)])
    wide = written(tmp_path / "wide.npy", [np.zeros((4, 1 << 20), np.float32)])
    assert narrow.rows_at_once == columns.MOST_ROWS
    assert wide.rows_at_once == 4

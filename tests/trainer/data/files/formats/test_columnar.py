"""Tests that Parquet files that would need too much memory are read in blocks or rejected."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flotilla.trainer.data.files.formats import columnar, raw_rows
from flotilla.trainer.data.files.formats.columnar import ParquetReader
from flotilla.trainer.data.files.formats.raw_rows import Piece
from flotilla.trainer.runtime.errors import UserError

LONG = "x" * 100_000


@pytest.fixture
def blocks(tmp_path, monkeypatch):
    """Return a function that counts a table's blocks and measures the largest one, in bytes."""
    monkeypatch.setattr(columnar, "BLOCK_BYTES", 1 << 20)

    def written(values, **how):
        path = tmp_path / "a.parquet"
        pq.write_table(pa.table({"a": values}), path, compression="zstd", **how)
        assert path.stat().st_size < 60_000
        found = [each.table for each in ParquetReader().rows(path, Piece(0), ["a"], print)]
        assert pa.concat_tables(found).column("a").to_pylist() == list(values)
        return len(found), max(each.nbytes for each in found)

    return written


@pytest.mark.parametrize("value", [LONG, [LONG, ""]], ids=["flat", "list"])
def test_a_long_value_that_comes_again_is_read_in_small_blocks(blocks, value):
    count, most = blocks([value] * 200, dictionary_pagesize_limit=1 << 20)
    assert count > 15
    assert most < 2 << 20


def test_values_that_differ_from_the_one_before_are_read_in_small_blocks(blocks):
    count, _ = blocks([LONG] * 200, use_dictionary=False, column_encoding={"a": "DELTA_BYTE_ARRAY"})
    assert count > 3


def test_short_values_that_come_again_are_read_at_once_or_as_asked(blocks, monkeypatch):
    assert blocks(["no", "yes"] * 5000)[0] == 1
    assert blocks([0] * 10_000)[0] == 1
    monkeypatch.setattr(ParquetReader, "at_once", 2500)
    assert blocks([0] * 10_000)[0] == 4


@pytest.mark.parametrize(
    "values", [[b"\0" * 100_000] * 200, [np.zeros(20_000)] * 200], ids=["zeros", "lists"]
)
def test_what_expands_beyond_measure_is_one_line(blocks, monkeypatch, values):
    monkeypatch.setattr(columnar, "FREE_BYTES", 8 << 20)
    with pytest.raises(UserError, match="expands to more than 200 times its size"):
        blocks(values, use_dictionary=not isinstance(values[0], bytes))


def test_records_are_held_by_their_number_and_by_their_bytes(monkeypatch):
    monkeypatch.setattr(raw_rows, "BLOCK_BYTES", 100)
    read = 0

    def records():
        nonlocal read
        for size in (1, 1, 1, 1, 200, 1, 1):
            read += size
            yield size

    found = list(raw_rows._blocks(records(), 3, lambda: read))
    assert found == [[1, 1, 1], [1, 200], [1, 1]]

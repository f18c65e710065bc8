"""Tests the blocks of Parquet files, and `numpy.savez` files as tables."""

import io
import pickle
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flotilla.trainer.config.data import ImageConfig
from flotilla.trainer.data.files.formats import columnar, raw_rows
from flotilla.trainer.data.files.formats.columnar import NpzReader, ParquetReader
from flotilla.trainer.data.files.formats.raw_rows import END, Piece
from flotilla.trainer.data.files.pictures import Pictures
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


def read(path, piece=None, columns=()):
    return [each.table for each in NpzReader().rows(path, piece or Piece(0), columns, print)]


@pytest.fixture
def write(tmp_path):
    def written(save=np.savez, **columns):
        save(tmp_path / "a.npz", **columns)
        return tmp_path / "a.npz"

    return written


@pytest.mark.parametrize(
    ("values", "kind", "first"),
    [
        (np.array([7, 8], np.uint8), "uint8", 7),
        (np.array([7, 8], ">i4"), "int32", 7),
        (np.array([[7], [8]]), "int64", 7),
        (np.array([0.5, 1], np.float16), "float", 0.5),
        (np.array([True, False]), "bool", True),
        (np.array(["ü", "b"]), "string", "ü"),
        (np.array([b"u", b"b"]), "binary", b"u"),
        (np.arange(4.0).reshape(2, 2), "fixed_size_list<item: double>[2]", [0, 1]),
        (np.arange(4).reshape(2, 2).T, "fixed_size_list<item: int64>[2]", [0, 2]),
        (
            np.arange(8, dtype=np.float32).reshape(2, 2, 2),
            "fixed_size_list<item: fixed_size_list<item: float>[2]>[2]",
            [[0, 1], [2, 3]],
        ),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_array_is_a_column(write, save, values, kind, first):
    (table,) = read(write(save, a=values))
    assert str(table["a"].type) == kind
    assert table["a"][0].as_py() == first
    assert len(table) == 2


@pytest.mark.parametrize("unit", ["D", "M", "s", "ns"])
def test_times(write, unit):
    (table,) = read(write(a=np.array(["2024-03-01", "NaT"], f"datetime64[{unit}]")))
    assert [each and each.year for each in table["a"].to_pylist()] == [2024, None]


@pytest.mark.parametrize("shape", [(3, 4, 5), (3, 4, 5, 1), (3, 4, 5, 3)])
def test_bytes_of_the_shape_of_images_are_images(write, shape):
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    (table,) = read(write(a=pixels, b=np.zeros(shape)))
    pictures = Pictures(ImageConfig(), "", {})
    size = (4, 5, shape[3] if len(shape) > 3 else 1)
    assert [pictures.measure(each) for each in table["a"].to_pylist()] == [size] * 3
    assert str(table["b"].type).startswith("fixed_size_list")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_pieces_and_blocks_are_the_rows_in_their_order(write, save, monkeypatch):
    values = np.arange(1000).reshape(100, 10)
    path = write(save, x=values, y=np.arange(100), z=np.asfortranarray(values))
    monkeypatch.setattr(columnar, "BLOCK_BYTES", 1000)
    pieces = [Piece(0, *each) for each in NpzReader().cut(path, 5000)]
    assert [pieces[0].start, pieces[-1].stop] == [0, END]
    assert len(pieces) > 2
    found = [table for piece in pieces for table in read(path, piece, ["z", "x", "y"])]
    assert len(found) > len(pieces)
    for name in "xz":
        assert [row for each in found for row in each[name].to_pylist()] == values.tolist()
    assert [row for each in found for row in each["y"].to_pylist()] == list(range(100))
    numbers = [each.numbers for each in NpzReader().rows(path, pieces[1], ["y"], print)]
    assert NpzReader().row(path, pieces[1], int(numbers[0][0])) == pieces[1].start + 1


class Trap:
    def __reduce__(self):
        return (pytest.fail, ("an object of the file was loaded",))


def object_file(path):
    with zipfile.ZipFile(path, "w") as archive, archive.open("a.npy", "w") as file:
        header = {"descr": "|O", "fortran_order": False, "shape": (1,)}
        np.lib.format.write_array_header_1_0(file, header)
        file.write(pickle.dumps(Trap()))


def cut_off(path):
    whole = io.BytesIO()
    np.lib.format.write_array(whole, np.arange(100))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.npy", whole.getvalue()[:-8])


def broken_content(path):
    np.savez_compressed(path, a=np.arange(10_000))
    data = bytearray(path.read_bytes())
    data[2000:2100] = bytes(100)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"a": np.zeros(3), "b": np.zeros((2, 3))}, "has 3 rows of 'a' and 2 of 'b'; save arrays"),
        ({"a": np.zeros(3), "b": np.array(5)}, "array 'b' of .* is a single value and has no rows"),
        ({"a": np.zeros(3, complex)}, "array 'a' of .* is complex128, which cannot be read"),
        ({"a": np.zeros(3, [("x", int)])}, "cannot be read; save it as numbers"),
        ({"a": np.zeros(3, "m8[s]")}, "cannot be read; save it as numbers"),
        ({"a": np.zeros(3, np.longdouble)}, "cannot be read; save it as numbers"),
        ({}, "has no array; write it with numpy.savez"),
        (object_file, "array 'a' of .* contains pickled objects, which are never loaded"),
        (cut_off, "not a valid numpy.savez file, or is truncated"),
        (broken_content, "not a valid numpy.savez file, or is truncated"),
        (lambda path: path.write_bytes(b"PK\x03\x04"), "not a valid numpy.savez file"),
        (lambda path: path.write_bytes(b""), "not a valid numpy.savez file"),
    ],
)
def test_what_is_no_table_is_one_line(tmp_path, given, words):
    path = tmp_path / "a.npz"
    if callable(given):
        given(path)
    else:
        np.savez(path, **given)
    with pytest.raises(UserError, match=words) as caught:
        read(path)
    assert "\n" not in str(caught.value)


def test_a_bomb_is_one_line(write, monkeypatch):
    monkeypatch.setattr(columnar, "FREE_BYTES", 1 << 20)
    with pytest.raises(UserError, match="expands to more than 200 times its size"):
        read(write(np.savez_compressed, a=np.zeros(1 << 20)))

"""Tests files as a source: reading, type inference, splits, omitted columns and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

from flotilla.trainer.runtime.errors import UserError
from tests.trainer.data.files.sources import opened, picture, read, sizes, source


def write(folder: Path, text: str, name: str = "a.csv") -> None:
    (folder / name).write_bytes(text.encode())


def table(rows: int, start: int = 0) -> str:
    lines = (f"{i},{i / 3:.3f},c{i % 4},{'yes' if i % 3 else 'no'}" for i in range(start, rows))
    return "\n".join(["a,b,city,label", *lines]) + "\n"


def test_csv_types_roles_and_values(tmp_path: Path) -> None:
    write(tmp_path, table(600))
    selection, found = opened(tmp_path)
    assert selection.inputs == ("a", "b", "city")
    assert selection.targets == ("label",)
    assert [spec.dtype for spec in selection.specs.values()] == [
        "int64", "float32", "string", "int64",
    ]  # fmt: skip
    assert selection.specs["label"].labels == ("no", "yes")
    assert sorted(found["a"].tolist()) == list(range(600))
    order = np.argsort(found["a"])
    assert found["city"][order][:5].tolist() == [b"c0", b"c1", b"c2", b"c3", b"c0"]
    assert found["label"][order][:4].tolist() == [0, 1, 1, 0]
    assert 30 < sizes(found)["test"] < 90
    assert 30 < sizes(found)["validation"] < 90


def test_no_group_leaks(tmp_path: Path) -> None:
    rows = "".join(f"{i},u{i % 40},{i % 2}\n" for i in range(2000))
    write(tmp_path, "x,user,label\n" + rows)
    selection, found = opened(tmp_path, splits={"group": "user"}, validation=0.2)
    assert selection.inputs == ("x",)
    assert len(set(zip(found["user"].tolist(), found["split"], strict=True))) == 40
    assert len(sizes(found)) == 3


def test_the_latest_are_the_test_and_ties_stay_together(tmp_path: Path) -> None:
    days = "".join(f"{i},2024-01-{1 + i // 40:02d},{i / 2}\n" for i in range(400))
    write(tmp_path, "x,day,label\n" + days)
    _, found = opened(tmp_path, splits={"time": "day"}, validation=0.1)
    days_of = {
        split: {
            day for day, each in zip(found["day"], found["split"], strict=True) if each == split
        }
        for split in ("train", "validation", "test")
    }
    assert max(days_of["train"]) < min(days_of["validation"])
    assert max(days_of["validation"]) < min(days_of["test"])
    assert [len(each) for each in days_of.values()] == [8, 1, 1]


def test_a_column_says_the_split(tmp_path: Path) -> None:
    write(tmp_path, "x,part,label\n1,train,0\n2,val,1\n3,TEST,0\n4,train,1\n")
    selection, found = opened(tmp_path, splits={"column": "part"})
    assert dict(zip(found["x"].tolist(), found["split"], strict=True)) == {
        1: "train", 2: "validation", 3: "test", 4: "train",
    }  # fmt: skip
    assert selection.inputs == ("x",)


def test_types_are_inferred_over_all_rows(tmp_path: Path) -> None:
    rows = [f"{i},{i},1\n" for i in range(200_000)]
    rows[-1] = "1.5,,0\n"
    write(tmp_path, "a,b,label\n" + "".join(rows))
    selection, found = opened(tmp_path)
    assert selection.specs["a"].dtype == selection.specs["b"].dtype == "float32"
    assert np.isnan(found["b"]).sum() == 1


def test_no_weight_or_time_is_advised_to_be_a_text(tmp_path: Path) -> None:
    write(tmp_path, "a,w,label\n" + "".join(f"{i},{i if i else 'heavy'},0\n" for i in range(30)))
    for keys in ({"weight": "w"}, {"splits": {"time": "w"}}):
        with pytest.raises(
            UserError, match=r"row 2: 'heavy'\); correct them, or set data\.bad_rows"
        ):
            opened(tmp_path, **keys)


def test_a_column_of_mixed_types_is_refused_by_its_first_rows(tmp_path: Path) -> None:
    rows = [f"{i},0\n" for i in range(100)]
    rows[4], rows[7] = "four,0\n", "seven,1\n"
    write(tmp_path, "a,label\n" + "".join(rows))
    with pytest.raises(UserError) as refused:
        opened(tmp_path)
    assert str(refused.value) == (
        "data.types: the column 'a' has mixed types: 98 numbers and 2 other values "
        "(a.csv, row 6: 'four', a.csv, row 9: 'seven'); set data.types: {a: text}, or "
        "data.bad_rows to the share of rows that may be skipped"
    )
    selection, _ = opened(tmp_path, types={"a": "text"})
    assert selection.specs["a"].dtype == "string"


def test_a_few_texts_among_times_are_refused_by_their_rows(tmp_path: Path) -> None:
    rows = [f"2025-01-{i % 28 + 1:02d},0\n" for i in range(100)]
    rows[4], rows[7] = "pending,0\n", "31.12.2025,1\n"
    write(tmp_path, "a,label\n" + "".join(rows))
    with pytest.raises(UserError) as refused:
        opened(tmp_path)
    assert "98 times and 2 other values (a.csv, row 6: 'pending', a.csv, row 9:" in str(
        refused.value
    )
    selection, found = opened(tmp_path, bad_rows=0.1)
    assert (selection.specs["a"].dtype, len(found["a"])) == ("float64", 98)


@pytest.mark.parametrize(
    ("others", "says"),
    [
        (
            ["31.12.2025"],
            "'a' has dates or times of day, such as '31.12.2025', and is read",
        ),
        (["<0.5", "withheld"], "'a' has 70 numbers and 30 other values, such as '<0.5', and is"),
        (["7 kg", "9 lb"], "such as '7 kg', and is read as text; write all of them in one unit"),
    ],
)
def test_a_column_that_is_read_as_text_is_said(
    tmp_path: Path, others: list[str], says: str
) -> None:
    one = "2025-01-{:02d}" if "31" in others[0] else "{}.5 kg" if "kg" in others[0] else "{}.5"
    rows = [one.format(i % 28 + 1) if i % 10 > 2 else others[i % len(others)] for i in range(100)]
    write(tmp_path, "a,label\n" + "".join(f"{each},{i % 2}\n" for i, each in enumerate(rows)))
    made = source(tmp_path)
    assert made.select().specs["a"].dtype == "string"
    (note,) = made.notes()
    assert says in note
    assert "set data.types: {a: text} if they are texts" in note
    made = source(tmp_path, types={"a": "text"})
    made.select()
    assert not made.notes()


def test_broken_rows_are_counted_and_left_out_up_to_a_share(tmp_path: Path) -> None:
    rows = [f'{i},"t\n{i}",{i % 2}\n' for i in range(100)]
    rows[2], rows[5], rows[50], rows[60] = "2,x\n", "five,x,1\n", "1,x,\n", "1,2,3,4\n"
    write(tmp_path, "a,t,label\n" + "".join(rows))
    with pytest.raises(UserError) as refused:
        opened(tmp_path, bad_rows=0.01)
    assert "3 of 100 rows are broken" in str(refused.value)
    assert "a.csv, row 6: 2 values for 3 columns" in str(refused.value)
    assert "a.csv, row 11: 'a' is not of type int ('five')" in str(refused.value)
    made = source(tmp_path, bad_rows=0.1)
    selection = made.select()
    assert len(read(made, selection)["a"]) == 96
    assert made.facts()["bad_rows"]["count"] == 3
    assert made.facts()["unlabelled_rows"] == 1
    assert "data.bad_rows: 3 of " in made.notes()[-1]


def test_parquet_takes_types_from_the_schema(tmp_path: Path) -> None:
    rows = pa.table(
        {
            "a": pa.array([None, *range(1, 100)]),
            "tags": pa.array([f"t{i % 3}" for i in range(100)]).dictionary_encode(),
            "v": pa.array([[1.0, i] for i in range(100)]),
            "deep": pa.array([{"u": i, "w": {"z": str(i)}} for i in range(100)]),
            "target": pa.array([i / 7 for i in range(100)]),
        }
    )
    pq.write_table(rows, tmp_path / "a.parquet", row_group_size=30)
    pq.write_table(rows.select([4, 3, 2, 1, 0]), tmp_path / "b.parquet")
    selection, found = opened(tmp_path)
    assert selection.inputs == ("a", "tags", "v", "deep/u", "deep/w/z")
    assert {name: (spec.dtype, spec.shape) for name, spec in selection.specs.items()} == {
        "a": ("float32", ()),
        "tags": ("string", ()),
        "v": ("float32", (2,)),
        "deep/u": ("int64", ()),
        "deep/w/z": ("string", ()),
        "target": ("float32", ()),
    }
    assert len(found["a"]) == 200
    assert np.isnan(found["a"]).sum() == 2
    assert sorted(set(found["v"][:, 1].tolist())) == list(range(100))
    (tmp_path / "b.parquet").write_bytes((tmp_path / "b.parquet").read_bytes()[:-20])
    with pytest.raises(UserError, match=r"b\.parquet is not a valid Parquet file"):
        opened(tmp_path)


DAYS = "x,day,label\n" + "".join(f"{i},monday,{i % 2}\n" for i in range(9))
WEIGHTS = "x,y,w\n" + "".join(f"{i},1.5,{('low', 'high')[i % 2]}\n" for i in range(60))
CLOSE = "x,y\n" + "".join(f"{i},17000000000{i:02d}.5\n" for i in range(60))


@pytest.mark.parametrize(
    ("text", "keys", "message"),
    [
        ("a,b,price\n1,2,0\n", {}, r"set data.label .* perhaps 'price' \(one of a, b, pr"),
        (
            "x,part,label\n1,train,0\n2,test,1\n3,dev,0\n4,live,1\n",
            {"splits": {"column": "part"}},
            r"^data\.splits\.column: 'live' is not a split \(.*a\.csv, row 5",
        ),
        (
            DAYS,
            {"splits": {"time": "day"}},
            r"data\.splits\.time: 'day' of .* contains no times .*'monday'",
        ),
        ("a,label\n", {}, "has no rows; set data.source to files"),
        (
            # There is no share of broken rows to allow.
            "x,label\n" + "inf,0\ninf,1\n" * 4,
            {"label": "x"},
            r"8 of 8 rows are broken(?!.*set data\.bad_rows)",
        ),
        (
            WEIGHTS,
            {"label": "y", "weight": "w"},
            r"data\.weight: 'w' of .* contains no numbers .*'low'",
        ),
        (CLOSE, {"label": "y"}, r"data\.label: the values of 'y' are between 1700000000000\.5"),
    ],
)
def test_what_cannot_be_used_is_refused(tmp_path, text, keys, message):
    write(tmp_path, text)
    with pytest.raises(UserError, match=message):
        opened(tmp_path, **keys)


def test_a_column_that_one_file_lacks_is_named(tmp_path: Path) -> None:
    write(tmp_path, "a,b,label\n1,2,0\n")
    write(tmp_path, "a,label\n1,0\n", "z.csv")
    with pytest.raises(UserError, match=r"z\.csv has no column 'b', which other files have"):
        opened(tmp_path)


def test_integers_keep_their_type_up_to_64_bits(tmp_path: Path) -> None:
    most, least = 2**63 - 1, -(2**63)
    rows = [(most, most + 1, 0), (least, 7, 1), (1, 8, 0)] * 20
    write(tmp_path, "a,b,label\n" + "".join(f"{a},{b},{c}\n" for a, b, c in rows))
    selection, found = opened(tmp_path)
    assert [selection.specs[each].dtype for each in "ab"] == ["int64", "string"]
    assert set(found["a"].tolist()) == {most, least, 1}
    assert set(found["b"].tolist()) == {str(most + 1).encode(), b"7", b"8"}


def write_json(folder: Path, records: list[Any], name: str = "a.jsonl") -> None:
    lines = (each if isinstance(each, str) else json.dumps(each) for each in records)
    (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_json_lines_have_nested_keys_lists_and_gaps(tmp_path: Path) -> None:
    rows = [
        {"a": i, "in": {"b": i / 2, "t": f"ü{i}"}, "v": [1, i], "label": "xy"[i % 2]}
        for i in range(60)
    ]
    del rows[3]["a"]
    rows[50]["late"] = True
    write_json(tmp_path, rows)
    selection, found = opened(tmp_path)
    assert {name: (spec.dtype, spec.shape) for name, spec in selection.specs.items()} == {
        "a": ("float32", ()),
        "in/b": ("float32", ()),
        "in/t": ("string", ()),
        "v": ("int64", (2,)),
        "label": ("int64", ()),
        "late": ("float32", ()),
    }
    assert np.isnan(found["a"]).sum() == 1
    assert np.isnan(found["late"]).sum() == 59
    assert "ü7".encode() in found["in/t"].tolist()


def test_broken_lines_are_named(tmp_path: Path) -> None:
    rows: list[Any] = [{"a": i, "label": i % 2} for i in range(50)]
    rows[4], rows[9], rows[11] = '{"a": 1', '{"a": "\\ud800"}', {"a": "x", "label": 1}
    write_json(tmp_path, rows)
    with pytest.raises(UserError) as refused:
        opened(tmp_path, bad_rows=0.01)
    assert "3 of 50 rows are broken" in str(refused.value)
    assert "a.jsonl, row 5: it is not JSON" in str(refused.value)
    assert "a.jsonl, row 10: it contains an unpaired surrogate" in str(refused.value)
    assert "a.jsonl, row 12: 'a' is not of type int ('x')" in str(refused.value)
    made = source(tmp_path, bad_rows=0.1)
    selection = made.select()
    assert len(read(made, selection)["a"]) == 47


def test_labels_of_several_lengths_need_a_shape(tmp_path: Path) -> None:
    write_json(tmp_path, [{"v": i, "label": [1.0] * (2 + i % 3)} for i in range(30)])
    with pytest.raises(UserError, match=r"set data\.shapes: \{label: \[4\]\}"):
        opened(tmp_path)


def example(**features: Any) -> bytes:
    def feature(value: Any) -> tf.train.Feature:
        if isinstance(value[0], bytes):
            return tf.train.Feature(bytes_list=tf.train.BytesList(value=value))
        if isinstance(value[0], float):
            return tf.train.Feature(float_list=tf.train.FloatList(value=value))
        return tf.train.Feature(int64_list=tf.train.Int64List(value=value))

    named = {name: feature(value) for name, value in features.items() if value}
    return tf.train.Example(features=tf.train.Features(feature=named)).SerializeToString()


def records(path: Path, rows: list[bytes]) -> None:
    with tf.io.TFRecordWriter(str(path)) as writer:
        for row in rows:
            writer.write(row)


def test_records_of_examples(tmp_path: Path) -> None:
    rows = [
        example(x=[float(i)], n=[i] if i else [], v=[0.5, float(i)], t=[b"t"], label=[i % 3])
        for i in range(40)
    ]
    records(tmp_path / "a.tfrecord", rows)
    selection, found = opened(tmp_path)
    assert {name: (spec.dtype, spec.shape) for name, spec in selection.specs.items()} == {
        "label": ("int64", ()),
        "n": ("float32", ()),
        "t": ("string", ()),
        "v": ("float32", (2,)),
        "x": ("float32", ()),
    }
    assert selection.specs["label"].labels == ("0", "1", "2")
    assert sorted(found["v"][:, 1].tolist()) == list(range(40))
    assert np.isnan(found["n"]).sum() == 1
    assert (found["label"] == found["x"].astype(int) % 3).all()


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    records(path, [example(x=[1.0], label=[i % 2]) for i in range(200)])
    data = bytearray(path.read_bytes())
    size = len(data) // 200
    data[size * 150 + 20] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"a\.tfrecord, record 151 cannot be read: its checksum"):
        opened(tmp_path)
    path.write_bytes(data[: size * 120 - 3])
    with pytest.raises(UserError, match=r"a\.tfrecord, record 120 cannot be read: it is truncated"):
        opened(tmp_path)


def folder(root: Path, count: int = 60) -> Path:
    for i in range(count):
        picture(root / "ab"[i % 2] / f"{i}.png", i * 3)
    return root


def test_a_folder_by_class(tmp_path: Path) -> None:
    selection, found = opened(folder(tmp_path))
    assert selection.inputs == ("image",)
    assert selection.specs["image"].shape == (6, 8, 1)
    assert selection.specs["image"].stored == "raw"
    assert selection.specs["label"].labels == ("a", "b")
    values = found["image"][:, 3, 3, 0].astype(int)
    assert sorted(values.tolist()) == sorted(i * 3 for i in range(60))
    assert (values // 3 % 2 == found["label"]).all()
    assert len(sizes(found)) == 3
    assert 0 < found["label"][:30].sum() < 30


def test_images_of_several_sizes_need_one(tmp_path: Path) -> None:
    picture(folder(tmp_path) / "b" / "x.png", 9, (20, 10))
    with pytest.raises(UserError, match=r"several sizes, such as \[6, 8\] and \[10, 20\]"):
        opened(tmp_path)
    selection, found = opened(tmp_path, image={"size": [10, 12], "channels": 1})
    assert selection.specs["image"].stored == "image"
    assert found["image"][0].startswith(b"\x89PNG")


def test_a_corrupt_image_is_named(tmp_path: Path) -> None:
    folder(tmp_path)
    whole = (tmp_path / "a" / "0.png").read_bytes()
    (tmp_path / "a" / "0.png").write_bytes(whole[:50])
    (tmp_path / "b" / "7.png").write_text("no image")
    with pytest.raises(UserError, match=r"2 of 60 rows are broken.*b/7\.png: 'image' cannot be de"):
        opened(tmp_path)
    made = source(tmp_path, bad_rows=0.05)
    selection = made.select()
    assert len(read(made, selection)["label"]) == 58
    sized = source(tmp_path, image={"size": [6, 8]})
    with pytest.raises(UserError, match=r"rows are broken.*png: 'image' cannot be decoded"):
        read(sized, sized.select())


def test_an_image_without_a_class_is_refused(tmp_path: Path) -> None:
    picture(folder(tmp_path) / "x.png", 9)
    with pytest.raises(UserError, match=r"the image x\.png is not in a class folder"):
        opened(tmp_path)


def test_a_table_of_paths(tmp_path: Path) -> None:
    folder(tmp_path / "img")
    rows = [f"img/{'ab'[i % 2]}/{i}.png,{i / 4}\n" for i in range(60)]
    rows[5] = "img/none.png,3\n"
    (tmp_path / "t.csv").write_text("file,label\n" + "".join(rows))
    with pytest.raises(
        UserError, match=r"t\.csv, row 7: 'file' cannot be decoded: there is no such"
    ):
        opened(tmp_path, format="csv", types={"file": "image"})
    selection, found = opened(
        tmp_path, format="csv", types={"file": "image", "label": "float"}, bad_rows=0.1
    )
    assert selection.specs["file"].shape == (6, 8, 1)
    assert found["file"].shape == (59, 6, 8, 1)


@pytest.mark.parametrize("name", ["[0]", "[]", "[1, 2]"])
def test_a_class_may_be_written_as_a_list_is(tmp_path, name):
    rows = [
        f"{number}.5,{['a', 'b', chr(34) + name + chr(34)][number % 3]}" for number in range(30)
    ]
    (tmp_path / "t.csv").write_text("\n".join(["x,y", *rows]))
    found = source(tmp_path, label="y").select().specs["y"]
    assert (found.num_classes, set(found.labels)) == (3, {"a", "b", name})


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("-9223372036854775809", "string"), ("9223372036854775808", "string"), ("7e-42", "float64"),
        ("1700000000.25", "float64"), ("16777217", "int64"), ("0.5", "float32"),
    ],
)  # fmt: skip
def test_a_column_has_a_type_that_holds_its_digits(tmp_path, text, dtype):
    zero = "0" if "." not in text and "e" not in text else "0.0"
    write(
        tmp_path, "x,n,label\n" + "".join(f"{i},{zero if i else text},{i % 2}\n" for i in range(60))
    )
    selection, found = opened(tmp_path)
    assert selection.specs["n"].dtype == dtype
    assert (text.encode() if dtype == "string" else float(text)) in found["n"].tolist()


@pytest.mark.parametrize(
    ("value", "keys"),
    [("{i}", {"bad_rows": 0.1}), ('"{i},000"', {"types": {"t": "number"}, "bad_rows": 0.1})],
)
def test_a_time_that_is_none_takes_no_others_with_it(tmp_path, value, keys):
    rows = "".join(f"{value.format(i=i)},{i},{i % 2}\n" for i in range(1, 60))
    write(tmp_path, f"t,x,label\n{rows}abc,60,1\n")
    _, found = opened(tmp_path, splits={"time": "t", "test": 0.2}, **keys)
    assert sizes(found)["test"] == 12


def test_lists_that_would_lose_digits_are_refused(tmp_path: Path) -> None:
    rows = [{"v": [2**64 - 1, i], "label": i % 2} for i in range(60)]
    kinds = {"v": pa.list_(pa.uint64()), "label": pa.int64()}
    pq.write_table(pa.Table.from_pylist(rows, pa.schema(kinds)), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"'v' has lists of whole numbers .* set data.drop"):
        opened(tmp_path, format="parquet")


def test_a_partition_goes_before_a_key_of_its_name(tmp_path: Path) -> None:
    lines = [{"x": i, "label": i % 2} | ({"k": "z"} if i == 1500 else {}) for i in range(1600)]
    (tmp_path / "k=a").mkdir()
    write(tmp_path / "k=a", "\n".join(map(json.dumps, lines)), "a.jsonl")
    _, found = opened(tmp_path, format="jsonl", inputs=["x", "k"])
    assert set(found["k"].tolist()) == {b"a"}


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_weight_below_zero_names_its_row(tmp_path, form):
    weights = pa.array([-1.0 if i == 7 else 1.0 for i in range(60)], pa.float32())
    table = pa.table({"x": range(60), "label": [i % 2 for i in range(60)], "w": weights})
    save = {"csv": arrow_csv.write_csv, "parquet": pq.write_table}[form]
    save(table, tmp_path / f"a.{form}")
    row = rf"a\.{form}, row {9 if form == 'csv' else 8}"
    with pytest.raises(UserError, match=rf"{row}: 'w' is negative or not a number \('-1"):
        opened(tmp_path, weight="w")
    made = source(tmp_path, weight="w", bad_rows=0.1)
    assert len(read(made, made.select())["x"]) == 59
    assert "data.bad_rows: 1 of 60 rows are broken and skipped" in " ".join(made.notes())

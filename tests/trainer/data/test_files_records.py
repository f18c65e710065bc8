from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.trainer.data.files.sources import opened, read, source
from trainer.errors import UserError


def write(folder: Path, records: list[Any], name: str = "a.jsonl") -> None:
    lines = (each if isinstance(each, str) else json.dumps(each) for each in records)
    (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_json_lines_have_nested_keys_lists_and_gaps(tmp_path: Path) -> None:
    rows = [
        {"a": i, "in": {"b": i / 2, "t": f"ü{i}"}, "v": [1, i], "label": "xy"[i % 2]}
        for i in range(60)
    ]
    del rows[3]["a"]
    rows[50]["late"] = True
    write(tmp_path, rows)
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
    rows[4], rows[9], rows[11] = '{"a": 1', "[1]", {"a": "x", "label": 1}
    write(tmp_path, rows)
    with pytest.raises(UserError) as refused:
        opened(tmp_path, bad_rows=0.01)
    assert "3 of 50 rows are broken" in str(refused.value)
    assert "a.jsonl, row 5: it is no JSON" in str(refused.value)
    assert "a.jsonl, row 10: it is a list, and no object" in str(refused.value)
    assert "a.jsonl, row 12: 'a' is no int ('x')" in str(refused.value)
    made = source(tmp_path, bad_rows=0.1)
    selection = made.select()
    assert len(read(made, selection)["a"]) == 47


def test_lists_of_several_lengths_need_a_shape(tmp_path: Path) -> None:
    write(tmp_path, [{"v": [1.0] * (2 + i % 3), "label": i % 2} for i in range(30)])
    with pytest.raises(UserError, match=r"set data\.shapes: \{v: \[4\]\}"):
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
    with pytest.raises(UserError, match=r"a\.tfrecord, record 120 cannot be read: it is cut off"):
        opened(tmp_path)


def test_half_a_pair_of_surrogates_is_a_broken_line(tmp_path: Path) -> None:
    lines = [json.dumps({"x": f"a{i}", "label": i % 2}) for i in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, '{"x": "\\ud800", "label": 1}']) + "\n")
    with pytest.raises(UserError, match=r"a\.jsonl, row 41.*half of a pair of surrogates"):
        opened(tmp_path)

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.trainer.data.files.sources import opened, read, sizes, source
from trainer.errors import ConfigError, UserError


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


def test_an_example_keeps_its_split_when_others_come(tmp_path: Path) -> None:
    write(tmp_path, table(300))
    _, before = opened(tmp_path)
    write(tmp_path, table(900, 300), "b.csv")
    _, after = opened(tmp_path)
    later = dict(zip(after["a"].tolist(), after["split"], strict=True))
    assert [later[a] for a in before["a"].tolist()] == before["split"]


def test_equal_inputs_stay_in_one_split(tmp_path: Path) -> None:
    write(tmp_path, "x,label\n" + "".join(f"{i % 50},{i % 7}\n" for i in range(5000)))
    _, found = opened(tmp_path)
    assert len(set(zip(found["x"].tolist(), found["split"], strict=True))) == 50


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


def test_broken_rows_are_counted_and_left_out_up_to_a_share(tmp_path: Path) -> None:
    rows = [f'{i},"t\n{i}",{i % 2}\n' for i in range(100)]
    rows[2], rows[5], rows[50], rows[60] = "2,x\n", "five,x,1\n", "1,x,\n", "1,2,3,4\n"
    write(tmp_path, "a,t,label\n" + "".join(rows))
    with pytest.raises(UserError) as refused:
        opened(tmp_path, bad_rows=0.01)
    assert "4 of 100 rows are broken" in str(refused.value)
    assert "a.csv, row 6: 2 values for 3 columns" in str(refused.value)
    assert "a.csv, row 11: 'a' is no int ('five')" in str(refused.value)
    made = source(tmp_path, bad_rows=0.1)
    selection = made.select()
    assert len(read(made, selection)["a"]) == 96
    assert made.facts()["bad_rows"]["count"] == 4


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


def test_a_parquet_file_that_was_cut_off_is_one_line(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1, 2], "label": [0, 1]}), tmp_path / "a.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "b.parquet").write_bytes(whole[:-20])
    with pytest.raises(UserError, match=r"b\.parquet is no parquet file that can be read"):
        opened(tmp_path)


def test_a_column_that_one_file_lacks_is_named(tmp_path: Path) -> None:
    write(tmp_path, "a,b,label\n1,2,0\n")
    write(tmp_path, "a,label\n1,0\n", "z.csv")
    with pytest.raises(UserError, match=r"z\.csv has no column 'b', which others have"):
        opened(tmp_path)


def test_without_a_label_the_columns_are_listed(tmp_path: Path) -> None:
    write(tmp_path, "a,b,price\n1,2,0\n")
    with pytest.raises(ConfigError, match=r"set data.label .* perhaps 'price' \(one of a, b, pr"):
        opened(tmp_path)


def test_what_a_scan_found_is_remembered(tmp_path: Path) -> None:
    write(tmp_path, table(50))
    made = source(tmp_path)
    first = made.select()
    again = pickle.loads(pickle.dumps(source(tmp_path)))
    again.restore(pickle.loads(pickle.dumps(made.state())))
    (tmp_path / "a.csv").rename(tmp_path / "gone")
    assert again.select() == first


def refused(folder: Path, text: str, **keys: Any) -> str:
    write(folder, text)
    with pytest.raises(UserError) as found:
        opened(folder, **keys)
    return str(found.value)


def test_a_split_that_none_is_called_is_named_with_its_row(tmp_path: Path) -> None:
    rows = "x,part,label\n1,train,0\n2,test,1\n3,dev,0\n4,live,1\n"
    line = refused(tmp_path, rows, splits={"column": "part"})
    assert line.startswith("data.splits.column: 'live' names no split (")
    assert "a.csv, row 5" in line


def test_times_that_are_none_are_refused_with_their_places(tmp_path: Path) -> None:
    rows = "x,day,label\n" + "".join(f"{i},monday,{i % 2}\n" for i in range(9))
    line = refused(tmp_path, rows, splits={"time": "day"})
    assert "data.splits.time: 'day' of" in line
    assert "holds no times" in line
    assert "'monday'" in line


def test_a_label_without_any_value_is_refused(tmp_path: Path) -> None:
    rows = "x,label\n" + "1,\n" * 9
    assert "'label' has no value in any row; name another column" in refused(tmp_path, rows)


def test_files_without_a_row_are_one_line(tmp_path: Path) -> None:
    write(tmp_path, "a,label\n")
    with pytest.raises(UserError, match=r"has no row in any file; name files that have"):
        opened(tmp_path)


def test_a_table_of_broken_rows_alone_has_no_share_to_allow(tmp_path: Path) -> None:
    rows = "x,label\n" + "".join(f"inf,{i % 2}\n" for i in range(9))
    line = refused(tmp_path, rows, label="x")
    assert "9 of 9 rows are broken" in line
    assert "set data.bad_rows" not in line


def test_integers_keep_their_type_up_to_64_bits(tmp_path: Path) -> None:
    most, least = 2**63 - 1, -(2**63)
    rows = [(most, most + 1, 0), (least, 7, 1), (1, 8, 0)] * 20
    write(tmp_path, "a,b,label\n" + "".join(f"{a},{b},{c}\n" for a, b, c in rows))
    selection, found = opened(tmp_path)
    assert [selection.specs[each].dtype for each in "ab"] == ["int64", "float32"]
    assert set(found["a"].tolist()) == {most, least, 1}

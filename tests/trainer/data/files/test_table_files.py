"""Tests folders of files: which files form the table, and how their names are interpreted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq
import pytest

from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.data.files.file_source import FileSource
from flotilla.trainer.preflight.proposal import propose
from flotilla.trainer.runtime.errors import ConfigError, UserError
from tests.trainer.data.files.sources import listed, opened, sizes, source


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def rows(count: int = 40, start: int = 0, head: str = "x,z,label") -> str:
    lines = (f"{i},{i / 4},{'ab'[i % 2]}" for i in range(start, start + count))
    return "\n".join([head, *lines]) + "\n"


def values(head: str, count: int = 20) -> str:
    return "\n".join([head, *(",".join(["1"] * len(head.split(","))) for _ in range(count))])


def notes(folder: Path, **keys: Any) -> list[str]:
    made = source(folder, **keys)
    made.select()
    return list(made.notes())


def test_documents_and_empty_files_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, part1_dot_csv=rows(), part2_dot_csv="", README_dot_txt="Some data,\nfrom\n")
    write(tmp_path, LICENSE_dot_txt="mine", names_dot_txt="x: a, b", schema_dot_json="{}")
    _, found = opened(tmp_path)
    assert len(found["x"]) == 40
    assert any("5 of 6 files are ignored" in each for each in notes(tmp_path))
    # If there is only one file, it is read regardless of its name.
    write(tmp_path / "alone", readme_dot_txt=rows())
    assert len(opened(tmp_path / "alone")[1]["x"]) == 40


@pytest.mark.parametrize("name", ["a.xlsx", "b.feather", "c.pkl", "d.tar", "e.zip"])
def test_what_is_no_table_is_said_to_be_none(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"PK\3\4")
    with pytest.raises(
        UserError, match=r"write the table as CSV or Parquet|an archive; extract it"
    ):
        opened(tmp_path)


def test_files_of_a_contest(tmp_path: Path) -> None:
    write(tmp_path, train_dot_csv=rows(), test_dot_csv=values("x,z"))
    write(tmp_path, sample_submission_dot_csv=values("x,label"))
    _, found = opened(tmp_path)
    assert len(found["x"]) == 40
    assert len(sizes(found)) == 3
    said = notes(tmp_path)
    first = "data.source: test.csv has no column 'label' (first columns: x, z), so it is ignored"
    assert first in said[1]
    assert "sample_submission.csv has no column 'z' (first columns: x, label)" in said[0]
    with pytest.raises(
        UserError, match=r"no column 'label' \(first columns: x, z\)(, so it is|; leave this)"
    ):
        listed_as(tmp_path, {"train.csv": "train", "test.csv": "test"})


def listed_as(folder: Path, named: dict[str, str]) -> Any:
    found = listed(folder)
    files = tuple(replace(f, split=named[f.path]) for f in found.files if f.path in named)
    config = DataConfig.model_validate({"source": str(folder)})
    return FileSource(config, replace(found, files=files), folder)


@pytest.mark.parametrize(
    "names",
    [
        ("train_dot_csv", "valid_dot_csv", "test_dot_csv"),
        ("train__a_dot_csv", "dev__a_dot_csv", "test__b_dot_csv"),
        ("data__train-00000-of-00001_dot_csv", "data__validation-00000-of-00001_dot_csv",
         "data__test-00000-of-00001_dot_csv"),
        ("us_train_dot_csv", "us_val_dot_csv", "us_test_dot_csv"),
    ],
)  # fmt: skip
def test_names_of_splits_are_splits(tmp_path: Path, names: tuple[str, ...]) -> None:
    counts = (30, 7, 5)
    write(tmp_path, **{n: rows(c, 100 * c) for n, c in zip(names, counts, strict=True)})
    _, found = opened(tmp_path)
    assert dict(sizes(found)) == {"train": 30, "validation": 7, "test": 5}
    assert "data.splits: the names of the files determine" in notes(tmp_path)[0]
    _, drawn = opened(tmp_path, splits={"test": 0.3})
    assert sizes(drawn)["test"] > 5
    # If the name of one file indicates no split, the splits are drawn at random.
    write(tmp_path, more_dot_csv=rows(30, 9000))
    assert sizes(opened(tmp_path)[1])["train"] > 30


PARTITIONS = {"a b": "kind=a%20b", "c/d": "kind=c%2Fd", "": "kind=__HIVE_DEFAULT_PARTITION__"}


@pytest.mark.parametrize("form", ["csv", "parquet", "jsonl"])
def test_folders_of_values_are_columns(tmp_path: Path, form: str) -> None:
    for number, folder in enumerate(PARTITIONS.values()):
        path = tmp_path / f"year={2020 + number}" / folder / f"part-0.{form}"
        path.parent.mkdir(parents=True)
        table = pa.table({"x": np.arange(40) + 100 * number, "label": ["a", "b"] * 20})
        if form == "csv":
            arrow_csv.write_csv(table, path)
        elif form == "jsonl":
            path.write_text("\n".join(json.dumps(row) for row in table.to_pylist()))
        else:
            pq.write_table(table, path)
    selection, found = opened(tmp_path)
    assert set(selection.inputs) == {"x", "year", "kind"}
    assert selection.specs["year"].dtype == "int64"
    assert {each.decode() for each in found["kind"]} == set(PARTITIONS)
    assert (found["year"] == 2020 + found["x"] // 100).all()
    selection, found = opened(tmp_path, label="kind", drop=["label"], bad_rows=0.5)
    assert selection.specs["kind"].labels == ("a b", "c/d")
    assert len(found["x"]) == 80
    # All selected columns may come from folder names.
    selection, found = opened(tmp_path, label="kind", inputs=["year"], bad_rows=0.5)
    assert len(found["year"]) == 80


def test_an_index_that_pandas_wrote_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, a_dot_csv=rows(head="Unnamed: 0,z,label"))
    selection, _ = opened(tmp_path)
    assert selection.inputs == ("z",)
    assert "'Unnamed: 0' is ignored, because it looks like an index" in notes(tmp_path)[0]
    assert opened(tmp_path, types={"Unnamed: 0": "int"})[0].inputs == ("Unnamed: 0", "z")
    assert opened(tmp_path, inputs=["Unnamed: 0"])[0].inputs == ("Unnamed: 0",)
    assert not notes(tmp_path, drop=["Unnamed: 0"])


def test_an_index_in_the_words_of_parquet(tmp_path: Path) -> None:
    table = pa.table(
        {"x": np.arange(40) / 4, "label": ["a", "b"] * 20, "__index_level_0__": range(40)}
    )
    pq.write_table(table, tmp_path / "a.parquet")
    assert opened(tmp_path)[0].inputs == ("x",)
    named = table.rename_columns(["x", "label", "key"])
    said = json.dumps({"index_columns": ["key", {"kind": "range"}]})
    pq.write_table(named.replace_schema_metadata({"pandas": said}), tmp_path / "a.parquet")
    assert opened(tmp_path)[0].inputs == ("x",)
    made = source(tmp_path, splits={"group": "key"})
    assert made.select().specs["key"].dtype == "int64"
    pq.write_table(named.replace_schema_metadata({"pandas": "[1"}), tmp_path / "a.parquet")
    assert opened(tmp_path)[0].inputs == ("x", "key")


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (pa.array(range(30)), pa.array([str(i) for i in range(30)]), "int64 in 1.parquet, row 1"),
        (pa.array([True] * 30), pa.array([2.5] * 30), "bool in 1.parquet, row 1 and double in"),
        (pa.array([[1]] * 30), pa.array([2.5] * 30), "list<"),
        (pa.array([None, *range(29)]), pa.array(["a"] * 30), "int64 in 1.parquet, row 2 and str"),
        (pa.array(range(30)), pa.array([i / 2 for i in range(30)]), ""),
        (pa.array(range(30), pa.int16()), pa.array(range(30)), ""),
        (pa.array(["a"] * 30), pa.array(["b"] * 30).dictionary_encode(), ""),
        (pa.array(["a"] * 30, pa.large_string()), pa.array(["b"] * 30, pa.string_view()), ""),
        (pa.nulls(30), pa.array(["b"] * 30), ""),
    ],
)
def test_types_that_differ_between_files(tmp_path, first, second, said):
    for number, array in enumerate((first, second), 1):
        table = pa.table({"x": array, "label": ["a", "b", "b"] * 10})
        pq.write_table(table, tmp_path / f"{number}.parquet")
    if not said:
        assert len(opened(tmp_path)[1]["x"]) == 60
        return
    with pytest.raises(UserError) as refused:
        opened(tmp_path)
    assert f"the column 'x' has different types ({said}" in str(refused.value)
    assert "in 2.parquet, row 1); use one type, or set data.types: {x: text}" in str(refused.value)


def test_strings_in_one_file_and_numbers_in_another_get_no_type(tmp_path: Path) -> None:
    for form in ("parquet", "jsonl"):
        (tmp_path / form).mkdir()
        for name, values in (("a", [*range(30)]), ("b", [str(each) for each in range(30)])):
            table = pa.table({"x": values, "label": ["a", "b", "b"] * 10})
            lines = "".join(f"{json.dumps(row)}\n" for row in table.to_pylist())
            (tmp_path / form / f"{name}.jsonl").write_text(lines)
            pq.write_table(table, tmp_path / form / f"{name}.parquet")
            (tmp_path / form / f"{name}.{'jsonl' if form == 'parquet' else 'parquet'}").unlink()
        assert not propose(tmp_path / form, ["label"]).config.data.types


def test_numbers_in_one_csv_and_texts_in_another(tmp_path: Path) -> None:
    lines = "".join(f"{i},5,t{i},{'ab'[i % 2]}\n" for i in range(30))
    write(tmp_path, a_dot_csv=rows(), b_dot_csv="x,c,z,label\n" + lines)
    (tmp_path / "a.csv").write_text("x,c,z,label\n" + lines.replace(",t", ","))
    with pytest.raises(
        UserError, match=r"'z' has different types \(numbers in a\.csv, row 2 and texts in b\.csv"
    ):
        opened(tmp_path)
    assert opened(tmp_path, types={"z": "text"})[0].specs["z"].dtype == "string"


@pytest.mark.parametrize(
    ("head", "says"), [("x,label", "has no column 'z'"), ("x,z,label,q", "has a column 'q'")]
)
def test_files_of_several_tables_are_one_line(tmp_path: Path, head: str, says: str) -> None:
    write(tmp_path, a_dot_csv=rows(), b_dot_csv=values(head))
    with pytest.raises(UserError, match=rf"b\.csv {says}.* files of one table in data\.source"):
        opened(tmp_path)


def test_the_file_whose_columns_are_named_is_named(tmp_path: Path) -> None:
    write(tmp_path, a_dot_csv=rows(), b_dot_csv=rows())
    with pytest.raises(ConfigError, match=r"no column 'price' in .* \(a\.csv\)"):
        opened(tmp_path, label="price")


@pytest.mark.parametrize("keys", [{}, {"image": {"size": [8, 8]}}])
def test_bytes_that_are_no_text_name_their_own_row(tmp_path: Path, keys: dict[str, Any]) -> None:
    texts = [b"fine"] * 59 + [b"K\xf6ln"]
    table = pa.table({"x": range(60), "t": texts, "label": ["a", "b"] * 30})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r": 1 of 60 rows are broken.*: a\.parquet, row 60: 't' is"):
        opened(tmp_path, **keys)
    assert len(opened(tmp_path, bad_rows=0.1, **keys)[1]["t"]) == 59


def test_a_string_that_is_no_text_is_one_line(tmp_path: Path) -> None:
    raw = pa.array([b"fine", b"\xff", b"good"] * 20)
    text = pa.Array.from_buffers(pa.string(), 60, raw.buffers())
    pq.write_table(pa.table({"t": text, "label": ["a", "b"] * 30}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet: the column 't' has a text that is not UTF-8"):
        opened(tmp_path)


def test_lists_of_texts_are_sequences_and_no_label(tmp_path: Path) -> None:
    pages = [["home", "cart"], ["home"], []] * 10
    table = pa.table({"pages": pages, "label": ["a", "b", "b"] * 10})
    pq.write_table(table, tmp_path / "a.parquet")
    found, columns = opened(tmp_path)
    assert (found.specs["pages"].shape, found.specs["pages"].dtype) == ((None,), "string")
    read = sorted(each.tolist() for each in columns["pages"])
    assert read[::10] == [[], [b"home"], [b"home", b"cart"]]
    with pytest.raises(UserError, match="write one column of 0 and 1 for each class"):
        opened(tmp_path, label="pages")

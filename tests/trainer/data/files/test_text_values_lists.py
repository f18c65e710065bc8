"""Tests lists of numbers in text, of equal or varying length."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flotilla.trainer.data.files.text_values import parse_numbers
from flotilla.trainer.runtime.errors import ConfigError, UserError
from tests.trainer.data.files.sources import opened, source


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("[0.5, 2]", [0.5, 2]), ("[1,2]", [1, 2]), ("[0.5 2.]", [0.5, 2.0]),
        ("[ 1  2\n 3]", [1, 2, 3]),
        ("[[1, 2], [3, 4]]", [[1, 2], [3, 4]]), ("[[1 2]\n [3 4]]", [[1, 2], [3, 4]]),
        ("[-1e-3 +2E5]", None), ("[-1e-3 2e5]", [-1e-3, 2e5]), ("[1., -2., .5]", None),
        ("[]", []), ("[1, NaN]", [1, np.nan]), ("[1 nan]", [1, np.nan]),
        ("[1, None]", [1, np.nan]),
        ("[1, null]", [1, np.nan]), ("[[1, 2], [3]]", None), ("[0.1 0.2 ... 0.9]", None),
        ("7", None),
        ("['a']", None), ("[1, 2", None), ("", None), ('{"a": 1}', None), ("true", None),
    ],
)  # fmt: skip
def test_numbers_in_a_text(text: str, want: list[float] | None) -> None:
    found = parse_numbers(text)
    if want is None:
        assert found is None
    else:
        np.testing.assert_array_equal(found, np.array(want))


def rows(lengths: list[int]) -> list[list[float]]:
    return [[i + k / 4 for k in range(lengths[i % len(lengths)])] for i in range(60)]


def write(folder: Path, form: str, lists: list[list[float]]) -> None:
    labels = ["ab"[i % 2] for i in range(len(lists))]
    if form == "jsonl":
        lines = (json.dumps({"v": v, "label": y}) for v, y in zip(lists, labels, strict=True))
        (folder / "t.jsonl").write_text("\n".join(lines) + "\n")
    elif form == "parquet":
        pq.write_table(pa.table({"v": lists, "label": labels}), folder / "t.parquet")
    else:
        texts = [json.dumps(v) if form == "csv" else f"[{' '.join(map(str, v))}]" for v in lists]
        body = "".join(f'"{v}",{y}\n' for v, y in zip(texts, labels, strict=True))
        (folder / "t.csv").write_text(f"v,label\n{body}")


FORMS = ("csv", "numpy", "jsonl", "parquet")


@pytest.mark.parametrize("form", FORMS)
def test_lists_of_one_length_are_the_same_in_each_format(tmp_path: Path, form: str) -> None:
    write(tmp_path, form, rows([3]))
    selection, found = opened(tmp_path)
    assert selection.inputs == ("v",)
    assert (selection.specs["v"].shape, selection.specs["v"].dtype) == ((3,), "float32")
    assert sorted(found["v"].tolist()) == sorted(rows([3]))


@pytest.mark.parametrize("form", FORMS)
def test_lists_of_several_lengths_keep_them(tmp_path: Path, form: str) -> None:
    lists = rows([2, 5, 3])
    write(tmp_path, form, lists)
    made = source(tmp_path)
    selection = made.select()
    assert selection.inputs == ("v", "v_length")
    assert (selection.specs["v"].shape, selection.specs["v"].stored) == ((None,), "sequence")
    assert "lists of 2 to 5 values, and the lengths are kept" in made.notes()[0]
    _, found = opened(tmp_path)
    assert sorted(each.tolist() for each in found["v"]) == sorted(lists)
    assert [len(each) for each in found["v"]] == found["v_length"].tolist()


@pytest.mark.parametrize("form", FORMS)
def test_lists_are_cut_and_padded_where_that_is_asked(tmp_path: Path, form: str) -> None:
    lists = rows([2, 5, 3])
    write(tmp_path, form, lists)
    selection, found = opened(tmp_path, shapes={"v": (4,)})
    assert selection.inputs == ("v",)
    assert sorted(found["v"].tolist()) == sorted(([*each, 0, 0, 0])[:4] for each in lists)
    with pytest.raises(ConfigError, match=r"data\.shapes: v: \[4, 2\] does not match"):
        opened(tmp_path, shapes={"v": (4, 2)})


@pytest.mark.parametrize(
    ("lists", "advice"),
    [
        ([[], [[1, 2]], [[1, 2, 3], [4, 5, 6]]], r"\[1, 2\] and \[2, 3\]; set .*\{v: \[2, 3\]\}"),
        ([[1, 2], [[1, 2]]], r"\[1, 2\] and \[2\]; set data\.drop: \[v\], or write lists"),
    ],
)
def test_lists_of_several_shapes_are_refused(tmp_path: Path, lists: list[Any], advice: str) -> None:
    write(tmp_path, "csv", [lists[i % len(lists)] for i in range(60)])
    with pytest.raises(UserError, match=advice):
        opened(tmp_path)


def test_a_length_that_is_a_column_too_is_refused(tmp_path: Path) -> None:
    lines = (json.dumps({"v": v, "v_length": 1, "label": 0}) for v in rows([1, 2]))
    (tmp_path / "t.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match=r"set data\.drop: \[v_length\]"):
        opened(tmp_path)


def test_a_text_among_lists_is_a_text(tmp_path: Path) -> None:
    body = "".join(f'"[{i}, 1]",{i % 2}\n' for i in range(30))
    (tmp_path / "t.csv").write_text(f"v,label\n{body}x,1\n")
    selection, _ = opened(tmp_path)
    assert selection.specs["v"].dtype == "string"


def test_a_label_of_several_classes_is_said(tmp_path: Path) -> None:
    tags = ["red|blue", "red", "blue|big", "big|red"]
    body = "".join(f"{i},{tags[i % 4]}\n" for i in range(40))
    (tmp_path / "t.csv").write_text(f"v,label\n{body}")
    made = source(tmp_path)
    made.select()
    assert any("write one column of 0 and 1 for each" in each for each in made.notes())
    (tmp_path / "t.csv").unlink()
    lines = (json.dumps({"v": i, "label": tags[i % 4].split("|")}) for i in range(40))
    (tmp_path / "t.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match="write one column of 0 and 1 for each class"):
        source(tmp_path, label=("label",)).select()

"""Tests that each example stays in its split when a source grows."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

from tests.trainer.data.files.sources import opened

Row = dict[str, Any]
KEYS = {"inputs": ["spent", "visits", "plan", "member"]}


def customers(first: int, count: int) -> list[Row]:
    rng = np.random.default_rng(3)
    spent, visits = rng.normal(50, 20, first + count), rng.integers(0, 90, first + count)
    return [
        {
            "id": f"c{n:05d}",
            "spent": round(float(spent[n]), 2),
            "visits": int(visits[n]),
            "plan": ["basic", "family", "pro"][n % 3],
            "member": n % 5 == 0,
            "churned": ["no", "yes"][n % 7 == 0],
        }
        for n in range(first, first + count)
    ]


def write(path: Path, rows: Sequence[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)


def splits_of(folder: Path, **keys: Any) -> dict[str, str]:
    """Return each example's split by its ID; fail if an example is in two splits."""
    _, found = opened(folder, **{"label": "churned", "types": {"id": "text"}, **KEYS, **keys})
    pairs = {*zip([each.decode() for each in found["id"]], found["split"], strict=True)}
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def in_another_order(folder: Path, rows: list[Row]) -> None:
    write(folder / "z.csv", rows[300:])
    write(folder / "b.csv", rows[:300][::-1])


def with_gaps_and_new_values(folder: Path, rows: list[Row]) -> None:
    new = customers(600, 100)
    for row in new[:5]:
        row.update(spent=1e12, visits=2**40, plan="aaa")
    for place, name in enumerate(("spent", "visits", "member")):
        new[place + 5][name] = ""
    write(folder / "a.csv", [*rows, *new])


def partitioned(folder: Path, rows: list[Row]) -> None:
    write(folder / "day=1/a.csv", rows[:200])
    write(folder / "day=2/a.csv", rows[200:])


def in_a_new_file(folder: Path, rows: list[Row]) -> None:
    write(folder / "0-before-all.csv", customers(600, 300))
    write(folder / "a.csv", rows)


# The rows of `a.csv` after a change of a table, and changes of its files.
CHANGES: Mapping[str, Callable[[list[Row]], list[Row]]] = {
    "appended": lambda rows: [*rows, *customers(600, 300)],
    "with one more column": lambda rows: [{"more": n, **row} for n, row in enumerate(rows)],
    "with copies": lambda rows: [*rows, *rows[100:400]],
    "relabelled": lambda rows: [{**row, "churned": "maybe"} for row in rows],
}
GROWTHS: Mapping[str, Callable[[Path, list[Row]], None]] = {
    **{
        name: lambda folder, rows, change=change: write(folder / "a.csv", change(rows))
        for name, change in CHANGES.items()
    },
    "as parquet": lambda folder, rows: write(folder / "a.parquet", rows),
    "as json": lambda folder, rows: write(folder / "a.jsonl", rows),
    "in a new file": in_a_new_file,
    "in another order": in_another_order,
    "with gaps and new values": with_gaps_and_new_values,
    "partitioned": partitioned,
}
DRAWN_BY: Mapping[str, dict[str, Any]] = {
    "its inputs": {},
    "an id": {"splits": {"group": "id"}, "inputs": []},
    "a class": {"types": {"id": "text", "plan": "class"}},
}


@pytest.mark.parametrize("keys", DRAWN_BY.values(), ids=DRAWN_BY)
@pytest.mark.parametrize("grow", GROWTHS.values(), ids=GROWTHS)
def test_an_example_keeps_its_split(tmp_path, grow, keys):
    rows = customers(0, 600)
    write(tmp_path / "before" / "a.csv", rows)
    before = splits_of(tmp_path / "before", **keys)
    assert {*before.values()} == {"train", "validation", "test"}
    grow(tmp_path / "after", rows)
    after = splits_of(tmp_path / "after", **{**keys, "shards": 3})
    assert {name: after[name] for name in before} == before


def picture(folder: Path, number: int, size: int, name: str) -> None:
    pixels = np.random.default_rng(number).integers(0, 255, (size, size, 3)).astype(np.uint8)
    path = folder / name / f"{number:03d}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tf.io.encode_png(pixels).numpy())


def test_a_picture_keeps_its_split_where_others_of_any_size_come(tmp_path):
    keys = {"image": {"size": [4, 4]}}
    for number in range(60):
        picture(tmp_path / "photos", number, 4, ("oak", "pine")[number % 2])
    _, before = opened(tmp_path / "photos", **keys)
    for number in range(60, 80):
        picture(tmp_path / "photos", number, 6, ("ash", "pine")[number % 2])
    _, after = opened(tmp_path / "photos", **keys)
    later = dict(zip(after["image"], after["split"], strict=True))
    assert len({*before["split"]}) == 3
    assert [later[each] for each in before["image"]] == before["split"]

"""Tests the configuration that is proposed for a first run from a source's first rows."""

import json
import random
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import csv
from pyarrow import parquet as pq

from flotilla.trainer.config.load import load_config
from flotilla.trainer.preflight.proposal import is_source, propose
from flotilla.trainer.runtime.errors import ConfigError


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw = random.Random(0)
    rows = [f"K-{n}x,{draw.random():.4f},{'yes' if n % 3 else 'no'}" for n in range(40)]
    Path("Left us (24).csv").write_text("\n".join(["client id,score: new,has left", *rows]) + "\n")


def test_what_is_written_gives_the_same_configuration():
    made = propose("Left us (24).csv", ["has left"], ["training.seed=7", "gate.min={auc: 0.6}"])
    for place in (Path(), Path("runs/left-us-24-x")):
        place.mkdir(parents=True, exist_ok=True)
        (place / made.file_name).write_text(made.text(place))
        assert load_config(place / made.file_name, rebases=True) == made.config
    config = made.config
    assert (config.name, config.data.label, config.data.drop) == (
        "left-us-24", ("has left",), ("client id",),
    )  # fmt: skip
    assert (config.task.name, config.model.name, config.training.strategy) == (
        "auto", "auto", "single",
    )  # fmt: skip
    assert (config.training.seed, config.gate.min) == (7, {"auc": 0.6})
    keys = [line for line in made.text(Path()).splitlines() if line.startswith("  ")]
    chosen = [line for line in keys if not line.lstrip().startswith(("seed", "min"))]
    assert all("  # " in line for line in chosen)
    assert "# binary_classification: the label is no or yes" in made.text(Path())
    assert "# tabular: the inputs are 1 number" in made.text(Path())


@pytest.mark.parametrize(
    ("source", "label", "line"),
    [
        ("Left us (24).csv", ["has_left"], "did you mean 'has left'?"),
        ("Left us (24).csv", [], "perhaps 'has left' (one of client id, score: new, has left)"),
        ("one.csv", ["y"], "'y' of one.csv has only one value ('b') in all 3 rows"),
        ("head.csv", ["y"], "has no row"),
        ("empty.csv", ["y"], "is empty"),
        ("odd.xyz", ["y"], "set data.format to one of"),
        ("part-*.csv", ["y"], "part-2.csv has no column 'x', which other files have; add it"),
        ("part-*.parquet", ["y"], "part-2.parquet has no column 'x', which other files have"),
        ("price.csv", ["y"], "has numbers stored as text, such as '1.01M'; write all of them in"),
    ],
)
def test_a_mistake_is_one_line(source, label, line):
    Path("one.csv").write_text("x,y\n1,b\n2,b\n3,b\n")
    Path("head.csv").write_text("x,y\n")
    Path("empty.csv").write_text("")
    Path("odd.xyz").write_text("hello")
    for number, names in enumerate((["x", "y"], ["X", "y"]), 1):
        table = pa.table({name: [1, 2, 3] for name in names})
        pq.write_table(table, f"part-{number}.parquet")
        csv.write_csv(table, f"part-{number}.csv")
    prices = "".join(f"1,{n}.{n:02}{'KM'[n % 2]}\n" for n in range(1, 60))
    Path("price.csv").write_text(f"x,y\n{prices}")
    with pytest.raises(ConfigError) as refused:
        propose(source, label)
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_is_named_is_a_configuration_or_files():
    Path("rows.json").write_text('{"a": 1}\n')
    Path("config.json").write_text(json.dumps({"name": "a", "data": {}}))
    Path("kept").write_text("name: a\n")
    files = ["Left us (24).csv", ".", "s3://bucket/a.csv", "day-*.csv", "rows.json"]
    assert [is_source(each) for each in files] == [True] * len(files)
    assert [is_source(each) for each in ("a.yaml", "b.YML", "config.json", "kept")] == [False] * 4
    with pytest.raises(ConfigError, match="there is no such file or folder; did you mean"):
        is_source("Left us.csv")


def test_few_values_of_a_class_are_a_quantity_only_where_they_are():
    lines = [f"{n % 5},{n}.5,{n}" for n in range(60)]
    Path("t.csv").write_text("\n".join(["a,b,id", *lines]))
    assert "# regression: the label is a quantity" in propose("t.csv", ["b"]).text(Path())
    made = propose("t.csv", ["a"])
    assert "# classification: the label has 5 classes: 0, 1, 2, 3, 4" in made.text(Path())
    assert made.config.data.drop == ("id",)
    assert propose("t.csv", ["a"], ["data.inputs=[id]"]).config.data.drop == ()


def test_numbers_in_writing_are_typed_and_the_doubtful_ones_stay_texts():
    header = "price;share;plan;size;churn"
    rows = [
        f"{n}.{n:03d},50 €;{n} %;p{n % 3};{n} {'kg' if n % 2 else 'lb'};{'yes' if n % 3 else 'no'}"
        for n in range(1, 61)
    ]
    Path("eu.csv").write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    made = propose("eu.csv", ["churn"])
    assert {name: str(kind) for name, kind in made.config.data.types.items()} == {
        "price": "number_comma", "share": "number",
    }  # fmt: skip
    Path(made.file_name).write_text(made.text(Path()), encoding="utf-8")
    assert load_config(Path(made.file_name), rebases=True) == made.config


def test_the_number_of_an_id_that_comes_again_is_a_name():
    head = "person id,room_number,hour,y"
    rows = [f"{n % 12 + 100},{n % 9},{n % 24},{n % 2}" for n in range(240)]
    Path("visits.csv").write_text("\n".join([head, *rows]) + "\n")
    assert propose("visits.csv", ["y"]).config.data.types == {"person id": "text"}
    said = propose("visits.csv", ["y"], ["data.types={person id: int}"]).config
    assert said.data.types == {"person id": "int"}


def test_ids_of_a_pair_are_looked_up_as_they_are():
    rows = [f"{n % 12 + 100},{n % 9},{n % 2}" for n in range(240)]
    Path("taken.csv").write_text("\n".join(["user_id,item_id,y", *rows]) + "\n")
    made = propose("taken.csv", ["y"])
    assert made.why["model.name"].startswith("two_tower")
    assert not made.config.data.types


def test_numbers_and_dates_in_writing_are_no_ids():
    rows = [
        f"{n},5;{n % 28 + 1:02}.{n // 28 + 1:02}.2024;{n}{chr(65 + n % 26)};{n}.5D+02;{n % 2}"
        for n in range(60)
    ]
    Path("german.csv").write_text("\n".join(["preis;tag;code;druck;y", *rows]) + "\n")
    data = propose("german.csv", ["y"]).config.data
    assert data.drop == ("code",)
    assert data.types["preis"] == "number_comma"


def test_a_label_is_what_the_run_takes():
    rows = [{"x": n / 4, "out": {"y": n % 2 == 0, "z": str(n % 2)}} for n in range(60)]
    Path("nested.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert propose("nested.jsonl", ["out"]).config.data.label == ("out/y", "out/z")
    # Strings with a few whole numbers are classes, and those with fractions are not.
    made = propose("nested.jsonl", ["out/z"])
    assert "# binary_classification: the label is 0 or 1" in made.text(Path())
    assert not made.config.data.types
    rows = [{"x": n / 4, "y": f"{n / 8}"} for n in range(60)]
    Path("price.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ConfigError, match=r"such as '0\.0'; set data\.types: \{y: number\}"):
        propose("price.jsonl", ["y"])

"""Tests the first rows of a source as a dataset: which findings are certain and which are not."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from PIL import Image

from flotilla.trainer import storage
from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.preflight import head, sample
from flotilla.trainer.preflight.sample import publish_sample
from flotilla.trainer.runtime.errors import ConfigError, UserError

MANY = 3 * sample.ROWS


def table(rows, *, odd="", at=-1):
    """Return columns whose label has an additional class after the first rows."""
    return {
        "age": [odd if row == at else row % 80 for row in range(rows)],
        "town": ["Rome" if row % 3 else "Oslo" for row in range(rows)],
        "label": [
            "late" if row > 2 * sample.ROWS else ("yes", "no")[row % 2] for row in range(rows)
        ],
    }


def csv(folder, columns, name="t.csv"):
    lines = [
        ",".join(columns),
        *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True)),
    ]
    (folder / name).write_text("\n".join(lines) + "\n")
    return str(folder / name)


def of(folder, source, **keys):
    scratch = folder / "scratch"
    scratch.mkdir()
    return publish_sample(DataConfig.model_validate({"source": source, **keys}), scratch)


def spec_of(found):
    return DatasetSpec.from_manifest(storage.read_manifest(found.uri))


def test_a_small_table_is_its_own_sample(tmp_path):
    found = of(tmp_path, csv(tmp_path, table(200)), shards=3)
    assert found.is_whole
    spec = spec_of(found)
    assert spec.features["label"].labels == ("no", "yes")
    assert sum(spec.examples(split) for split in spec.shards) == 200
    assert len(spec.shards["train"]) == 3


@pytest.mark.parametrize("form", ["csv", "parquet", "jsonl", "tfrecord"])
def test_of_a_large_table_the_first_rows_are_read(tmp_path, monkeypatch, form):
    columns, path = table(MANY), tmp_path / f"t.{form}"
    if form == "csv":
        csv(tmp_path, columns)
        monkeypatch.setattr(head, "_HEAD", 25 * sample.ROWS)
    elif form == "parquet":
        pq.write_table(pa.table(columns), path)
    else:
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        if form == "jsonl":
            path.write_text("\n".join(map(json.dumps, rows)))
        else:
            write_examples(path, rows)
    found = of(tmp_path, str(path))
    assert not found.is_whole
    spec = spec_of(found)
    assert sum(spec.examples(split) for split in spec.shards) == sample.ROWS
    assert set(spec.shards) == {"train", "validation", "test"}
    assert spec.features["label"].labels == ("no", "yes")


def write_examples(path, rows):
    with tf.io.TFRecordWriter(str(path)) as writer:
        for row in rows:
            record = tf.train.Example()
            for name, value in row.items():
                feature = record.features.feature[name]
                if isinstance(value, int):
                    feature.int64_list.value.append(value)
                else:
                    feature.bytes_list.value.append(value.encode())
            writer.write(record.SerializeToString())


def test_one_image_of_each_class_is_enough(tmp_path):
    for name in ("cat", "dog"):
        for number in range(60):
            path = tmp_path / "images" / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (4, 4), (number, 0, 0)).save(path)
    found = of(tmp_path, str(tmp_path / "images"))
    spec = spec_of(found)
    assert not found.is_whole
    assert spec.features["label"].labels == ("cat", "dog")
    assert sum(spec.examples(split) for split in spec.shards) == 64


def test_a_function_maps_the_first_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mapping_rows.py").write_text(
        "def given(row):\n    return {'twice': 2 * row['age'], 'label': row['label']}\n"
        "def wrong(row):\n    return {'twice': row['aeg'], 'label': row['label']}\n"
    )
    path = csv(tmp_path, table(MANY))
    found = of(tmp_path, path, map="mapping_rows:given")
    assert spec_of(found).inputs == ("twice",)
    scratch = tmp_path / "other"
    scratch.mkdir()
    with pytest.raises(UserError, match=r"KeyError: 'aeg' \(mapping_rows.py:4\)"):
        publish_sample(DataConfig(source=path, map="mapping_rows:wrong"), scratch)


def test_a_builder_says_all_by_itself(tmp_path):
    assert publish_sample(DataConfig(dataset="digits"), tmp_path) == sample.Sample(by_builder=True)


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"label": "lable"}, "data.label: there is no column 'lable' in "),
        ({"inputs": ["agee"]}, "data.inputs: there is no column 'agee' in "),
        ({"splits": {"time": "day"}}, "data.splits.time: there is no column 'day' in "),
        ({"types": {"town": "int"}}, "'town' is not of type int ('Oslo')"),
    ],
)
def test_what_further_rows_cannot_make_right_is_refused(tmp_path, keys, line):
    with pytest.raises(ConfigError) as refused:
        of(tmp_path, csv(tmp_path, table(MANY)), **keys)
    assert line in str(refused.value)


@pytest.mark.parametrize(
    ("columns", "keys"),
    [
        # A later value is not a number, so the whole column is text and no row is invalid.
        (table(MANY, odd="many", at=7), {}),
        # Only rows after the sample have a label.
        ({**table(MANY), "label": ["" if row < sample.ROWS else "a" for row in range(MANY)]}, {}),
        ({**table(MANY), "day": ["" if row < sample.ROWS else "2" for row in range(MANY)]},
         {"splits": {"time": "day"}}),
        ({**table(MANY), "split": ["train"] * sample.ROWS + ["test"] * (MANY - sample.ROWS)},
         {"splits": {"column": "split"}}),
        ({**table(MANY), "label": [1e9 + row / 1e6 for row in range(MANY)]}, {}),
    ],
)  # fmt: skip
def test_what_further_rows_may_make_right_is_not_refused(tmp_path, columns, keys):
    found = of(tmp_path, csv(tmp_path, columns), **keys)
    assert found.uri or found.notes


def test_of_a_small_table_all_is_certain(tmp_path):
    columns = table(60)
    columns["label"] = [""] * 50 + ["yes"] * 10
    with pytest.raises(UserError, match="50 of 60 rows have no 'label'"):
        of(tmp_path, csv(tmp_path, columns))


def test_many_files_are_seen_from_the_first_to_the_last(tmp_path):
    for number in range(20):
        csv(tmp_path, table(30), f"t{number:02}.csv")
    csv(tmp_path, {"age": [1], "label": ["yes"]}, "t19.csv")
    with pytest.raises(UserError, match=r"t19.csv has no column 'town'"):
        of(tmp_path, str(tmp_path / "*.csv"))

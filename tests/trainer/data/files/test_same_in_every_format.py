"""Tests that a row means the same in every file format, in training, `predict` and serving."""

from __future__ import annotations

import csv
import json
import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tensorflow as tf
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from flotilla.trainer import storage
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.data.files.columns import make_inputs, read_recorded
from flotilla.trainer.data.prepare import prepare
from flotilla.trainer.data.read import stage_shards, training_batches
from flotilla.trainer.evaluation.evaluate import build_model
from flotilla.trainer.evaluation.signature import SERVING
from flotilla.trainer.export.formats import FORMATS, Subject
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.features.names import argument_names
from flotilla.trainer.features.statistics.statistics import Learnt
from flotilla.trainer.prediction.exported_model import ExportedModel
from flotilla.trainer.prediction.inputs import FileExamples, Request
from flotilla.trainer.prediction.predict import predict
from flotilla.trainer.tasks.registry import make_objective
from tests.trainer.data.files.sources import read, source

Row = dict[str, Any]
SPACES = st.sampled_from(["", " ", "\t", "  ", "\u00a0", "\u3000 "])
LETTERS = st.text("aB, ;\"'ü年😀\n\u00a0|", max_size=6).map(lambda text: f"x{text}y")
MOMENTS = st.datetimes(datetime(1902, 1, 1), datetime(2200, 1, 1))
TYPES = {
    "count": pa.int64(), "user": pa.int64(), "large": pa.int64(), "ratio": pa.float64(),
    "money": pa.decimal128(20, 2), "flag": pa.bool_(), "at": pa.timestamp("us"), "day": pa.date32(),
    "city": pa.string(), "label": pa.string(),
}  # fmt: skip


@st.composite
def tables(draw: st.DrawFn) -> list[Row]:
    """Draw rows with columns of every type, some of them with missing values."""
    first = draw(st.sampled_from([0, 10**9, 2**53, 2**62]))
    values = {
        "count": st.integers(-1000, 1000) | st.integers(2**24, 2**25),
        "user": st.integers(first, first + 10),
        "ratio": st.floats(-1e9, 1e9) | st.floats(1.7e9, 1.7e9 + 1),
        "money": st.decimals(-(10**9), 10**12, places=2, allow_nan=False),
        "flag": st.booleans(),
        "at": MOMENTS,
        "day": st.dates(),
        "city": st.builds("{}{}{}".format, SPACES, LETTERS, SPACES),
    }
    columns = {
        name: each | st.none() if draw(st.booleans()) else each for name, each in values.items()
    }
    fixed = st.fixed_dictionaries(
        {**columns, "large": st.integers(-(2**63), 2**63 - 1), "label": st.sampled_from("ab")}
    )
    rows = draw(st.lists(fixed, min_size=4, max_size=12))
    return [{name: row[name] for name in TYPES} for row in rows]


def as_text(value: Any) -> str:
    if isinstance(value, datetime):
        return value.isoformat(" ")
    return "" if value is None else str(value)


def as_json(value: Any) -> Any:
    if isinstance(value, str | bool | int | float) or value is None:
        return value
    return value.isoformat() if hasattr(value, "isoformat") else float(value)


def write_delimited(path: Path, rows: Sequence[Row]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        sep = "\t" if path.suffix == ".tsv" else ","
        lines = csv.writer(file, delimiter=sep, quoting=csv.QUOTE_MINIMAL)
        lines.writerow(rows[0])
        lines.writerows([as_text(each) for each in row.values()] for row in rows)


def write_json(path: Path, rows: Sequence[Row]) -> None:
    lines = (json.dumps({name: as_json(each) for name, each in row.items()}) for row in rows)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_parquet(path: Path, rows: Sequence[Row]) -> None:
    types = {**TYPES, "n": pa.int64()}
    arrays = {name: pa.array([row[name] for row in rows], types[name]) for name in rows[0]}
    pq.write_table(pa.table(arrays), path)


FILES = {
    "t.csv": write_delimited, "t.tsv": write_delimited, "t.jsonl": write_json,
    "t.parquet": write_parquet,
}  # fmt: skip


def written(folder: Path, rows: Sequence[Row]) -> dict[str, Path]:
    """Write the rows in each format, every file into its own folder."""
    found = {name: folder / name.replace(".", "-") / name for name in FILES}
    for name, path in found.items():
        path.parent.mkdir(parents=True)
        FILES[name](path, rows)
    return found


def expected(name: str, value: Any, spec: Any) -> Any:
    """Return a value as a record with this spec stores it."""
    if spec.dtype == "string":
        return as_text(value).strip().encode()
    if value is None:
        return np.nan
    if name in ("at", "day"):
        start = datetime(1970, 1, 1)
        moment = (
            value if isinstance(value, datetime) else datetime(value.year, value.month, value.day)
        )
        return (moment - start) / timedelta(seconds=1)
    return np.dtype(spec.dtype).type(float(value) if "float" in spec.dtype else int(value))


def predicted_inputs(path: Path, selection: Any, columns: Any, size: int) -> Mapping[str, Any]:
    """Read a file as `predict` does for a model with these features, `size` rows at a time."""
    types = {each["name"]: each["type"] for each in columns}
    reads = [
        {"feature": name, "type": types[name], **selection.specs[name].to_json()}
        for name in selection.inputs
    ]
    model = ExportedModel(
        uri="", config=parse_config({}), inputs=make_inputs(reads), kinds={}, labels={}, dataset="",
        signature=None, names={},
    )  # fmt: skip
    request = Request(model="", inputs=(str(path),), output="-", form="jsonl")
    batches = list(FileExamples(model, request, path.parent).batches(size))
    return {
        name: np.concatenate([batch.inputs[name] for batch in batches]) for name in selection.inputs
    }


@settings(max_examples=10, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(rows=tables(), size=st.integers(1, 5))
def test_a_row_is_read_the_same_from_every_format_in_training_and_in_prediction(rows, size):
    rows = [{"n": place, **row, "label": "ab"[place % 2]} for place, row in enumerate(rows)]
    with tempfile.TemporaryDirectory() as name:
        for form, path in written(Path(name), rows).items():
            made, selection, found = opened_in_order(path.parent)
            predicted = predicted_inputs(path, selection, made.facts()["columns"], size)
            for feature in selection.inputs:
                spec = selection.specs[feature]
                values = [expected(feature, row[feature], spec) for row in rows]
                for way, got in (("training", found), ("predict", predicted)):
                    message = f"{feature} of {form} in {way}"
                    np.testing.assert_array_equal(got[feature].tolist(), values, message)
            assert_kept(rows, selection)


def assert_kept(rows: Sequence[Row], selection: Any) -> None:
    """Assert that the stored types keep different IDs and times distinct."""
    gaps = any(row["user"] is None for row in rows)
    largest = max(row["user"] or 0 for row in rows)
    wanted = "int64" if not gaps else ("string" if largest > 2**53 else None)
    assert wanted in (selection.specs["user"].dtype, None)
    assert selection.specs["large"].dtype == "int64"
    assert selection.specs["at"].dtype in ("float64", "string")


def opened_in_order(folder: Path) -> tuple[Any, Any, dict[str, Any]]:
    made = source(folder, validation=0.3)
    selection = made.select()
    found = read(made, selection)
    order = np.argsort(found["n"])
    return made, selection, {name: np.asarray(each)[order] for name, each in found.items()}


def people(count: int) -> list[Row]:
    """Return rows with surrounding spaces and with numbers that could lose digits."""
    random, start = np.random.default_rng(0), datetime(2026, 5, 1)
    return [
        {
            "user": 2**60 + place if place % 5 else None,
            "large": 2**62 + place,
            "at": start + timedelta(milliseconds=int(random.integers(0, 90_000))),
            "ratio": 1.7e9 + float(random.random()) if place % 7 else None,
            "city": str(random.choice([" Rome", "Köln\u00a0", "Rome", "\tÅbo ", ""])),
            "label": str(random.choice(["a", "b"])),
        }
        for place in range(count)
    ]


def exported(folder: Path, path: Path) -> tuple[str, Path]:
    """Train a tabular model on a file; return the published model's URI and its SavedModel."""
    config = parse_config(
        {"name": "m", "data": {"source": str(path), "shards": 2}, "model": {"name": "tabular"}}
    )
    dataset = prepare(config.data, storage.uri_of(folder / "root"), folder).uri
    manifest = storage.read_manifest(dataset)
    learnt = Learnt(lambda: (storage.read_file(dataset, "statistics.json"), dataset))
    spec = DatasetSpec.from_manifest(manifest, learnt)
    objective = make_objective(config, spec)
    model = build_model(config, spec, objective)
    optimizer = keras.optimizers.Adam(0.01)
    files = stage_shards(dataset, folder / "shards", "train")
    for inputs, labels in training_batches(spec, files, batch_size=16, seed=0).take(4):
        with tf.GradientTape() as tape:
            outputs = model(inputs, training=True)
            loss = tf.reduce_mean((outputs - tf.cast(labels[:, None], tf.float32)) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    made = folder / "made"
    subject = Subject(model=model, task=objective.task, spec=spec)
    FORMATS["saved_model"].write(subject, made / "serving/m/1", None)
    (made / "config.json").write_text(json.dumps(config.model_dump(mode="json")))
    fields = {
        "saved_model": "serving/m/1",
        "inputs": [{"feature": n, "name": word} for n, word in argument_names(spec.inputs).items()],
        "reads": read_recorded(spec, manifest, config.data),
        "kinds": {"": objective.task.name},
        "labels": {"": list(objective.task.labels)},
        "made_from": {"dataset": dataset},
    }
    uri = storage.uri_of(folder / "published")
    storage.publish(made, uri, kind="model", fields=fields)
    return uri, folder / "published/serving/m/1"


def probabilities(model: str, path: Path) -> list[float]:
    output = path.with_name("answers.jsonl")
    predict(
        Request(model=model, inputs=(str(path),), output=str(output), form="jsonl", batch_size=7)
    )
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    output.unlink()
    return [each["probabilities"]["a"] for each in answers]


def test_a_model_answers_the_same_from_every_format_and_when_it_is_served(tmp_path):
    rows = people(120)
    paths = written(tmp_path, rows)
    uri, served = exported(tmp_path, paths["t.csv"])
    answers = {name: probabilities(uri, path) for name, path in paths.items()}
    assert len(set(answers["t.csv"])) > 60
    for found in answers.values():
        assert found == answers["t.csv"]
    # Predict some of the rows again, with different spaces around their text.
    few = [{**row, "city": f" {row['city'].strip()}\u3000"} for row in rows[2:4]]
    alone = probabilities(uri, written(tmp_path / "few", few)["t.jsonl"])
    np.testing.assert_allclose(alone, answers["t.csv"][2:4], rtol=1e-5)
    signature = tf.saved_model.load(served).signatures[SERVING]
    start = datetime(1970, 1, 1)
    columns = {
        "user": tf.constant(["" if row["user"] is None else f"{row['user']} " for row in rows]),
        "large": tf.constant([row["large"] for row in rows], tf.int64),
        "at": tf.constant([(row["at"] - start) / timedelta(seconds=1) for row in rows], tf.float64),
        "ratio": tf.constant([row["ratio"] or np.nan for row in rows], tf.float64),
        "city": tf.constant([f"\t{row['city']}" for row in rows]),
    }
    names = argument_names(list(columns))
    asked = signature(**{names[name]: each for name, each in columns.items()})
    # A binary classifier returns only the probability of the second class.
    first = asked["probabilities"][:, 0] if "probabilities" in asked else 1 - asked["probability"]
    np.testing.assert_allclose(first, answers["t.csv"], rtol=1e-5)

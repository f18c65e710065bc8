"""Tests how each task's predictions become columns: class names, probabilities, numbers."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq
import pytest

from flotilla.trainer.prediction.output import WRITERS, make_columns
from flotilla.trainer.runtime.errors import UserError

LABELS = ["cat", "dog"]
BOTH = np.array([[0.25, 0.75], [0.9, 0.1]], np.float32)


def rows(kinds, labels, answers, lengths=None, thresholds=None):
    model = SimpleNamespace(kinds=kinds, labels=labels, thresholds=thresholds or {})
    return pa.table(make_columns(model, answers, lengths)).to_pylist()


def test_classes_have_their_names():
    found = rows({"": "classification"}, {"": LABELS}, {"logits": BOTH, "probabilities": BOTH})
    assert [row["prediction"] for row in found] == ["dog", "cat"]
    assert found[0]["probability"] == 0.75
    assert found[0]["probabilities"] == {"cat": 0.25, "dog": 0.75}


def test_two_classes_have_both_probabilities():
    second = np.array([0.25, 0.75], np.float32)
    answers = {"logit": second, "probability": second}
    found = rows({"": "binary_classification"}, {"": LABELS}, answers)
    assert [(row["prediction"], row["probability"]) for row in found] == [
        ("cat", 0.75),
        ("dog", 0.75),
    ]
    assert found[1]["probabilities"] == {"cat": 0.25, "dog": 0.75}


@pytest.mark.parametrize(
    ("threshold", "expected"), [(0.2, ["dog", "dog"]), (0.25, ["cat", "dog"]), (0.9, ["cat"] * 2)]
)
def test_of_two_classes_the_threshold_of_the_model_decides(threshold, expected):
    second = np.array([0.25, 0.75], np.float32)
    answers = {"logit": second, "probability": second}
    for output, wide in (("", {}), ("pet", {"pet_logit": second, "pet_probability": second})):
        kinds, labels = {output: "binary_classification"}, {output: LABELS}
        found = rows(kinds, labels, wide or answers, thresholds={output: threshold})
        assert [(row["pet"] if output else row)["prediction"] for row in found] == expected


def test_several_classes_of_an_example_are_a_list():
    answers = {"logits": BOTH, "probabilities": np.array([[0.6, 0.7], [0.1, 0.5]], np.float32)}
    found = rows({"": "multilabel_classification"}, {"": LABELS}, answers)
    assert [row["prediction"] for row in found] == [["cat", "dog"], []]


def test_the_places_of_a_sequence_are_as_many_as_the_example_has():
    each = np.stack([BOTH, BOTH])
    answers = {"logits": each, "probabilities": each}
    found = rows({"": "sequence_labelling"}, {"": LABELS}, answers, np.array([1, 2]))
    assert [row["prediction"] for row in found] == [["dog"], ["dog", "cat"]]
    assert found[1]["probability"] == pytest.approx([0.75, 0.9])


def test_numbers_scores_and_the_answers_of_an_own_task_stay_as_they_are():
    one, table = np.array([1.5, 2.5]), np.arange(8.0).reshape(2, 2, 2)
    assert rows({"": "regression"}, {}, {"prediction": one})[1] == {"prediction": 2.5}
    found = rows({"": "regression"}, {}, {"prediction": table})
    assert found[1] == {"prediction": [[4, 5], [6, 7]]}
    found = rows({"": "ranking"}, {}, {"logit": one, "probability": one / 10})
    assert found[0] == {"score": 1.5, "probability": pytest.approx(0.15)}
    assert rows({"": ""}, {}, {"mine": one, "text": np.array([b"x", b"y"], object)})[0] == {
        "mine": 1.5,
        "text": "x",
    }
    # A task derived from classification may have other outputs.
    assert rows({"": "classification"}, {"": LABELS}, {"mine": one})[0] == {"mine": 1.5}


def test_each_of_several_outputs_has_its_own_columns():
    answers = {"kind_logits": BOTH, "kind_probabilities": BOTH, "size_prediction": np.ones(2)}
    kinds = {"kind": "classification", "size": "regression"}
    found = rows(kinds, {"kind": LABELS}, answers)
    assert found[0]["kind"]["prediction"] == "dog"
    assert found[0]["size"] == {"prediction": 1.0}


def test_classes_without_names_or_with_one_name_twice_are_numbers_and_lists():
    found = rows({"": "classification"}, {}, {"probabilities": BOTH})
    assert found[0]["probabilities"] == {"0": 0.25, "1": 0.75}
    found = rows({"": "classification"}, {"": ["x", "x"]}, {"probabilities": BOTH})
    assert found[0]["probabilities"] == [0.25, 0.75]


def written(form, *tables):
    file = io.BytesIO()
    writer = WRITERS[form](file)
    for each in tables:
        writer.write(each)
    writer.close()
    return file.getvalue()


def test_every_value_survives_the_way_into_text():
    inner = pa.StructArray.from_arrays(
        [pa.array([0.1, None], pa.float32()), pa.array([[1, 2], []])], ["p", "list"]
    )
    table = pa.table({"name": ['a "quoted", text\nin two lines', "ü"], "s": inner})
    text = written("csv", table, table)
    found = arrow_csv.read_csv(
        io.BytesIO(text), parse_options=arrow_csv.ParseOptions(newlines_in_values=True)
    ).to_pylist()
    assert found[0] == {"name": table["name"][0].as_py(), "s/p": 0.1, "s/list": "[1, 2]"}
    assert len(found) == 4
    lines = [json.loads(line) for line in written("jsonl", table, table).splitlines()]
    assert lines[0] == {"name": table["name"][0].as_py(), "s": {"p": 0.1, "list": [1, 2]}}
    assert lines[1]["s"]["p"] is None


def test_numbers_in_json_are_as_short_as_they_can_be_and_null_where_not_finite():
    values = pa.array([0.1, np.nan, np.inf, 1e-7], pa.float32())
    lines = written("jsonl", pa.table({"x": values})).decode().splitlines()
    assert lines == ['{"x": 0.1}', '{"x": null}', '{"x": null}', '{"x": 1e-07}']


def test_parquet_has_few_row_groups_and_one_type_for_a_column():
    batches = [pa.table({"x": [n]}) for n in range(50)]
    file = pq.ParquetFile(io.BytesIO(written("parquet", *batches)))
    assert (file.metadata.num_row_groups, file.metadata.num_rows) == (1, 50)
    with pytest.raises(UserError, match="'x' is string in some rows and int64 in others"):
        written("parquet", batches[0], pa.table({"x": ["text"]}))

"""Tests that the code in a registered model converts data as `flotilla predict` does."""

import ast
import io
import math
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import tensorflow as tf
from PIL import Image

from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.data.files.columns import make_inputs
from flotilla.trainer.prediction.inputs import convert, make_input
from flotilla.trainer.prediction.output import make_columns
from flotilla.trainer.tracking import mlflow_model, pyfunc_loader
from tests.trainer.tracking.test_mlflow_model import entry, manifest, write


def test_the_program_imports_nothing_of_this_project():
    tree = ast.parse(Path(pyfunc_loader.__file__).read_text())
    nodes = [each for each in ast.walk(tree) if isinstance(each, ast.Import | ast.ImportFrom)]
    names = {getattr(node, "module", node.names[0].name) for node in nodes}
    assert names == {
        "__future__", "collections.abc", "datetime", "io", "json", "pathlib", "typing",
        "numpy", "pandas", "tensorflow", "PIL",
    }  # fmt: skip


class Asked:
    """A serving signature that records its inputs and returns fixed outputs."""

    def __init__(self, **answers):
        self.answers, self.given = answers, []

    def __call__(self, **given):
        self.given.append({name: each.numpy() for name, each in given.items()})
        rows = len(next(iter(given.values())))
        return {name: tf.constant(np.array(v)[:rows]) for name, v in self.answers.items()}


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Return a function that writes and loads a model whose signature is an `Asked`."""

    def make(fields, kinds, labels=(), **answers):
        asked = Asked(**answers)
        loaded = type("Loaded", (), {"signatures": {"serving_default": asked}})
        monkeypatch.setattr(tf.saved_model, "load", lambda _path: loaded)
        write(tmp_path, fields, kinds, labels)
        return pyfunc_loader._load_pyfunc(str(tmp_path)), asked

    return make


def ours(one, values):
    """Return the input that `flotilla predict` makes from values in a file."""
    (wanted,) = make_inputs([one])
    found = convert(wanted, values, DataConfig(), "")
    assert not found.bad.any()
    return make_input(wanted.spec, found.values)


@pytest.mark.parametrize(
    ("kind", "dtype", "values"),
    [
        ("text", "string", ["a", " b ", None, "ä", "NA"]),
        ("text", "string", [1.0, 2.5, 1e20, None, -3.0]),
        ("int", "int64", [1, -2, 2**40]),
        ("int", "int64", [" 7", "12", "-3"]),
        ("int", "float32", [1.0, None, 3.0]),
        ("int", "float32", ["1", "NA", "", "unknown", "3"]),
        ("float", "float32", [1.5, None, 1e-30]),
        ("float", "float32", ["1.5", " 2e3", "n/a", "-.5", "?"]),
        ("bool", "bool", ["yes", "False", "1", "0", "T"]),
        ("bool", "float32", ["true", "", "no"]),
        ("time", "float64", ["2024-01-02", "2024/01/02 03:04:05", "2024-01-02T03:04:05+02:00", ""]),
        ("time", "float64", [datetime(2024, 1, 2, 3, 4, 5, 678901, tzinfo=UTC), None]),
        ("class", "int64", ["x", " y"]),
    ],
)
def test_a_value_is_converted_as_one_of_a_file(load, kind, dtype, values):
    labels = ["x", "y"] if kind == "class" else []
    one = entry("a", kind, dtype, labels=labels, num_classes=len(labels), stored="x")
    expected = ours(one, pa.array(values))
    predictor, asked = load(manifest(one), {"": "regression"}, prediction=[0.0] * len(values))
    predictor.predict(pd.DataFrame({"a": values}))
    (given,) = asked.given
    if dtype == "string":
        assert given["a"].tolist() == [each or b"" for each in expected.tolist()]
    else:
        np.testing.assert_array_equal(given["a"], expected)


@pytest.mark.parametrize(
    ("one", "value", "words"),
    [
        (entry("a", "int", "int64"), 1.5, "'1.5' is not of type int"),
        (entry("a", "int", "int64"), None, "'None' is not of type int"),
        (entry("a", "int", "int64"), "1,5", "'1,5' is not a number"),
        (entry("a", "bool", "bool"), "maybe", "'maybe' is not a number"),
        (entry("a", "time", "float64"), "long ago", "'long ago' is not a time"),
        (entry("a", "class", "int64", labels=["x"]), "z", "'z' is not one of the classes"),
        (entry("a", "", "float32", shape=[2]), [1, 2, 3], "has the shape [3], not [2]"),
    ],
)
def test_a_value_that_does_not_fit_is_named(load, one, value, words):
    predictor, _ = load(manifest(one), {"": "regression"}, prediction=[0.0])
    with pytest.raises(ValueError, match="column 'a'") as refused:
        predictor.predict(pd.DataFrame({"a": [value]}))
    assert words in str(refused.value)


def test_a_missing_column_is_named(load):
    fields = manifest(entry("a", "text", "string"), entry("b c", "text", "string"))
    predictor, _ = load(fields, {"": "regression"}, prediction=[0.0])
    with pytest.raises(ValueError, match="no column 'b c': the model needs a, b c"):
        predictor.predict(pd.DataFrame({"a": ["x"]}))


def test_lists_are_padded_and_arrays_taken_as_they_are(load):
    numbers = entry("n", "tensor", "int64", shape=[None], padding=-1, stored="sequence")
    words = entry("w", "tensor", "string", shape=[None], stored="sequence")
    length = entry("n_length", "", "int64")
    fields = manifest(numbers, length, words)
    predictor, asked = load(fields, {"": "regression"}, prediction=[0.0, 0.0])
    predictor.predict(pd.DataFrame({"n": [[1, 2], "[3]"], "w": [["a"], ["b", "c"]]}))
    (given,) = asked.given
    assert given["n"].tolist() == [[1, 2], [3, -1]]
    assert given["n_length"].tolist() == [2, 1]
    assert given["w"].tolist() == [[b"a", b""], [b"b", b"c"]]
    pixels = entry("image", "", "uint8", shape=[2, 2, 1], stored="raw")
    predictor, asked = load(manifest(pixels), {"": "regression"}, prediction=[0.0, 0.0])
    array = np.arange(8, dtype=np.uint8).reshape(2, 2, 2, 1)
    predictor.predict(array)
    predictor.predict({"image": array})
    for given in asked.given:
        np.testing.assert_array_equal(given["image"], array)


def test_rows_are_answered_in_batches_and_keep_their_index(load, monkeypatch):
    monkeypatch.setattr(mlflow_model, "_MOST_ROWS", 2)
    fields = manifest(entry("a", "float", "float32"))
    predictor, asked = load(fields, {"": "regression"}, prediction=[0.5, 1.5])
    found = predictor.predict(pd.DataFrame({"a": [1.0, 2.0, 3.0]}, index=[7, 8, 9]))
    assert [len(each["a"]) for each in asked.given] == [2, 1]
    assert found["prediction"].to_dict() == {7: 0.5, 8: 1.5, 9: 0.5}
    assert predictor.predict(pd.DataFrame({"a": []})).empty


@pytest.mark.parametrize("turned", [False, True])
def test_an_encoded_image_has_the_pixels_that_a_file_has(load, turned):
    image = Image.fromarray(np.arange(108, dtype=np.uint8).reshape(6, 6, 3))
    exif = Image.Exif()
    if turned:
        exif[0x0112] = 6
    file = io.BytesIO()
    image.save(file, "PNG", exif=exif)
    one = entry("image", "", "uint8", shape=[3, 3, 3], stored="image")
    expected = ours(one, pa.array([file.getvalue()]))
    predictor, asked = load(manifest(one), {"": "regression"}, prediction=[0.0])
    predictor.predict(pd.DataFrame({"image": [file.getvalue()]}))
    np.testing.assert_array_equal(asked.given[0]["image"], expected)


@pytest.mark.parametrize(
    ("kind", "answers"),
    [
        ("classification", {"logits": [[0, 1]] * 2, "probabilities": [[0.25, 0.75], [0.7, 0.3]]}),
        ("binary_classification", {"logit": [1, 2], "probability": [0.25, 0.5]}),
        ("multilabel_classification", {"probabilities": [[0.75, 0.6], [0.1, 0.2]]}),
        ("sequence_labelling", {"probabilities": [[[0.1, 0.9], [0.8, 0.2]], [[1, 0], [0, 1]]]}),
        ("regression", {"prediction": [1.5, math.inf]}),
        ("ranking", {"logit": [1, 2], "probability": [0.7, 0.8]}),
        ("", {"vector": [[1, 2], [3, 4]], "word": ["a", "b"]}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["", "part"])
def test_the_answers_are_the_columns_of_predict(load, kind, answers, name):
    answers = {key: np.array(each) for key, each in answers.items()}
    answers = {
        key: each.astype(np.float32) if each.dtype.kind in "if" else each.astype(object)
        for key, each in answers.items()
    }
    whole = {f"{name}_{key}" if name else key: each for key, each in answers.items()}
    # Add a second output, because the columns of a single output have no name.
    kinds = {name: kind} | ({"other": "regression"} if name else {})
    whole |= {"other_prediction": np.float32([1, 2])} if name else {}
    shapes = [(key, list(each.shape[1:])) for key, each in whole.items()]
    labels = {name: ["no", "yes"]}
    fields = manifest(
        entry("a", "float", "float32"), outputs=shapes, threshold={name: 0.3} if name else 0.3,
        labels=labels,
    )  # fmt: skip
    predictor, _ = load(fields, kinds, **whole)
    found = predictor.predict(pd.DataFrame({"a": [1.0, 2.0]}))
    model = SimpleNamespace(kinds=kinds, labels=labels, thresholds={name: 0.3})
    expected = {}
    for column, array in make_columns(model, whole, None).items():
        expected |= dict(flatten(column, array))
    assert list(found) == list(expected)
    for column, array in expected.items():
        values = [each.tolist() if isinstance(each, np.ndarray) else each for each in found[column]]
        assert values == array.to_pylist()


def flatten(before, array):
    if pa.types.is_struct(array.type):
        for field, each in zip(array.type, array.flatten(), strict=True):
            yield from flatten(f"{before}/{field.name}", each)
    else:
        yield before, array

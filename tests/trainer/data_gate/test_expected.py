"""Tests which datasets a schema file rejects, and which schema files are invalid."""

from dataclasses import replace

import numpy as np
import pytest
import yaml

from flotilla.trainer.data_gate import expected, validate
from flotilla.trainer.runtime.errors import ConfigError
from tests.trainer.data_gate.skews import table
from tests.trainer.data_gate.tables import profile, question, split_of


@pytest.fixture(scope="module")
def dataset():
    return profile(split_of(table(np.random.default_rng(0), 500)))


def found(dataset, **features):
    schema = expected.ExpectedFeatures.model_validate({"features": features})
    asked = replace(question(dataset), schema=schema)
    return {(each.rule, each.feature): each.says for each in validate.find_all(asked)}


def test_a_dataset_keeps_to_the_schema_that_it_has_itself(dataset, tmp_path):
    path = tmp_path / "schema.yaml"
    path.write_text(expected.infer_schema(dataset), encoding="utf-8")
    read = expected.read(str(path))
    assert set(read.features) == set(dataset.specs)
    tree = yaml.safe_load(path.read_text(encoding="utf-8"))["features"]
    assert tree["city"]["values"] == ["Aachen", "Bonn", "Celle", "Dessau", "Essen", "Fulda"]
    train = {name: {**each, "min": -1e9, "max": 1e9, "missing": 1} for name, each in tree.items()}
    assert found(dataset, **train) == {}


@pytest.mark.parametrize(
    ("features", "rule", "says"),
    [
        ({"agee": {}}, ("missing_feature", "agee"), "did you mean 'age'?"),
        ({"age": {"type": "text"}}, ("type", "age"), "'age' is a number"),
        ({"age": {"min": 30}}, ("schema", "age"), "below min 30"),
        ({"age": {"max": 30}}, ("schema", "age"), "above max 30"),
        ({"income": {"missing": 0}}, ("schema", "income"), "is missing"),
        ({"city": {"values": ["Bonn"]}}, ("schema", "city"), "'Aachen'"),
    ],
)
def test_what_the_schema_does_not_allow_is_named(dataset, features, rule, says):
    assert says in found(dataset, **features)[rule]


def test_what_is_not_required_may_be_absent(dataset):
    assert found(dataset, note={"required": False}) == {}
    assert expected.read("") is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "there is no file"),
        ("features: [", "is not YAML"),
        ("- age", "lists no features"),
        ("features: {age: {type: integer}}", "features.age.type"),
        ("features: {age: {maximum: 3}}", "features.age.maximum"),
        ("features: {age: {min: 3, max: 1}}", "features.age: min 3 is above max 1"),
        ("features: {age: {missing: 3}}", "features.age.missing"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path, text, says):
    path = tmp_path / "schema.yaml"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"data\.schema_file: ") as refused:
        expected.read(str(path))
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)

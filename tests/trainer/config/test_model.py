"""Tests checks of model tables without data, and the messages of `training.warm_start`."""

from __future__ import annotations

from pathlib import Path

import pytest

from flotilla.trainer.config.load import load_config, parse_config
from flotilla.trainer.config.model import initial_weights
from flotilla.trainer.runtime.errors import ConfigError

CLICKS = Path(__file__).parents[3] / "examples/clicks_large/clicks_large.yaml"


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("item.min_count=300", "item.min_count: 300 is not allowed; it must be at most 255"),
        ("item.min_count=0", "item.min_count: 0 is not allowed; it must be at least 1"),
        ("user.capacity=0", "user.capacity: 0 is not allowed; it must be at least 1"),
        ("user={capacity: 3, shards: 4}", "user.capacity: 3 is not allowed; it must be at least"),
        ("user.capacity=many", "user.capacity: 'many' is not a whole number"),
        ("user.min_count=true", "user.min_count: True is not a whole number"),
        ("user.max_age=16", "user.max_age: 16 is not allowed; it must be above min_age (16)"),
        ("user.maxage=3", "user: there is no key 'maxage'; did you mean 'max_age'?"),
        ("user=5", "user: 5 has no capacity; write {capacity: COUNT}"),
    ],
)
def test_a_table_that_cannot_be_is_refused_with_the_configuration(setting, line):
    with pytest.raises(ConfigError) as caught:
        load_config(CLICKS, [f"model.args.tables.{setting}"])
    assert str(caught.value).startswith(f"model.args: tables.{line}")
    assert "\n" not in str(caught.value)


def test_of_other_models_only_the_function_knows_its_tables():
    args = {"tables": {"user": {"rows": 5}}}
    assert parse_config({"model": {"name": "own:model", "args": args}}).model.args == args


def test_the_path_of_a_keras_file_becomes_a_uri(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = (tmp_path / "models/a.keras").as_uri()
    assert initial_weights("models/a.keras").source == expected
    assert initial_weights({"from": "models/a.keras", "include": ["*"]}).source == expected


@pytest.mark.parametrize(
    ("include", "exclude"), [(["stem/*"], []), ([], ["logits/*"]), (["a/*", "b/*"], ["a/bias"])]
)
def test_a_mapping_names_a_part_of_them(include, exclude):
    value = {"from": "champion", "include": include, "exclude": exclude}
    found = initial_weights(value)
    assert found.is_partial
    assert (found.include, found.exclude) == (tuple(include), tuple(exclude))
    assert found.value() == {name: each for name, each in value.items() if each}
    assert initial_weights(found.value()) == found


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("champoin", "did you mean 'champion'"),
        ("runs/a", "it must be champion, the URI of a checkpoint"),
        ("gs://bucket/../a", ".."),
        ({"from": "champion", "inculde": []}, "there is no key 'inculde'; did you mean 'include'"),
        ({"from": "champion", "layers": []}, "(one of from, include, exclude)"),
        ({"exclude": ["logits/*"]}, "the URI of the weights is missing; write {from: URI}"),
        ({"from": "", "exclude": ["logits/*"]},
         "the URI of the weights is missing; write {from: URI}"),
        ({"from": "champion", "exclude": "logits/*"}, 'exclude: "logits/*" is not a list'),
        ({"from": "champion", "include": [""]}, 'include: [""] is not a list of globs'),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_line(value, words):
    with pytest.raises(ValueError, match=r".") as caught:
        initial_weights(value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)

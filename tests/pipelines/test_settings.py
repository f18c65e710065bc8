"""Tests that settings from a Python mapping become values of the configuration."""

from pathlib import Path

import numpy as np
import pytest

from flotilla.pipelines.settings import Sections, format_search, make_assignments, value_text
from flotilla.trainer.config.load import load_config, parse_value
from flotilla.trainer.config.schema import Config
from flotilla.trainer.runtime.errors import ConfigError


def test_every_section_is_a_keyword():
    assert set(Sections.__annotations__) == set(Config.model_fields) - {"name", "code"}


@pytest.mark.parametrize(
    "settings",
    [
        {"training.steps": 7, "model.args.hidden_units": [5]},
        {"training": {"steps": 7}, "model": {"args.hidden_units": [5]}},
        ["training.steps=7", "model.args.hidden_units=[5]"],
    ],
)
def test_nested_dotted_and_texts_are_the_same(settings):
    assert make_assignments(settings) == ("training.steps=7", "model.args.hidden_units=[5]")


def test_sections_are_merged_and_come_last():
    texts = make_assignments({"training.steps": 7}, {"training": {"steps": 9, "optimizer": {}}})
    config = load_config(None, texts)
    assert config.training.steps == 9
    assert config.training.optimizer == Config().training.optimizer
    # As in a file, a mapping that is not a section is one value.
    config = load_config(None, make_assignments({"model": {"args": {"hidden_units": [5]}}}))
    assert config.model.args == {"hidden_units": [5]}


@pytest.mark.parametrize(
    "value",
    [
        "plain", "two words", "", "no", "null", "1e3", "a: b", "#1", "[1, 2", "'", '"', "\\n",
        "Köln", "日本", "🛰", "a\u2028b\x85c\x7f", "tab\tline\n", "%x", "@", "a,b", "{}", " edge ",
        0, -1, 1e-5, 1e300, True, None, [], {}, [1, [2, "no"]], {"a.b": {"no": "2025-01-01"}},
    ],
)  # fmt: skip
def test_a_value_is_read_as_it_was_given(value):
    assert parse_value(value_text("model.args.x", value)) == value


def test_numbers_of_numpy_and_paths_are_plain(tmp_path):
    assert value_text("a", np.int64(3)) == "3"
    assert value_text("a", np.array([0.5, 1])) == "[0.5, 1.0]"
    assert value_text("a", Path("in.csv")) == "in.csv"
    assert value_text("a", [tmp_path]) == f'["{tmp_path}"]'


@pytest.mark.parametrize(
    "settings",
    ["training.steps=5", [5], {"model.args.x": object()}, {"model.args.x": {1, 2}}],
)
def test_what_is_no_setting_is_refused(settings):
    with pytest.raises(ConfigError, match=r"is neither a mapping|is not plain data"):
        make_assignments(settings)


def test_a_search_has_lists_and_ranges():
    found = list(format_search({"training.batch_size": [32, 64], "model.name": ("mlp", "cnn")}))
    assert found == ["training.batch_size=32,64", "model.name=mlp,cnn"]
    assert list(format_search({"a.b": "0.1..1:log"})) == ["a.b=0.1..1:log"]
    assert list(format_search(["a.b=1,2"])) == ["a.b=1,2"]
    lists = list(format_search({"model.args.hidden_units": [[64], [128, 64]]}))
    assert lists == ["model.args.hidden_units=[64],[128, 64]"]

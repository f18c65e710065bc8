"""Tests the form of a run: its fields, and that a configuration survives a round trip."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flotilla.trainer.config.form import (
    FIELDS,
    SETTINGS,
    WHOLE,
    from_form,
    parse_settings,
    to_form,
    to_local_form,
)
from flotilla.trainer.config.load import load_config, parse_config
from flotilla.trainer.config.schema import Config
from flotilla.trainer.runtime.errors import ConfigError
from tests.conftest import ROOT

BY_NAME = {each.name: each for each in FIELDS}
numbers = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
# Exclude braces, because KFP replaces placeholders, which begin with two braces.
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="{}"), max_size=12)
free = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.just(0.25) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
configurations = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["a", "swans-2"]),
        "data": st.fixed_dictionaries({"label": st.lists(texts.filter(str.strip), max_size=3)}),
        "task": st.fixed_dictionaries({"name": st.sampled_from(["auto", "regression", "a.b:C"])}),
        "model": st.fixed_dictionaries(
            {
                "name": st.sampled_from(["mlp", "cnn", "own.models:net"]),
                "args": st.dictionaries(texts, free, max_size=3),
            }
        ),
        "training": st.fixed_dictionaries(
            {
                "strategy": st.sampled_from(["single", "own.strategies:Ring"]),
                "steps": st.integers(1, 10**9),
                "optimizer": st.fixed_dictionaries(
                    {"learning_rate": st.floats(1e-300, 1e300), "args": st.just({"beta_1": 0.5})}
                ),
            }
        ),
        "gate": st.fixed_dictionaries({"max": st.dictionaries(st.just("loss"), numbers)}),
        "export": st.just({"formats": ["saved_model"]}),
    },
)


def form(config=None, /, **values):
    return {**to_form(config or Config()), **values}


def refused(config=None, /, **values):
    with pytest.raises(ConfigError) as caught:
        from_form(form(config, **values))
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


def as_kfp_passes(values):
    """Return the values as KFP's API stores them, with every number in a mapping as a double."""

    def doubled(value):
        if isinstance(value, dict):
            return {key: doubled(each) for key, each in value.items()}
        if isinstance(value, list):
            return [doubled(each) for each in value]
        whole = isinstance(value, int) and not isinstance(value, bool)
        return float(value) if whole else value

    values = json.loads(json.dumps(values))
    return {**values, SETTINGS: doubled(values[SETTINGS])}


def test_the_fields_their_choices_and_their_defaults():
    assert list(BY_NAME) == [
        "name", "source", "label", "model", "steps", "epochs", "batch_size",
        "learning_rate", "strategy", "workers", "servers", "gpus", "storage_root", "settings",
    ]  # fmt: skip
    drawn = {each.name: each.choices for each in FIELDS if each.choices}
    assert set(drawn) == {"model", "strategy"}
    assert all(choices[-1] == SETTINGS for choices in drawn.values())
    assert from_form({each.name: each.default for each in FIELDS}) == Config()


def test_a_field_has_a_default_of_its_type_and_says_what_it_is():
    for field in FIELDS:
        assert type(field.default) is field.type, field
        assert field.description == " ".join(field.description.split())
        assert len(field.description.split()) > 2, field
        # KFP's server rejects a default that is not among the choices.
        assert not field.choices or field.default in field.choices, field


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/*.yaml")), ids=lambda path: path.stem)
def test_each_configuration_comes_back(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load_config(path)
    assert from_form(as_kfp_passes(to_form(config))) == config
    local = to_local_form(config)
    # Inside a mapping, KFP's local runner would turn integers into floats.
    assert set(local[SETTINGS]) == {WHOLE}
    assert from_form(local) == config


@settings(deadline=None, max_examples=40)
@given(configurations)
def test_there_and_back_again(tree):
    config = parse_config(tree)
    values = to_form(config)
    assert list(values) == list(BY_NAME)
    assert from_form(as_kfp_passes(values)) == config
    assert from_form(json.loads(json.dumps(to_local_form(config)))) == config


def test_settings_hold_what_has_no_field_with_whole_numbers():
    config = load_config(None, ["training.steps=7", "training.patience=3"])
    values = to_form(config)
    assert values["steps"] == 7
    assert values[SETTINGS] == {"training": {"patience": 3}}
    tree = {"training": {"patience": 3.0}, "model": {"args": {"hidden_units": [10.0, 20.0]}}}
    config = from_form(form(settings=tree))
    assert config.training.patience == 3
    assert [type(each) for each in config.model.args["hidden_units"]] == [int, int]


@pytest.mark.parametrize(
    ("given_", "key"),
    [
        ("s3://bucket/rows.csv", "source"),
        ("gs://bucket/{SPAN}/*.parquet", "source"),
        ("/data/rows.csv", "source"),
        ("mnist", "dataset"),
        ("my.builders:Birds", "dataset"),
    ],
)
def test_one_field_is_files_or_a_dataset_by_name(given_, key):
    data = from_form(form(source=given_)).data
    assert {"source": data.source, "dataset": data.dataset}[key] == given_


def test_a_source_of_this_machine_is_sent_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config(None, ["data.source=rows.csv"])
    assert to_form(config)["source"] == os.path.join(tmp_path, "rows.csv")


@pytest.mark.parametrize(
    ("text", "labels"),
    [("", ()), ("price", ("price",)), ('["a", "b"]', ("a", "b")), ('["[a"]', ("[a",))],
)
def test_a_label_is_a_name_or_a_list(text, labels):
    config = from_form(form(label=text))
    assert tuple(config.data.label) == labels
    assert to_form(config)["label"] == text


@pytest.mark.parametrize("name", ["model", "strategy"])
def test_a_value_of_ones_own_is_in_the_settings(name):
    key = BY_NAME[name].key
    config = load_config(None, [f"{'.'.join(key)}=own.module:Part"])
    values = to_form(config)
    assert values[name] == SETTINGS
    assert values[SETTINGS] == {key[0]: {key[1]: "own.module:Part"}}
    assert from_form(values) == config
    said = refused(**{name: SETTINGS})
    assert said == (
        f"{name}: the value 'settings' needs {'.'.join(key)} in settings; add it, or choose "
        "another value"
    )


def test_a_key_is_given_in_one_place():
    for field in FIELDS:
        if not field.key:
            continue
        tree = field.default
        for part in reversed(field.key):
            tree = {part: tree}
        said = refused(**{SETTINGS: tree})
        assert said.startswith(
            f"settings: the field {field.name} of the form sets {'.'.join(field.key)}; set it there"
        )
        assert ("choose 'settings' there" in said) == bool(field.choices)
    said = refused(settings={"data": {"dataset": "mnist"}})
    assert "the field source of the form sets data.dataset" in said


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"steps": -5}, "training.steps: -5 is not allowed"),
        ({"steps": 3.5}, "training.steps: 3.5 is not allowed"),
        ({"model": "mpl"},
         "model.name: 'mpl' is not allowed: there is no model with this name; did you"),
        ({"label": "[a"}, "label: '[a' is not a list such as"),
        ({"settings": "gate"}, "settings: 'gate' is not a mapping of sections"),
        ({"settings": {"training": 3}}, "settings.training: 3 is not a section"),
        ({"settings": {"gates": {}}}, "gates: no such key; did you mean 'gate'?"),
        ({"settings": {"gate": {"mim": {}}}}, "gate.mim: no such key"),
        ({"settings": {WHOLE: "{"}}, "settings.json must contain the text of a configuration"),
        ({"workers": 9}, "cluster.workers: 9 workers cannot share 8 shards"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line(values, said):
    assert refused(**values).startswith(said)


def test_a_whole_configuration_and_epochs_take_the_place_of_fields():
    config = load_config(None, ["training.steps=9"])
    values = form(settings={WHOLE: config.model_dump_json()}, steps=5)
    assert from_form(values).training.steps == 9
    assert parse_settings(values[SETTINGS])["training"]["steps"] == 9
    config = from_form({**to_form(Config()), "epochs": 2.0})
    assert config.training.epochs == 2
    assert config.training.validate_every == 500


@pytest.mark.parametrize(
    "tree",
    [
        {"data": {"source": "gs://b/t.csv"}},
        {"data": {"source": "gs://b/t.csv"}, "training": {"epochs": 2.5, "patience": 4}},
        {"training": {"epochs": 3}},
        {"training": {"steps": "auto", "optimizer": {"learning_rate": 1}}},
    ],
)
def test_what_is_chosen_by_the_data_is_zero_in_the_form(tree):
    config = parse_config(tree)
    form = to_form(config)
    assert form["steps"] == 0
    assert {name: type(form[name]) for name in BY_NAME} == {
        name: each.type for name, each in BY_NAME.items()
    }
    assert from_form(form) == config

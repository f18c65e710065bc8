"""The configuration as run parameters: flat, typed, and the same again when it comes back."""

from __future__ import annotations

import inspect
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer.config.run_parameters import from_parameters, run_parameters, to_parameters

from trainer.config.load import load_config, parse_config
from trainer.config.schema import STRATEGIES, Config
from trainer.errors import ConfigError

BY_NAME = {parameter.name: parameter for parameter in run_parameters()}
numbers = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
free = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
configurations = st.fixed_dictionaries(
    {},
    optional={
        "data": st.fixed_dictionaries({"version": texts, "manual_dir": texts}),
        "model": st.fixed_dictionaries({"args": st.dictionaries(texts, free, max_size=3)}),
        "training": st.fixed_dictionaries(
            {
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


def refused(**values):
    with pytest.raises(ConfigError) as caught:
        from_parameters({**to_parameters(Config()), **values})
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


def test_every_leaf_is_one_parameter_in_the_order_of_the_file():
    names = [parameter.name for parameter in run_parameters()]
    assert len(set(names)) == len(names)
    assert names[:3] == ["name", "data_dataset", "data_source"]
    assert names[-1] == "code"
    assert {"training_optimizer_learning_rate", "training_schedule_name", "gate_min"} < set(names)
    assert all(name.isidentifier() and name == name.lower() for name in names)


@pytest.mark.parametrize(
    ("name", "kind", "default", "is_json"),
    [
        ("name", str, "digits", False),
        ("data_validation", float, 0.1, False),
        ("data_partition", str, "disjoint", False),
        ("training_steps", int, 1500, False),
        ("training_checkpoint_seconds", float, 0.0, False),
        ("training_mixed_precision", str, "", False),
        ("cluster_launcher", str, "local", False),
        ("model_args", str, "{}", True),
        ("cluster_placement", str, "{}", True),
        ("evaluation_slices", str, "[]", True),
        ("gate_min", str, "{}", True),
        ("export_formats", str, '["saved_model", "keras"]', True),
    ],
)
def test_a_parameter_has_the_type_that_the_pipeline_shows(name, kind, default, is_json):
    parameter = BY_NAME[name]
    assert parameter.type is kind
    assert parameter.default == default
    assert type(parameter.default) is kind
    assert parameter.is_json is is_json
    assert "_".join(parameter.key) == name


@pytest.mark.parametrize("parameter", run_parameters(), ids=lambda parameter: parameter.name)
def test_every_default_is_a_value_of_its_type(parameter):
    assert type(parameter.default) is parameter.type
    assert parameter.type in (str, int, float, bool)
    assert type(to_parameters(Config())[parameter.name]) is parameter.type


def test_the_defaults_are_the_default_configuration():
    assert from_parameters({name: each.default for name, each in BY_NAME.items()}) == Config()


def test_they_make_a_signature():
    inspect.Signature(
        inspect.Parameter(p.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=p.default)
        for p in run_parameters()
    )


@settings(deadline=None)
@given(configurations)
def test_there_and_back_again(tree):
    config = parse_config(tree)
    flat = to_parameters(config)
    assert list(flat) == list(BY_NAME)
    # What Kubeflow Pipelines keeps of them is JSON.
    assert from_parameters(json.loads(json.dumps(flat))) == config


def test_json_of_a_person_may_be_yaml():
    values = {
        **to_parameters(Config()),
        "model_args": "{hidden_units: [10, 20]}",
        "export_formats": "[saved_model]",
        "gate_max": "{loss: 1e1}",
    }
    expected = [
        "model.args={hidden_units: [10, 20]}",
        "export.formats=[saved_model]",
        "gate.max.loss=10",
    ]
    assert from_parameters(values) == load_config(None, expected)


def test_a_whole_number_is_a_number():
    assert from_parameters({**to_parameters(Config()), "data_validation": 100}).data.validation
    assert "training.steps: 1500.0 is not allowed" in refused(training_steps=1500.0)


def test_further_values_belong_to_the_step_and_are_left_alone():
    assert from_parameters({**to_parameters(Config()), "kfp_run_id": "abc"}) == Config()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"training_steps": 0}, "training.steps: 0 is not allowed"),
        ({"training_steps": "5"}, "training.steps: '5' is not allowed"),
        ({"model_name": "mpl"}, "model.name: 'mpl' is not allowed: no model of this name; did you"),
        ({"gate_min": '{"accuracy": 1.1}'}, "gate.min: accuracy is a share"),
        ({"gate_min": "0.9"}, "gate.min: 0.9 is not allowed"),
        ({"model_args": "{"}, "model.args: '{' is not JSON, such as {}"),
        ({"export_formats": "[keras"}, "export.formats: '[keras' is not JSON, such as ["),
        ({"model_args": '{"rate": Infinity}'}, "model.args: inf is not a finite number"),
        ({"cluster_workers": 9}, "cluster.workers: 9 workers cannot share 8 shards"),
    ],
)
def test_a_wrong_parameter_is_named_by_its_key(values, said):
    assert refused(**values).startswith(said)


def described():
    return {parameter.name: parameter.description for parameter in run_parameters()}


def test_every_parameter_says_what_it_is_on_one_line():
    for name, words in described().items():
        assert words, name
        assert words == " ".join(words.split()), name


def test_a_parameter_says_which_words_it_takes():
    words = described()
    assert words["cluster_launcher"].endswith("; one of: local, tfjob, jobset, auto")
    assert words["export_formats"].endswith(
        "some of: saved_model, keras, tflite, tflite_int8 (JSON)"
    )
    # It says them by itself.
    assert words["data_partition"].count("reshuffle") == 1
    for strategy in STRATEGIES:
        assert strategy in words["training_strategy"]


def test_a_parameter_says_that_it_is_json():
    for parameter in run_parameters():
        assert parameter.description.endswith("(JSON)") == parameter.is_json, parameter.name


def test_a_fraction_for_an_integer_is_one_line():
    # The API of KFP takes any number for an integer.
    assert refused(training_steps=3.5).startswith("training.steps: 3.5 is not allowed")


@pytest.mark.parametrize(
    ("value", "flat"),
    [
        ("champion", "champion"),
        (
            {"from": "champion", "exclude": ["out/*"]},
            '{"from": "champion", "exclude": ["out/*"]}',
        ),
    ],
)
def test_a_text_or_a_mapping_is_one_text(value, flat):
    config = parse_config({"training": {"warm_start": value}})
    parameters = to_parameters(config)
    assert parameters["training_warm_start"] == flat
    assert from_parameters(parameters) == config


def test_a_mapping_of_a_person_may_be_yaml():
    values = {**to_parameters(Config()), "training_warm_start": "{from: champion, include: [a/*]}"}
    found = from_parameters(values).training.warm_start
    assert found == {"from": "champion", "include": ["a/*"]}
    assert "training.warm_start" in refused(training_warm_start="{from: [")


def test_a_brace_in_another_text_is_a_text():
    assert from_parameters({**to_parameters(Config()), "data_version": "{x"}).data.version == "{x"

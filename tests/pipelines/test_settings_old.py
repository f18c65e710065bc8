"""Tests how run parameters from before the form are converted to the current ones."""

import json

import pytest

from flotilla.pipelines.settings import (
    OPTIONS,
    are_old_parameters,
    convert_parameters,
    describe_replacement,
    keys,
)
from flotilla.trainer.config.load import load_config
from flotilla.trainer.config.schema import Config
from flotilla.trainer.runtime.errors import ConfigError
from tests.conftest import ROOT


def flat(config):
    """Return the run parameters as an earlier version sent them."""
    found = {}
    for name, (key, field) in keys().items():
        value = config
        for part in key:
            value = getattr(value, part)
        is_text = isinstance(field.default, str) and isinstance(value, str)
        plain = is_text or field.annotation in (int, float, bool)
        found[name] = value if plain else json.dumps(value, default=_tree_of)
    return found


def _tree_of(model):
    return model.model_dump(mode="json", exclude_defaults=True)


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/*.yaml")), ids=lambda path: path.stem)
def test_each_configuration_comes_back(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load_config(path)
    values = flat(config)
    # The API server may store an integer as a double.
    kept = {name: float(each) if type(each) is int else each for name, each in values.items()}
    for each in (values, kept):
        assert convert_parameters({**each, "image": "a/b:1", "step_memory": "8Gi"}) == config


def test_a_word_or_a_mapping_and_yaml_of_a_person():
    given = {
        "training_steps": 5.0, "gate_min": '{"accuracy": 0.5}',
        "training_warm_start": '{"from": "champion", "exclude": ["out/*"]}',
        "model_args": "{hidden_units: [10, 20]}",
    }  # fmt: skip
    config = convert_parameters(given)
    assert config.training.warm_start == {"from": "champion", "exclude": ["out/*"]}
    assert config.model.args == {"hidden_units": [10, 20]}
    assert convert_parameters({"training_warm_start": "champion"}).training.warm_start == "champion"
    with pytest.raises(ConfigError, match=r"^training\.cached_rows: removed"):
        convert_parameters({"training_cached_rows": 5})


def test_they_differ_from_the_form():
    assert are_old_parameters(flat(Config()))
    assert not are_old_parameters({"steps": 5, "settings": {}})
    assert not are_old_parameters({})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("training_steps", "use the field steps, or --set training.steps=..."),
        ("training_patience", "use --set training.patience=..."),
        ("data_source", "use the field source, or --set data.source=..."),
        ("step_memory", "use --memory of `flotilla compile` and `flotilla upload`"),
        ("data_dataset", "use the field source, or --set data.dataset=..."),
        ("image", "use --image IMAGE"),
        ("batch_size", "use --set training.batch_size=..."),
        ("name", "use --set name=..."),
        ("nothing", "set a key of the configuration with --set SECTION.KEY=VALUE"),
    ],
)
def test_each_has_a_spelling_of_now(name, said):
    assert describe_replacement(name) == said
    assert all(describe_replacement(each).startswith("use ") for each in (*keys(), *OPTIONS))

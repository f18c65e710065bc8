"""Completion of `--set`: every key of the configuration and its possible values."""

import pytest
from pydantic import BaseModel

from flotilla.pipelines.cli.completion.assignments import complete_assignments
from flotilla.trainer.config.load import load_config
from flotilla.trainer.config.schema import Config
from flotilla.trainer.runtime.errors import ConfigError


def offered(incomplete):
    return [value for value, _ in complete_assignments(incomplete) if value.startswith(incomplete)]


def keys(path=""):
    for each in offered(path):
        if each.endswith("."):
            yield from keys(each)
        else:
            yield each


def leaves(model, path=""):
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from leaves(kind, f"{path}{name}.")
        else:
            yield f"{path}{name}="


def test_every_key_can_be_reached():
    assert set(leaves(Config)) <= set(keys())


@pytest.mark.parametrize(
    ("incomplete", "expected"),
    [
        ("tr", ["training."]),
        ("training.hand", ["training.hand_on="]),
        ("training.hand_on=", ["training.hand_on=best", "training.hand_on=last"]),
        ("training.jit_compile=t", ["training.jit_compile=true"]),
        ("training.steps=", ["training.steps=1500", "training.steps=auto"]),
        ("cluster.launcher=j", ["cluster.launcher=jobset"]),
        ("training.optimizer.name=ad", [
            f"training.optimizer.name={name}"
            for name in ("adam", "adadelta", "adafactor", "adagrad", "adamax", "adamw")
        ]),
        ("data.image.channels=", [f"data.image.channels={number}" for number in (3, 1, 4)]),
        ("training.nothing=", []),
        ("nothing.", []),
        ("task.outputs.", []),
        ("....", []),
        ("=", []),
    ],
)  # fmt: skip
def test_what_is_offered(incomplete, expected):
    assert offered(incomplete) == expected


def test_a_key_is_described():
    found = dict(complete_assignments("training."))
    assert found["training.stall_timeout="]


@pytest.mark.parametrize(
    "key", ["model.name", "task.name", "training.strategy", "training.optimizer.name"]
)
def test_the_names_are_those_that_the_configuration_knows(key):
    with pytest.raises(ConfigError) as refused:
        load_config(None, [f"{key}=qqqqqqqqqqqqqqqq"])
    listed = str(refused.value).partition("(one of ")[2].rpartition(")")[0]
    known = {each for each in listed.split(", ") if each.isidentifier()}
    assert known == {each.partition("=")[2] for each in offered(f"{key}=")}

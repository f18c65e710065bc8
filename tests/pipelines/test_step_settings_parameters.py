"""Run parameters of the steps, as the command line gives them to runs and schedules."""

from __future__ import annotations

import pytest

from pipelines.step_settings import assigned, step_parameters
from trainer.errors import ConfigError


def test_texts_stay_texts_and_the_rest_is_read():
    given = ["image=a/b:2", "step_cpu=4", "step_node_selector={pool: gpu}", "step_tolerations=[]"]
    assert assigned(given) == {
        "image": "a/b:2",
        # KFP takes texts alone where it sets up pods.
        "step_cpu": "4",
        "step_node_selector": {"pool": "gpu"},
        "step_tolerations": [],
    }
    assert assigned([]) == {}


def test_each_default_is_taken_back():
    for each in step_parameters():
        assert assigned([f"{each.name}={each.default}"]) == {each.name: each.default}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("step_memroy=16Gi", "did you mean 'step_memory'?"),
        ("training_steps=5", "set keys of the configuration by --set"),
        ("step_memory", "as NAME=VALUE"),
        ("=5", "as NAME=VALUE"),
        ("step_tolerations={a: b}", "is not a list of YAML or JSON"),
        ("step_node_selector=[", "is not a mapping of YAML or JSON"),
    ],
)
def test_what_is_wrong_is_named(text, words):
    with pytest.raises(ConfigError, match="--parameter") as error:
        assigned([text])
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_run_gets_them(instance, remote, uploaded):
    words = ["--parameter", "step_memory=16Gi", "--parameter", "store_secret=ours"]
    assert remote("submit", *words).code == 0
    [run] = instance.store.runs.values()
    given = run["runtime_config"]["parameters"]
    assert (given["step_memory"], given["store_secret"]) == ("16Gi", "ours")
    assert "image" not in given
    assert uploaded


def test_a_schedule_gets_them_and_another_value_replaces_it(instance, remote, uploaded):
    words = ["schedule", "--every", "6h", "--parameter"]
    for value in ("16Gi", "16Gi", "8Gi"):
        assert remote(*words, f"step_memory={value}").code == 0
    [one] = instance.store.recurring.values()
    assert one["runtime_config"]["parameters"]["step_memory"] == "8Gi"
    assert uploaded


def test_a_wrong_one_is_one_line(instance, remote, uploaded):
    result = remote("submit", "--parameter", "step_memroy=1Gi")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert not instance.store.runs
    assert uploaded

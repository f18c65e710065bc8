"""Run parameters of the steps, as the command line gives them to runs and schedules."""

from __future__ import annotations

import pytest

from components.pod_parameters import step_parameters
from pipelines.step_settings import assigned
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
        ("step_cpu=abc", "--parameter step_cpu: 'abc' is not a quantity of Kubernetes"),
        ("step_memory=16", "--parameter step_memory: '16' is less than 1Mi"),
        ("step_gpus=-1", "step_gpus: '-1' is not a whole number"),
        ("step_node_selector={pool: 1}", "step_node_selector: pool: 1 is not a text"),
        ("step_tolerations=[{keys: a}]", "did you mean 'key'?"),
        ("image=Our Image", "image: 'Our Image' is not the name of an image"),
        ("store_secret=", "store_secret: '' is not a name"),
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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--pipeline-root", "file:///tmp/kfp"], "--pipeline-root 'file:///tmp/kfp' is a folder: "),
        (["--pipeline-root", "/tmp/kfp"], "--pipeline-root '/tmp/kfp' is not a storage URI: "),
        (["--pipeline-root", "http://a/b"], "--pipeline-root 'http://a/b' is not a storage URI: "),
        (["--service-account", "Pipeline Runner"], "--service-account 'Pipeline Runner' is not a "),
        (["--parameter", "step_cpu=abc"], "--parameter step_cpu: 'abc' is not a quantity of "),
    ],
)
@pytest.mark.parametrize("command", [["submit"], ["schedule", "--every", "6h"]], ids="-".join)
@pytest.mark.usefixtures("uploaded")
def test_what_no_driver_takes_is_refused_before_it_is_sent(instance, remote, command, words, said):
    result = remote(*command, *words)
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert said in result.err
    assert not instance.store.runs
    assert not instance.store.recurring

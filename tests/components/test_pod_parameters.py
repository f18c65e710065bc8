"""The run parameters of the pods: the first step checks them, whose own pod needs few of them."""

import pytest
import yaml
from kfp import dsl

from components import resolve_config
from components.pod_parameters import check_parameters, step_parameters
from components.table import STEPS
from pipelines.compile import compile_pipeline
from tests.components.called_steps import refused
from trainer.config.run_parameters import run_parameters
from trainer.errors import ConfigError

WRONG = {
    "image": "Our Image",
    "store_secret": "",
    "step_cpu": "abc",
    "step_memory": "16GB",
    "step_gpus": "half",
    "step_node_selector": {"pool": 1.0},
    "step_tolerations": [{"key": "spot", "operator": "exists"}],
}


def test_every_default_is_allowed():
    check_parameters({})
    check_parameters({each.name: each.default for each in step_parameters()})


def test_a_wrong_value_is_one_line_with_name_value_and_remedy():
    with pytest.raises(ConfigError) as error:
        check_parameters({"step_cpu": "abc", "step_gpus": "1"})
    assert str(error.value).startswith(
        "step_cpu: 'abc' is not a quantity of Kubernetes: write a number with a unit such as 500m"
    )


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("step_cpu", 4, "4 is not a text: write it in quotes"),
        ("step_gpus", 1.0, "1.0 is not a text"),
        ("step_memory", None, "None is not a text"),
        ("image", ["a"], r"\['a'\] is not a text"),
        ("step_node_selector", "pool", "'pool' is not a mapping"),
        ("step_node_selector", {7: "x"}, "7 is not the key of a label"),
        ("step_tolerations", {"key": "spot"}, "{'key': 'spot'} is not a list"),
    ],
)
def test_a_value_of_another_type_is_one_line_too(name, value, said):
    with pytest.raises(ConfigError, match=f"^{name}: {said}"):
        check_parameters({name: value})


def test_all_wrong_values_are_named():
    with pytest.raises(ConfigError) as error:
        check_parameters(WRONG)
    assert "\n" not in str(error.value)
    assert all(f"{name}: " in str(error.value) for name in WRONG)


@pytest.mark.parametrize("name", [each.name for each in step_parameters() if each.fails_driver])
@pytest.mark.usefixtures("emitted")
def test_the_first_step_refuses_it(name, capsys):
    values = {each.name: each.default for each in (*run_parameters(), *step_parameters())}
    artifact = dsl.Artifact(uri="gs://b/p/flotilla-training/7/resolve-config/configuration")
    values |= {name: WRONG[name], "kfp_run_id": "7", "configuration": artifact}
    code, line = refused(resolve_config.run_step, values, capsys=capsys)
    assert code == 2
    assert line.startswith(f"{name}: ")


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    path = tmp_path_factory.mktemp("compiled") / "pipeline.yaml"
    compile_pipeline(path)
    return list(yaml.load_all(path.read_text(encoding="utf-8"), yaml.CSafeLoader))


@pytest.mark.parametrize("step", [step for step in STEPS if step.is_light], ids=lambda s: s.name)
def test_the_pod_of_a_light_step_depends_on_no_value_that_fails_its_driver(step, documents):
    spec, platform = documents
    name = f"exec-{step.kfp_name}"
    container = spec["deploymentSpec"]["executors"][name]["container"]
    pod = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"][name]
    # Neither the code nor the arguments, which are its inputs.
    settings = str([container["resources"], container.get("env"), pod])
    for each in step_parameters():
        named = each.name in f"{settings} {container['image']}"
        assert named == (not each.fails_driver), each.name

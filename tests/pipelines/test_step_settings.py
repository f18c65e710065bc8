"""What the pods of the steps get: values that KFP finds, retries where they help, deadlines."""

import re

import pytest
import yaml

from components.kubernetes import names
from components.pod_parameters import step_parameters
from components.table import STEPS
from pipelines.compile import compile_pipeline
from pipelines.step_settings import RUN_SECONDS
from pipelines.training import PIPELINES
from trainer.config.kubernetes import JobConfig

PLACEHOLDER = re.compile(r"\{\{\$\.inputs\.parameters\['([^']+)'\]\}\}")
ROWS = {step.kfp_name: step for step in STEPS}


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    path = tmp_path_factory.mktemp("compiled") / "pipeline.yaml"
    compile_pipeline(path)
    return list(yaml.load_all(path.read_text(encoding="utf-8"), yaml.CSafeLoader))


@pytest.fixture(scope="module")
def groups(documents):
    """Every group of tasks, with the run's own as the first."""
    spec = documents[0]
    return [spec["root"], *(each for each in spec["components"].values() if "dag" in each)]


@pytest.fixture(scope="module")
def tasks(groups):
    return {
        task["componentRef"]["name"].removeprefix("comp-"): task
        for group in groups
        for task in group["dag"]["tasks"].values()
        if task["componentRef"]["name"].removeprefix("comp-") in ROWS
    }


@pytest.fixture(scope="module")
def containers(documents):
    executors = documents[0]["deploymentSpec"]["executors"]
    return {name.removeprefix("exec-"): each["container"] for name, each in executors.items()}


@pytest.fixture(scope="module")
def pods(documents):
    executors = documents[1]["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    return {name.removeprefix("exec-"): each for name, each in executors.items()}


def channels_of(tree):
    """Yield every name of an input of the surrounding group that a tree speaks of."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            if key == "componentInputParameter":
                yield value
            else:
                yield from channels_of(value)
    elif isinstance(tree, list):
        for each in tree:
            yield from channels_of(each)


def test_every_step_is_set_up(tasks):
    assert set(tasks) == set(ROWS)


def test_every_value_is_there_where_kfp_looks_for_it(groups, pods):
    for group in groups:
        there = set(group["inputDefinitions"]["parameters"])
        for task in group["dag"]["tasks"].values():
            step = task["componentRef"]["name"].removeprefix("comp-")
            assert set(channels_of(task)) <= there, step
            assert set(channels_of(pods.get(step, {}))) <= there, step


def test_every_placeholder_of_a_pod_is_an_input_of_its_step(tasks, containers):
    for step, container in containers.items():
        wanted = set(PLACEHOLDER.findall(str({**container, "command": [], "args": []})))
        assert wanted <= set(tasks[step]["inputs"]["parameters"]), step
        assert "pipelinechannel--image" in wanted


def test_a_working_step_gets_what_the_run_asks_for(containers):
    for step, container in containers.items():
        found = container["resources"]
        given = {key: PLACEHOLDER.findall(str(value)) for key, value in found.items()}
        if ROWS[step].is_light:
            assert not any(given.values())
            assert found["resourceMemoryLimit"] == "2Gi"
            continue
        for kind in ("Limit", "Request"):
            assert given[f"resourceCpu{kind}"] == ["pipelinechannel--step_cpu"]
            assert given[f"resourceMemory{kind}"] == ["pipelinechannel--step_memory"]


def test_gpus_are_for_what_computes_with_a_model(containers):
    with_gpus = {step for step, each in containers.items() if "accelerator" in each["resources"]}
    assert with_gpus == {name for name, row in ROWS.items() if row.may_use_gpus}
    assert {p.name: p.default for p in step_parameters()}["step_gpus"] == "0"


def test_what_finds_the_same_a_second_time_is_not_tried_again(tasks):
    retries = {
        step: task.get("retryPolicy", {}).get("maxRetryCount", 0) for step, task in tasks.items()
    }
    assert retries == {name: row.retries for name, row in ROWS.items()}
    assert retries["resolve-config"] == 0


def test_a_step_of_hours_is_tried_again_too(tasks, pods):
    for step, task in tasks.items():
        policy = task.get("retryPolicy")
        if not policy:
            continue
        # From the first attempt's begin on: an hour is KFP's own, and ends what takes longer.
        window = int(policy["backoffMaxDuration"].removesuffix("s"))
        assert window == RUN_SECONDS
        assert window > int(pods[step]["activeDeadlineSeconds"]), step
        assert (policy["backoffDuration"], policy["backoffFactor"]) == ("60s", 2.0)


def test_every_step_has_a_deadline(pods):
    seconds = {step: int(pod["activeDeadlineSeconds"]) for step, pod in pods.items()}
    assert seconds == {name: row.deadline_seconds for name, row in ROWS.items()}
    # The job ends by its own deadline, and the step tells how.
    assert seconds["train-model"] > JobConfig().active_deadline_seconds
    assert sum(seconds.values()) < RUN_SECONDS


def test_the_run_ends_and_is_cleaned_away(documents):
    config = documents[1]["platforms"]["kubernetes"]["pipelineConfig"]
    assert config == {"activeDeadlineSeconds": RUN_SECONDS, "resourceTtlOnCompletion": 604_800}


def test_where_the_pods_go_is_for_the_run_to_say(pods):
    for step, pod in pods.items():
        if ROWS[step].is_light:
            assert not {"nodeSelector", "tolerations"} & set(pod)
            continue
        selector = pod["nodeSelector"]["nodeSelectorJson"]["componentInputParameter"]
        assert selector.removeprefix("pipelinechannel--") == "step_node_selector"
        (toleration,) = pod["tolerations"]
        name = toleration["tolerationJson"]["componentInputParameter"]
        assert name.removeprefix("pipelinechannel--") == "step_tolerations"


def test_every_pod_has_the_labels_that_kubernetes_recommends(pods):
    for step, pod in pods.items():
        labels = pod["podMetadata"]["labels"]
        assert labels == names.app_labels(step, "{{workflow.uid}}")
        assert labels["app.kubernetes.io/component"] == step


@pytest.mark.parametrize("name", PIPELINES)
def test_on_this_machine_nothing_is_tried_again_or_set_up(name):
    spec = PIPELINES[name].pipeline_spec
    tasks = [task for each in spec.components.values() for task in each.dag.tasks.values()]
    for task in [*tasks, *spec.root.dag.tasks.values()]:
        assert not task.retry_policy.max_retry_count
    assert "resources" not in str(spec.deployment_spec)
    assert not PIPELINES[name].platform_spec.platforms


def test_both_are_the_same_steps_in_the_same_order(documents, groups):
    local = PIPELINES["run"].pipeline_spec
    for name, component in local.components.items():
        there = documents[0]["components"][name]
        if "dag" in there:
            assert set(there["dag"]["tasks"]) == set(component.dag.tasks)
            for task, each in component.dag.tasks.items():
                waits = there["dag"]["tasks"][task].get("dependentTasks", [])
                assert list(each.dependent_tasks) == waits
    assert set(groups[0]["dag"]["tasks"]) == set(local.root.dag.tasks)

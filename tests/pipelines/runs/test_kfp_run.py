"""Tests that a run's nodes can be read from whatever data remains of its workflow."""

import base64
import gzip
import json
from unittest.mock import create_autospec

import pytest

from flotilla.pipelines.runs.kfp_client import Client, InstanceError
from flotilla.pipelines.runs.kfp_run import Nodes, read_nodes
from tests.kfp_instance.workflow import IMAGE, WORKFLOW, Workflow, fnv, pod_name


@pytest.fixture
def workflow():
    return Workflow("some-run")


def read(manifest):
    client = create_autospec(Client, instance=True)
    client.get_json.return_value = {"pipeline_runtime": {"workflow_manifest": manifest}}
    return read_nodes(client, "some-run")


def changed(workflow, change):
    tree = json.loads(workflow.manifest())
    change(tree)
    return json.dumps(tree)


def test_steps_in_their_order_with_their_pods(workflow):
    workflow.begin("prepare_data")
    workflow.stop("prepare_data", "SUCCEEDED")
    workflow.begin("train_model")
    found = read(workflow.manifest())
    assert [(step.name, step.state, step.pod) for step in found.steps] == [
        (name, state, workflow.pod(name))
        for name, state in (("prepare_data", "SUCCEEDED"), ("train_model", "RUNNING"))
    ]
    [pod] = [pod for pod in found.pods if pod.state == "RUNNING"]
    assert (pod.step, pod.is_driver, pod.image) == ("train_model", False, IMAGE)
    assert found.artifact.endswith("/flotilla-training/some-run/prepare-data/77/place")


def test_a_step_whose_pod_waits_does_not_run_and_its_words_are_one_line(workflow):
    workflow.wait("train_model", "ImagePull\nBackOff:\x1b[31m \t red")
    found = read(workflow.manifest())
    assert [step.state for step in found.steps] == ["PENDING"]
    [pod] = [pod for pod in found.pods if pod.message]
    assert pod.message == r"ImagePull BackOff:\u001b[31m red"


def test_the_exit_step_is_one_in_a_hook(workflow):
    workflow.begin("finish")
    workflow.end("finish")
    [step] = read(workflow.manifest()).steps
    assert (step.name, step.state, step.pod) == ("finish", "SUCCEEDED", workflow.pod("finish"))


def test_the_last_try_counts(workflow):
    workflow.begin("train_model")
    workflow.stop("train_model", "FAILED", "pod deleted")

    def again(tree):
        nodes = tree["status"]["nodes"]
        [first] = [each for each in nodes.values() if each["displayName"] == "executor(0)"]
        name = first["name"].replace("executor(0)", "executor(1)")
        later = {**first, "name": name, "id": f"{WORKFLOW}-{fnv(name)}", "phase": "Running"}
        nodes[later["id"]] = {**later, "startedAt": "2026-01-03T00:00:00Z", "message": ""}
        tried.append(nodes[later["id"]])

    tried = []
    found = read(changed(workflow, again))
    assert found.steps[0].pod == pod_name(tried[0])
    own = [pod for pod in found.pods if pod.step == "train_model" and not pod.is_driver]
    assert [pod.state for pod in own] == ["RUNNING"]


@pytest.mark.parametrize(
    ("first", "second", "state"),
    [
        ("Failed", "Succeeded", "FAILED"),
        ("Succeeded", "Failed", "FAILED"),
        ("Failed", "Running", "RUNNING"),
        ("Succeeded", "Succeeded", "SUCCEEDED"),
    ],
)
def test_the_parallel_trials_of_a_sweep_are_one_step(workflow, first, second, state):
    workflow.begin("train_model")
    group = "condition-2(0)."

    def repeat(tree):
        ended = "2026-01-03T00:00:00Z"
        nodes = {}
        for number, phase in enumerate((first, second)):
            for node in tree["status"]["nodes"].values():
                name = node["name"].replace(group, f"{group}iterations({number}:{number})(0).")
                finished = {} if phase == "Running" else {"finishedAt": ended}
                nodes[name] = {**node, "name": name, "phase": phase, **finished}
        tree["status"]["nodes"] = nodes

    [step] = read(changed(workflow, repeat)).steps
    assert (step.name, step.state) == ("train_model", state)
    assert (step.ended is None) == (state == "RUNNING")


def test_nodes_that_argo_has_compressed(workflow):
    workflow.begin("train_model")

    def compress(tree):
        packed = gzip.compress(json.dumps(tree["status"].pop("nodes")).encode())
        tree["status"]["compressedNodes"] = base64.b64encode(packed).decode()

    assert read(changed(workflow, compress)) == read(workflow.manifest())


def test_a_long_name_of_a_pod_is_cut_before_its_hash(workflow):
    workflow.begin("train_model")

    def long(tree):
        for node in tree["status"]["nodes"].values():
            if node["displayName"] == "executor(0)":
                node["templateName"] += "-long" * 60

    [step] = read(changed(workflow, long)).steps
    assert len(step.pod) <= 253
    assert step.pod.endswith(workflow.pod("train_model").rpartition("-")[2])


@pytest.mark.parametrize("manifest", ["", None, "{}", '{"status": {"nodes": null}}', "[]"])
def test_a_workflow_that_has_not_begun(manifest):
    assert read(manifest) == Nodes()


@pytest.mark.parametrize("manifest", ["{", '{"status": {"nodes": {"a": {}}}}'])
def test_a_workflow_that_cannot_be_read_is_one_line(manifest):
    with pytest.raises(InstanceError, match=r"^the workflow of run some-run cannot be read: "):
        read(manifest)


@pytest.mark.parametrize("status", [404, 410, 501, 0, 401, 403, 503])
def test_an_instance_without_this_path_has_no_nodes_and_any_other_answer_is_an_error(status):
    client = create_autospec(Client, instance=True)
    client.get_json.side_effect = InstanceError("no", status)
    if status in (404, 410, 501):
        assert read_nodes(client, "some-run") == Nodes()
    else:
        with pytest.raises(InstanceError):
            read_nodes(client, "some-run")

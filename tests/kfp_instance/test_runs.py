"""Runs, nodes and logs of the stand-in are what KFP 2.17 with Argo 4.0.5 was seen to do."""

from __future__ import annotations

import json
import urllib.request
from urllib.error import HTTPError

import pytest

from components.records.step_record import published_records
from pipelines.runs.kfp_access import Access
from pipelines.runs.kfp_client import Client, InstanceError
from tests.kfp_instance.shapes import check
from tests.kfp_instance.workflow import IMPLEMENTATION, NEVER, Workflow, fnv


@pytest.fixture
def run_id(instance, uploaded):
    client = Client(Access(endpoint=instance.url))
    store = instance.store
    experiment = client.create_experiment("tests").experiment_id
    [version] = store.versions.values()
    ids = {"pipeline_id": version["pipeline_id"], "version_id": version["pipeline_version_id"]}
    assert version["display_name"] == uploaded
    return client.run_pipeline(experiment, "one", params={}, **ids).run_id


@pytest.fixture
def workflow(instance, run_id):
    instance.store.runs[run_id]["state"] = "RUNNING"
    return instance.store.workflows[run_id]


@pytest.fixture
def get(instance):
    """Return the status, the kind and the text of a response."""

    def fetch(path):
        try:
            with urllib.request.urlopen(instance.url + path) as answer:
                return answer.status, answer.headers["Content-Type"], answer.read().decode()
        except HTTPError as error:
            return error.code, error.headers["Content-Type"], error.read().decode()

    return fetch


def details(get, run_id):
    tree = json.loads(get(f"/apis/v2beta1/runs/{run_id}")[2])
    check(tree, "V2beta1Run")
    return tree["run_details"]["task_details"]


def nodes(get, run_id):
    tree = json.loads(get(f"/apis/v1beta1/runs/{run_id}")[2])
    return json.loads(tree["pipeline_runtime"]["workflow_manifest"])["status"]["nodes"]


def test_the_log_of_an_absent_pod_is_200_with_an_error_in_json(get, run_id, workflow):
    workflow.begin("train_model")
    status, kind, text = get(f"/apis/v1alpha1/runs/{run_id}/nodes/nothing/log")
    assert (status, kind.partition(";")[0]) == (200, "text/plain")
    assert text.startswith('{"error_message": ')
    workflow.write("train_model", "a line\n")
    path = f"/apis/v1alpha1/runs/{run_id}/nodes/{workflow.pod('train_model')}/log"
    assert get(path)[::2] == (200, "a line\n")


def test_no_node_names_its_pod(get, run_id, workflow):
    workflow.begin("train_model")
    workflow.end("train_model")
    assert not [each for each in details(get, run_id) if "pod_name" in each]


def test_a_task_and_its_first_try_are_nodes(get, run_id, workflow):
    workflow.begin("train_model")
    names = [each.get("display_name") for each in details(get, run_id)]
    expected = {"train-model", "train-model(0)", "executor", "executor(0)", "train-model-driver(0)"}
    assert expected <= set(names)


def test_a_pod_has_the_hash_of_the_name_of_its_node(get, run_id, workflow):
    workflow.begin("train_model")
    [node] = [each for each in nodes(get, run_id).values() if each["displayName"] == "executor(0)"]
    assert node["name"].endswith(".exit-handler-1(0).train-model(0).executor(0)")
    assert node["id"] == f"flotilla-training-x7z2p-{fnv(node['name'])}"
    assert workflow.pod("train_model") == (
        f"flotilla-training-x7z2p-{IMPLEMENTATION}-{fnv(node['name'])}"
    )
    # As published for this hash.
    assert (fnv(""), fnv("a"), fnv("foobar")) == (0x811C9DC5, 0xE40C292C, 0xBF9CF968)


def test_a_node_that_was_omitted_has_no_state(get, run_id, workflow):
    workflow.fail_driver("train_model")
    [node] = [each for each in details(get, run_id) if each.get("display_name") == "train-model"]
    assert "state" not in node
    [driver] = [
        each for each in details(get, run_id) if each.get("display_name") == "train-model-driver(0)"
    ]
    assert driver["state"] == "FAILED"


def test_the_end_of_what_runs_is_the_year_one(get, run_id, workflow):
    workflow.begin("train_model")
    ends = {each.get("display_name"): each["end_time"] for each in details(get, run_id)}
    assert ends["train-model"] == NEVER
    workflow.end("train_model")
    ends = {each.get("display_name"): each["end_time"] for each in details(get, run_id)}
    assert ends["train-model"] != NEVER


def test_a_step_from_the_cache_has_no_pod(get, run_id, workflow):
    workflow.take_from_cache("prepare_data")
    phases = {each["displayName"]: each["phase"] for each in nodes(get, run_id).values()}
    assert (phases["prepare-data"], phases["executor"]) == ("Succeeded", "Skipped")
    assert "executor(0)" not in phases
    assert not workflow.logs


def test_messages_are_in_the_workflow_alone(get, run_id, workflow):
    workflow.wait("resolve_config", "ImagePullBackOff")
    [node] = [each for each in nodes(get, run_id).values() if each["displayName"] == "executor(0)"]
    assert (node["phase"], node["message"]) == ("Pending", "ImagePullBackOff")
    assert "ImagePullBackOff" not in json.dumps(details(get, run_id))


def test_before_argo_begins_there_is_no_workflow(get, run_id, workflow):
    workflow.nodes.clear()
    tree = json.loads(get(f"/apis/v1beta1/runs/{run_id}")[2])
    assert tree["pipeline_runtime"] == {}
    assert get("/apis/v1beta1/runs/nothing")[0] == 404


def test_a_terminated_run_ends_failed_and_was_canceling(instance, get, run_id, workflow):
    client = Client(Access(endpoint=instance.url))
    workflow.begin("train_model")
    client.terminate_run(run_id)
    workflow.terminate()
    with pytest.raises(InstanceError) as refused:
        client.terminate_run(run_id)
    assert refused.value.status == 400
    instance.store.end_run(run_id, "FAILED")
    tree = json.loads(get(f"/apis/v2beta1/runs/{run_id}")[2])
    assert (tree["state"], "error" in tree) == ("FAILED", False)
    assert [each["state"] for each in tree["state_history"]][-2:] == ["CANCELING", "FAILED"]


def test_an_hour_later_the_address_of_the_api_has_the_logs(instance, get, run_id, workflow):
    workflow.begin("train_model")
    workflow.write("train_model", "a line\n")
    pod = workflow.pod("train_model")
    of_api = f"/apis/v1alpha1/runs/{run_id}/nodes/{pod}/log"
    of_page = f"/k8s/pod/logs?podname={pod}&runid={run_id}&podnamespace=kubeflow&createdat="
    instance.has_ui = True
    assert get(of_page)[2] == "a line\n"
    workflow.lose_pods()
    assert get(of_page)[0] == 500
    instance.has_ui = False
    assert get(of_api)[2] == "a line\n"
    assert nodes(get, run_id)


def test_the_page_answers_the_path_of_logs_with_its_start_page(instance, get, run_id, workflow):
    workflow.begin("train_model")
    instance.has_ui = True
    path = f"/apis/v1alpha1/runs/{run_id}/nodes/{workflow.pod('train_model')}/log"
    assert get(path)[:2] == (200, "text/html")
    # The API is behind this address as well.
    assert nodes(get, run_id)


def test_the_page_reads_objects_of_the_store_with_its_own_keys(instance, get, tmp_path):
    instance.store.disk = (tmp_path / "disk").as_uri()
    workflow = Workflow("some-run", disk=instance.store.disk)
    workflow.begin("train_model")
    workflow.end("train_model")
    path = "/artifacts/minio/mlpipeline/v2/artifacts/flotilla/some-run/steps/train_model.json"
    assert get(path)[0] == 404
    instance.has_ui = True
    assert json.loads(get(path)[2])["status"] == "done"
    assert get(path.replace("train_model", "nothing"))[0] == 404
    instance.multi_user = True
    assert get(path)[0] == 403


def test_a_step_publishes_its_record(tmp_path):
    workflow = Workflow("some-run", storage_root=tmp_path.as_uri())
    workflow.begin("train_model")
    workflow.end("train_model", metrics={"global_step": 9}, uri="gs://b/c")
    [record] = published_records(f"{tmp_path.as_uri()}/some-run")
    assert (record.step, record.status, record.metrics) == (
        "train_model",
        "done",
        {"global_step": 9},
    )


def test_after_the_loss_of_a_pod_argo_waits():
    workflow = Workflow("some-run")
    workflow.begin("train_model")
    first = workflow.pod("train_model")
    workflow.lose_pod("train_model")
    task, lost = (
        each for each in workflow.nodes if each["name"].endswith(("executor", "executor(0)"))
    )
    assert (task["type"], task["phase"]) == ("Retry", "Running")
    assert task["message"] == "Backoff for 1 minutes 0 seconds"
    assert (lost["type"], lost["phase"], lost["message"]) == ("Pod", "Error", "pod deleted")
    workflow.try_again("train_model")
    assert workflow.nodes[-1]["name"].endswith("executor(1)")
    assert workflow.pod("train_model") != first

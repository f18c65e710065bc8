"""Tests that the fake instance responds to the KFP client and rejects requests like a real one."""

import base64
import json
import re
import urllib.request
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import quote, urlencode

import kfp_server_api
import pytest
import urllib3
from kfp import client as sdk
from kfp_server_api.exceptions import ApiException

from flotilla.components.records.step_record import read_records
from flotilla.components.table import WORKING
from flotilla.pipelines.runs.kfp_access import Access
from flotilla.pipelines.runs.kfp_client import Client, InstanceError, containing
from tests.kfp_instance import api
from tests.kfp_instance.server import Instance
from tests.kfp_instance.shapes import ShapeError, check
from tests.kfp_instance.workflow import IMPLEMENTATION, Workflow, fnv

YAML = """\
pipelineInfo: {name: small}
root:
  dag: {tasks: {}}
  inputDefinitions: {parameters: {steps: {parameterType: NUMBER_INTEGER}}}
schemaVersion: 2.1.0
"""


@pytest.fixture
def served():
    with Instance() as instance:
        yield instance


@pytest.fixture
def plain(served, tmp_path, monkeypatch):
    monkeypatch.setattr(sdk.Client, "_LOCAL_KFP_CONTEXT", str(tmp_path / "home" / "context.json"))
    with pytest.warns(FutureWarning):
        return sdk.Client(host=served.url)


@pytest.fixture
def package(tmp_path):
    (tmp_path / "small.yaml").write_text(YAML)
    return str(tmp_path / "small.yaml")


def known_paths():
    """Return the method and path of every request that the generated client can send."""
    folder = Path(kfp_server_api.__file__).parent / "api"
    for file in sorted(folder.glob("*_api.py")):
        calls = re.findall(r"call_api\(\s+'([^']+)', '([A-Z]+)'", file.read_text())
        yield from ((method, path) for path, method in calls)


def test_every_route_is_one_of_the_client():
    known = [(method, re.sub(r"\{[^}]+\}", "some-id", path)) for method, path in known_paths()]
    for route in api.ROUTES:
        assert any(
            method == route.method and re.fullmatch(route.path, path) for method, path in known
        ), route


def test_what_an_instance_refuses(plain, package):
    pipeline = plain.upload_pipeline(package, "mine")
    [version] = plain.list_pipeline_versions(pipeline.pipeline_id).pipeline_versions
    ids = {"pipeline_id": pipeline.pipeline_id, "version_id": version.pipeline_version_id}
    experiment = plain.create_experiment("tests").experiment_id
    for status, call in (
        (409, lambda: plain.upload_pipeline(package, "mine")),
        (404, lambda: plain.get_run("nothing")),
        (400, lambda: plain.run_pipeline(experiment, "x", params={"steps": "3"}, **ids)),
        (400, lambda: plain.run_pipeline(experiment, "x", params={"steps": True}, **ids)),
        (400, lambda: plain.run_pipeline(experiment, "x", params={"no": 3}, **ids)),
        (400, lambda: plain.create_recurring_run(
            experiment, "x", cron_expression="* * * *", **ids)),
        (400, lambda: plain.create_recurring_run(
            experiment, "x", interval_second=5, max_concurrency=11, **ids)),
    ):  # fmt: skip
        with pytest.raises(ApiException) as refused:
            call()
        assert refused.value.status == status


@pytest.mark.parametrize(
    "tree",
    [
        {"run": "x"},
        {"run_id": 5},
        {"state": "DONE"},
        {"run_details": {"task_details": {}}},
        {"run_details": {"task_details": [{"pod": "x"}]}},
        {"runtime_config": []},
        [],
    ],
)
def test_a_wrong_shape_is_seen(tree):
    with pytest.raises(ShapeError):
        check(tree, "V2beta1Run")


@pytest.mark.parametrize("store", ["database", "kubernetes"])
def test_filters_of_pipelines_are_those_of_their_store(served, plain, package, store):
    served.pipeline_store = store
    pipeline = plain.upload_pipeline(package, "mine")
    listed = plain.list_pipelines(filter=containing("display_name", "in"))
    assert [each.display_name for each in listed.pipelines] == ["mine"]
    versions = plain.list_pipeline_versions(
        pipeline.pipeline_id, filter=containing("display_name", "other")
    )
    assert versions.pipeline_versions is None
    if store == "database":
        assert plain.get_pipeline_id("mine") == pipeline.pipeline_id
        return
    with pytest.raises(ApiException) as refused:
        plain.get_pipeline_id("mine")
    assert refused.value.status == 400


SPEC = {
    "pipelineInfo": {"name": "small"},
    "root": {
        "dag": {"tasks": {}},
        "inputDefinitions": {
            "parameters": {
                "steps": {"parameterType": "NUMBER_INTEGER", "isOptional": True},
                "labels": {"parameterType": "STRUCT", "isOptional": True},
                "kind": {"parameterType": "STRING", "isOptional": True, "literals": ["a", "b"]},
            }
        },
    },
    "schemaVersion": "2.1.0",
}
V2 = "/apis/v2beta1"
NAMES = ("a+b", "100%", "plain")


@pytest.fixture
def filled():
    with Instance() as instance:
        made = instance.store.create_pipeline({"display_name": "mine"})
        instance.pipeline_id = made["pipeline_id"]
        for name in ("older", "newer"):
            instance.store.add_version(made["pipeline_id"], name, "", SPEC)
        yield instance


@dataclass(frozen=True)
class Answer:
    status: int
    kind: str
    body: bytes

    @property
    def tree(self):
        return json.loads(self.body)


def asked(filled, method, path, *, body=None, **query):
    text = f"?{urlencode(query)}" if query else ""
    got = urllib3.request(method, f"{filled.url}{path}{text}", body=body, retries=False)
    return Answer(got.status, got.headers.get("content-type", ""), got.data)


def posted(filled, what, tree):
    return asked(filled, "POST", f"{V2}/{what}", body=json.dumps(tree).encode())


def filtered(filled, text, **more):
    return asked(filled, "GET", f"{V2}/experiments", filter=text, **more)


def predicate(value, key="display_name", operation="EQUALS"):
    tree = {"operation": operation, "key": key, "stringValue": value}
    return json.dumps({"predicates": [tree]})


def reference(filled, **more):
    return {"pipeline_version_reference": {"pipeline_id": filled.pipeline_id, **more}}


def run_of(filled, **more):
    return {"display_name": "one", **reference(filled), **more}


def with_parameters(filled, **values):
    return run_of(filled, runtime_config={"parameters": values})


def schedule_of(filled, cron="0 0 3 * * *", **more):
    return {
        "display_name": "nightly",
        "max_concurrency": "1",
        "mode": "ENABLE",
        "trigger": {"cron_schedule": {"cron": cron}},
        "runtime_config": {},
        **reference(filled),
        **more,
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_filter_is_decoded_twice(filled, name):
    posted(filled, "experiments", {"display_name": name})
    plain = filtered(filled, predicate(name))
    found = [each["display_name"] for each in plain.tree.get("experiments", ())]
    assert (plain.status, found) == {
        "a+b": (200, []), "100%": (400, []), "plain": (200, ["plain"]),
    }[name]  # fmt: skip
    right = filtered(filled, quote(predicate(name), safe=""))
    assert [each["display_name"] for each in right.tree["experiments"]] == [name]


def test_a_part_of_a_name_is_a_pattern_of_the_database(filled):
    for name in ("a_b", "axb", "A_B"):
        posted(filled, "experiments", {"display_name": name})
    like = filtered(filled, predicate("a_b", operation="IS_SUBSTRING")).tree["experiments"]
    assert [each["display_name"] for each in like] == ["a_b", "axb", "A_B"]
    exact = filtered(filled, predicate("a_b")).tree["experiments"]
    assert [each["display_name"] for each in exact] == ["a_b", "A_B"]


@pytest.mark.parametrize(
    "query",
    [
        {"filter": predicate("x", key="nothing")},
        {"filter": "no JSON"},
        {"filter": json.dumps({"predicate": []})},
        {"sort_by": "nothing"},
        {"sort_by": "created_at down"},
        {"page_token": "no base64!"},
        {"page_token": base64.b64encode(b"no JSON").decode()},
        {"page_size": "-1"},
        {"page_size": "many"},
    ],
    ids=str,
)
@pytest.mark.parametrize("what", ["experiments", "runs", "recurringruns", "pipelines"])
def test_a_bad_list_request_is_400(filled, what, query):
    answer = asked(filled, "GET", f"{V2}/{what}", **query)
    assert answer.status == 400
    assert set(answer.tree) == {"code", "message", "details"}
    assert answer.tree["code"] == 3


def test_page_tokens_are_base64_and_belong_to_their_order(filled):
    for name in NAMES:
        posted(filled, "experiments", {"display_name": name})
    query = {"page_size": "2", "sort_by": "created_at desc"}
    first = asked(filled, "GET", f"{V2}/experiments", **query)
    token = first.tree["next_page_token"]
    assert isinstance(json.loads(base64.b64decode(token, validate=True)), dict)
    second = asked(filled, "GET", f"{V2}/experiments", page_token=token, **query)
    named = [each["display_name"] for each in first.tree["experiments"]]
    named += [each["display_name"] for each in second.tree["experiments"]]
    assert named == list(reversed(NAMES))
    other = asked(filled, "GET", f"{V2}/experiments", page_token=token, sort_by="created_at asc")
    assert other.status == 400


def test_a_page_has_two_hundred_rows_at_most(filled):
    for number in range(205):
        filled.store.create_experiment({"display_name": str(number)})
    assert (
        len(asked(filled, "GET", f"{V2}/experiments", page_size="900").tree["experiments"]) == 200
    )
    assert len(asked(filled, "GET", f"{V2}/experiments").tree["experiments"]) == 20


@pytest.mark.parametrize("body", [b"no JSON", b"[]", b'{"nothing": 1}'])
def test_a_bad_body_is_400(filled, body):
    answer = asked(filled, "POST", f"{V2}/runs", body=body)
    assert (answer.status, set(answer.tree)) == (400, {"code", "message", "details"})


@pytest.mark.parametrize(
    ("values", "status"),
    [
        ({"labels": []}, 400),
        ({"labels": {}}, 200),
        ({"steps": "3"}, 400),
        ({"steps": None}, 400),
        ({"nothing": 1}, 400),
        ({"kind": "c"}, 400),
        ({"kind": "b"}, 200),
    ],
)
def test_a_parameter_of_the_wrong_type_is_400(filled, values, status):
    assert posted(filled, "runs", with_parameters(filled, **values)).status == status


def test_an_integer_may_be_a_fraction_or_left_out(filled):
    assert posted(filled, "runs", with_parameters(filled, steps=3.5)).status == 200
    assert posted(filled, "runs", with_parameters(filled)).status == 200


def test_a_run_without_version_or_experiment_takes_the_newest_and_default(filled):
    for _again in range(2):
        made = posted(filled, "runs", run_of(filled)).tree
    version = filled.store.versions[made["pipeline_version_reference"]["pipeline_version_id"]]
    experiment = filled.store.experiments[made["experiment_id"]]
    assert (version["display_name"], experiment["display_name"]) == ("newer", "Default")
    assert len(filled.store.experiments) == 1


def test_an_absent_version_and_a_run_without_a_name_are_500(filled):
    absent = posted(filled, "runs", run_of(filled, **reference(filled, pipeline_version_id="no")))
    assert (absent.status, absent.tree["code"]) == (500, 13)
    assert "PipelineVersion no not found" in absent.tree["message"]
    assert posted(filled, "runs", run_of(filled, display_name="")).status == 500


def multipart(text):
    return (
        b'--x\r\nContent-Disposition: form-data; name="uploadfile"; filename="p.yaml"\r\n\r\n'
        + text.encode()
        + b"\r\n--x--\r\n"
    )


def uploaded(filled, **query):
    path = f"{V2}/pipelines/upload_version"
    return asked(filled, "POST", path, body=multipart(json.dumps(SPEC)), **query)


def test_an_upload_to_an_absent_pipeline_is_400_as_plain_text(filled):
    absent = uploaded(filled, pipelineid="nothing", name="v")
    assert (absent.status, absent.kind) == (400, "text/plain; charset=utf-8")
    assert set(absent.tree) == {"error_message", "error_details"}
    again = uploaded(filled, pipelineid=filled.pipeline_id, name="newer")
    assert (again.status, again.kind) == (409, "application/json")
    assert set(again.tree) == {"error_message", "error_details"}


@pytest.mark.parametrize("cron", ["61 0 3 * * *", "0 3 * *", "0 0 25 * * *"])
def test_a_cron_expression_that_never_comes_is_400(filled, cron):
    assert posted(filled, "recurringruns", schedule_of(filled, cron)).status == 400


def test_a_schedule_of_the_newest_version_has_no_service_account(filled):
    latest = posted(filled, "recurringruns", schedule_of(filled)).tree
    version = next(iter(filled.store.versions))
    pinned = schedule_of(filled, **reference(filled, pipeline_version_id=version))
    assert "service_account" not in latest
    made = posted(filled, "recurringruns", pinned).tree
    assert made["service_account"] == "pipeline-runner"
    assert posted(filled, "recurringruns", schedule_of(filled, display_name="")).status == 400


def test_only_the_address_of_the_user_interface_has_pages(filled):
    assert asked(filled, "GET", "/").status == 404
    filled.has_ui = True
    page = asked(filled, "GET", "/")
    assert (page.status, page.kind) == (200, "text/html")
    assert b"<title>Kubeflow Pipelines</title>" in page.body


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
    def fetch(path):
        try:
            with urllib.request.urlopen(instance.url + path) as answer:
                return answer.status, answer.headers["Content-Type"], answer.read().decode()
        except HTTPError as error:
            return error.code, error.headers["Content-Type"], error.read().decode()

    return fetch


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


def test_a_pod_has_the_hash_of_the_name_of_its_node(get, run_id, workflow):
    workflow.begin("train_model")
    [node] = [each for each in nodes(get, run_id).values() if each["displayName"] == "executor(0)"]
    assert node["name"].endswith(".condition-2(0).train-model(0).executor(0)")
    assert node["id"] == f"flotilla-training-x7z2p-{fnv(node['name'])}"
    assert workflow.pod("train_model") == (
        f"flotilla-training-x7z2p-{IMPLEMENTATION}-{fnv(node['name'])}"
    )
    # Published test vectors of the hash function.
    assert (fnv(""), fnv("a"), fnv("foobar")) == (0x811C9DC5, 0xE40C292C, 0xBF9CF968)


def played(*stages):
    """Return the nodes of a run that completed these stages and the exit step."""
    workflow = Workflow("some-run")
    for stage in (*stages, *(() if "register_model" in stages else [None]), "finish"):
        if stage is None:
            workflow.skip()
            continue
        workflow.begin(stage)
        decision = {"check_gate": "blessed"}.get(stage)
        workflow.end(stage, metrics={"decision": decision} if decision else {})
    return workflow.nodes


def pods(nodes):
    return Counter(each["templateName"] for each in nodes if each["type"] == "Pod")


def compiled_pods(spec):
    """Return the number of pods of each kind that a complete run of a compiled pipeline has."""
    found = Counter({"system-dag-driver": 1})
    dags = [spec["root"]["dag"]]
    while dags:
        for task in dags.pop()["tasks"].values():
            component = spec["components"][task["componentRef"]["name"]]
            if inner := component.get("dag"):
                found["system-dag-driver"] += 1
                dags.append(inner)
            else:
                found += Counter(["system-container-driver", IMPLEMENTATION])
    return found


def test_a_whole_run_has_the_pods_of_the_compiled_pipeline(compiled):
    found = pods(played(*(stage.name for stage in WORKING)))
    assert found == compiled_pods(compiled.spec.get("pipeline_spec", compiled.spec))
    # There is one DAG driver each for the root, the exit handler, and the two conditional groups
    # (training and export).
    expected = {"system-dag-driver": 4, "system-container-driver": 5, IMPLEMENTATION: 5}
    assert found == expected


@pytest.mark.parametrize(
    ("last", "count"), [("validate_data", 7), ("train_model", 10), ("check_gate", 12)]
)
def test_a_run_that_ends_before_has_less_pods(last, count):
    names = [stage.name for stage in WORKING]
    nodes = played(*names[: names.index(last) + 1])
    assert pods(nodes).total() == count


def test_messages_are_in_the_workflow(get, run_id, workflow):
    workflow.wait("prepare_data", "ImagePullBackOff")
    [node] = [each for each in nodes(get, run_id).values() if each["displayName"] == "executor(0)"]
    assert (node["phase"], node["message"]) == ("Pending", "ImagePullBackOff")


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
    assert nodes(get, run_id)


def test_the_page_has_pods_until_they_are_deleted(instance, get, run_id, workflow):
    workflow.begin("train_model")
    pod = workflow.pod("train_model")
    path = f"/k8s/pod?podname={pod}&podnamespace=kubeflow"
    assert get(path)[0] == 404
    instance.has_ui = True
    assert get(path)[:2] == (200, "text/html; charset=utf-8")
    workflow.collect()
    assert get(path)[::2] == (500, f"Could not get pod {pod} in namespace kubeflow")
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


def test_an_experiment_again_is_409(filled):
    assert posted(filled, "experiments", {"display_name": "x"}).status == 200
    again = posted(filled, "experiments", {"display_name": "x"})
    assert (again.status, again.tree["code"]) == (409, 6)


def test_a_step_publishes_its_record(tmp_path):
    workflow = Workflow("some-run", storage_root=tmp_path.as_uri())
    workflow.begin("train_model")
    workflow.end("train_model", metrics={"global_step": 9}, uri="gs://b/c")
    [record] = read_records(f"{tmp_path.as_uri()}/some-run")
    assert (record.step, record.status, record.metrics) == (
        "train_model",
        "done",
        {"global_step": 9},
    )

"""The stand-in is what the KFP client expects, and refuses what an instance refuses."""

from __future__ import annotations

import re
from pathlib import Path

import kfp_server_api
import pytest
from kfp import client as sdk
from kfp_server_api.exceptions import ApiException

from pipelines.runs.kfp_access import Access
from pipelines.runs.kfp_client import Client
from pipelines.runs.upload import containing
from tests.kfp_instance import api
from tests.kfp_instance.server import Instance
from tests.kfp_instance.shapes import ShapeError, check

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
    """The SDK's own client, as anybody would make it."""
    monkeypatch.setattr(sdk.Client, "_LOCAL_KFP_CONTEXT", str(tmp_path / "home" / "context.json"))
    with pytest.warns(FutureWarning):
        return sdk.Client(host=served.url)


@pytest.fixture
def package(tmp_path):
    (tmp_path / "small.yaml").write_text(YAML)
    return str(tmp_path / "small.yaml")


def known_paths():
    """Return method and path of every call of the generated client."""
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


def test_the_sdk_gets_what_it_has_put_there(plain, package):
    pipeline = plain.upload_pipeline(package, "mine")
    assert plain.get_pipeline(pipeline.pipeline_id).display_name == "mine"
    assert plain.get_pipeline_id("mine") == pipeline.pipeline_id
    version = plain.upload_pipeline_version(package, "v2", pipeline_id=pipeline.pipeline_id)
    ids = {"pipeline_id": pipeline.pipeline_id, "version_id": version.pipeline_version_id}
    found = plain.get_pipeline_version(pipeline.pipeline_id, version.pipeline_version_id)
    assert found.pipeline_spec["pipelineInfo"] == {"name": "small"}
    names = [each.display_name for each in plain.list_pipeline_versions(
        pipeline.pipeline_id, sort_by="created_at desc").pipeline_versions]  # fmt: skip
    assert names == ["v2", "mine"]
    experiment = plain.create_experiment("tests")
    assert plain.create_experiment("tests").experiment_id == experiment.experiment_id
    run = plain.run_pipeline(experiment.experiment_id, "one", params={"steps": 3}, **ids)
    assert plain.get_run(run.run_id).state == "PENDING"
    plain.terminate_run(run.run_id)
    assert plain.get_run(run.run_id).state == "CANCELING"
    again = plain.create_recurring_run(
        experiment.experiment_id, "nightly", cron_expression="0 0 3 * * *", no_catchup=True, **ids
    )
    plain.disable_recurring_run(again.recurring_run_id)
    assert plain.get_recurring_run(again.recurring_run_id).status == "DISABLED"
    plain.delete_recurring_run(again.recurring_run_id)
    assert plain.list_recurring_runs().recurring_runs is None


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


def test_our_client_is_the_sdk_client(served):
    client = Client(Access(endpoint=served.url, namespace="me"))
    assert isinstance(client, sdk.Client)
    assert client.get_user_namespace() == "me"
    assert not served.requests

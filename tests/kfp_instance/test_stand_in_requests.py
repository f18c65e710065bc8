"""What the API server of 2.17 was seen to make of requests; see the table in README.md."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from urllib.parse import quote, urlencode

import pytest
import urllib3

from tests.kfp_instance.server import Instance

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
def served():
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


def asked(served, method, path, *, body=None, **query):
    text = f"?{urlencode(query)}" if query else ""
    got = urllib3.request(method, f"{served.url}{path}{text}", body=body, retries=False)
    return Answer(got.status, got.headers.get("content-type", ""), got.data)


def posted(served, what, tree):
    return asked(served, "POST", f"{V2}/{what}", body=json.dumps(tree).encode())


def filtered(served, text, **more):
    return asked(served, "GET", f"{V2}/experiments", filter=text, **more)


def predicate(value, key="display_name", operation="EQUALS"):
    tree = {"operation": operation, "key": key, "stringValue": value}
    return json.dumps({"predicates": [tree]})


def reference(served, **more):
    return {"pipeline_version_reference": {"pipeline_id": served.pipeline_id, **more}}


def run_of(served, **more):
    return {"display_name": "one", **reference(served), **more}


def with_parameters(served, **values):
    return run_of(served, runtime_config={"parameters": values})


def schedule_of(served, cron="0 0 3 * * *", **more):
    return {
        "display_name": "nightly",
        "max_concurrency": "1",
        "mode": "ENABLE",
        "trigger": {"cron_schedule": {"cron": cron}},
        "runtime_config": {},
        **reference(served),
        **more,
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_filter_is_decoded_twice(served, name):
    posted(served, "experiments", {"display_name": name})
    plain = filtered(served, predicate(name))
    found = [each["display_name"] for each in plain.tree.get("experiments", ())]
    assert (plain.status, found) == {
        "a+b": (200, []), "100%": (400, []), "plain": (200, ["plain"]),
    }[name]  # fmt: skip
    right = filtered(served, quote(predicate(name), safe=""))
    assert [each["display_name"] for each in right.tree["experiments"]] == [name]


def test_a_part_of_a_name_is_a_pattern_of_the_database(served):
    for name in ("a_b", "axb", "A_B"):
        posted(served, "experiments", {"display_name": name})
    like = filtered(served, predicate("a_b", operation="IS_SUBSTRING")).tree["experiments"]
    assert [each["display_name"] for each in like] == ["a_b", "axb", "A_B"]
    exact = filtered(served, predicate("a_b")).tree["experiments"]
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
def test_a_bad_list_request_is_400(served, what, query):
    answer = asked(served, "GET", f"{V2}/{what}", **query)
    assert answer.status == 400
    assert set(answer.tree) == {"code", "message", "details"}
    assert answer.tree["code"] == 3


def test_page_tokens_are_base64_and_belong_to_their_order(served):
    for name in NAMES:
        posted(served, "experiments", {"display_name": name})
    query = {"page_size": "2", "sort_by": "created_at desc"}
    first = asked(served, "GET", f"{V2}/experiments", **query)
    token = first.tree["next_page_token"]
    assert isinstance(json.loads(base64.b64decode(token, validate=True)), dict)
    second = asked(served, "GET", f"{V2}/experiments", page_token=token, **query)
    named = [each["display_name"] for each in first.tree["experiments"]]
    named += [each["display_name"] for each in second.tree["experiments"]]
    assert named == list(reversed(NAMES))
    other = asked(served, "GET", f"{V2}/experiments", page_token=token, sort_by="created_at asc")
    assert other.status == 400


def test_a_page_has_two_hundred_rows_at_most(served):
    for number in range(205):
        served.store.create_experiment({"display_name": str(number)})
    assert (
        len(asked(served, "GET", f"{V2}/experiments", page_size="900").tree["experiments"]) == 200
    )
    assert len(asked(served, "GET", f"{V2}/experiments").tree["experiments"]) == 20


@pytest.mark.parametrize("body", [b"no JSON", b"[]", b'{"nothing": 1}'])
def test_a_bad_body_is_400(served, body):
    answer = asked(served, "POST", f"{V2}/runs", body=body)
    assert (answer.status, set(answer.tree)) == (400, {"code", "message", "details"})


def test_an_experiment_again_is_409(served):
    assert posted(served, "experiments", {"display_name": "x"}).status == 200
    again = posted(served, "experiments", {"display_name": "x"})
    assert (again.status, again.tree["code"]) == (409, 6)


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
def test_a_parameter_of_the_wrong_type_is_400(served, values, status):
    assert posted(served, "runs", with_parameters(served, **values)).status == status


def test_an_integer_may_be_a_fraction_or_left_out(served):
    assert posted(served, "runs", with_parameters(served, steps=3.5)).status == 200
    assert posted(served, "runs", with_parameters(served)).status == 200


def test_a_run_without_version_or_experiment_takes_the_newest_and_default(served):
    for _again in range(2):
        made = posted(served, "runs", run_of(served)).tree
    version = served.store.versions[made["pipeline_version_reference"]["pipeline_version_id"]]
    experiment = served.store.experiments[made["experiment_id"]]
    assert (version["display_name"], experiment["display_name"]) == ("newer", "Default")
    assert len(served.store.experiments) == 1


def test_an_absent_version_and_a_run_without_a_name_are_500(served):
    absent = posted(served, "runs", run_of(served, **reference(served, pipeline_version_id="no")))
    assert (absent.status, absent.tree["code"]) == (500, 13)
    assert "PipelineVersion no not found" in absent.tree["message"]
    assert posted(served, "runs", run_of(served, display_name="")).status == 500


def multipart(text):
    return (
        b'--x\r\nContent-Disposition: form-data; name="uploadfile"; filename="p.yaml"\r\n\r\n'
        + text.encode()
        + b"\r\n--x--\r\n"
    )


def uploaded(served, **query):
    path = f"{V2}/pipelines/upload_version"
    return asked(served, "POST", path, body=multipart(json.dumps(SPEC)), **query)


def test_an_upload_to_an_absent_pipeline_is_400_as_plain_text(served):
    absent = uploaded(served, pipelineid="nothing", name="v")
    assert (absent.status, absent.kind) == (400, "text/plain; charset=utf-8")
    assert set(absent.tree) == {"error_message", "error_details"}
    again = uploaded(served, pipelineid=served.pipeline_id, name="newer")
    assert (again.status, again.kind) == (409, "application/json")
    assert set(again.tree) == {"error_message", "error_details"}


@pytest.mark.parametrize("cron", ["61 0 3 * * *", "0 3 * *", "0 0 25 * * *"])
def test_a_cron_expression_that_never_comes_is_400(served, cron):
    assert posted(served, "recurringruns", schedule_of(served, cron)).status == 400


def test_a_schedule_of_the_newest_version_has_no_service_account(served):
    latest = posted(served, "recurringruns", schedule_of(served)).tree
    version = next(iter(served.store.versions))
    pinned = schedule_of(served, **reference(served, pipeline_version_id=version))
    assert "service_account" not in latest
    made = posted(served, "recurringruns", pinned).tree
    assert made["service_account"] == "pipeline-runner"
    assert posted(served, "recurringruns", schedule_of(served, display_name="")).status == 400


def test_only_the_address_of_the_user_interface_has_pages(served):
    assert asked(served, "GET", "/").status == 404
    served.has_ui = True
    page = asked(served, "GET", "/")
    assert (page.status, page.kind) == (200, "text/html")
    assert b"<title>Kubeflow Pipelines</title>" in page.body

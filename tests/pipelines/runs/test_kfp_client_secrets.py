"""No secret around `flotilla` is in what a KFP instance gets and keeps, nor in what is written."""

from __future__ import annotations

import json
from contextlib import suppress
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import ProxyHandler, build_opener

import pytest

from tests.planted import SECRETS, found_in, plant

JSON = {"Content-Type": "application/json"}


@pytest.fixture
def around(instance, remote, tmp_path, monkeypatch):
    """Plant all secrets; the instance wants token and cookies, the endpoint carries no user."""
    plant(tmp_path / "home", monkeypatch)
    instance.token, instance.cookies = SECRETS["token"], f"session={SECRETS['cookie']}"
    return remote


def written(instance, answers, folder):
    store = instance.store
    kept = [store.pipelines, store.versions, store.runs, store.recurring]
    texts = {str(each)[:60]: each for each in instance.received}
    texts |= {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    texts["kept"] = repr([*map(dict, kept)]).encode()
    for number, each in enumerate(answers):
        texts |= {f"out {number}": each.out.encode(), f"err {number}": each.err.encode()}
    return texts


def test_no_command_on_an_instance_writes_a_secret(around, instance, tmp_path):
    answers = [
        around("compile", "--output", "pipeline.yaml"),
        around("upload", "--json"),
        around("submit", "--json"),
    ]
    run_id = answers[-1].json["run_id"]
    instance.store.runs[run_id]["state"] = "RUNNING"
    workflow = instance.store.workflows[run_id]
    workflow.begin("train_model")
    workflow.write("train_model", "a line\n")
    answers += [
        around("schedule", "--every", "6h", "--json"),
        around("status", run_id, "--json"),
        around("runs", "--json"),
        around("cancel", run_id, "--json"),
    ]
    instance.store.runs[run_id]["state"] = "CANCELED"
    answers.append(around("logs", run_id))
    assert len(instance.asked("POST .*(runs|recurringruns|upload)")) >= 3
    texts = written(instance, answers, tmp_path / "here")
    assert any(b"pipelineSpec" in each or b"pipelineInfo" in each for each in texts.values())
    assert list(found_in(texts)) == []


@pytest.mark.parametrize("status", [401, 403, 500])
@pytest.mark.parametrize("words", [("upload",), ("submit",), ("runs", "--json"), ("status", "r")])
def test_a_failing_answer_that_echoes_the_headers_shows_no_secret(
    around, instance, tmp_path, words, status
):
    said = f"Authorization: Bearer {SECRETS['token']} Cookie: session={SECRETS['cookie']}"
    instance.faults.add(".", status, body=json.dumps({"message": said}).encode(), headers=JSON)
    answer = around(*words)
    assert answer.code != 0
    assert answer.err
    assert list(found_in(written(instance, [answer], tmp_path / "here"))) == []


def test_user_information_in_the_endpoint_is_in_no_error(around, instance, tmp_path, monkeypatch):
    given = instance.url.replace("://", f"://user:{SECRETS['google']}@")
    monkeypatch.setenv("KF_PIPELINES_ENDPOINT", given)
    answer = around("runs")
    assert answer.code != 0
    assert list(found_in(written(instance, [answer], tmp_path / "here"))) == []


def test_a_secret_in_a_query_is_found(around, instance, tmp_path):
    del around
    # `urlopen` would keep the planted proxy for every test after this one.
    opener = build_opener(ProxyHandler({}))
    with suppress(HTTPError):
        opener.open(f"{instance.url}/apis/v2beta1/runs?filter={quote(SECRETS['key'], safe='')}")
    assert [name for name, _ in found_in(written(instance, [], tmp_path / "here"))] == ["key"]

"""Kubeflow's Model Registry as a second address, against a stand-in of its server."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.trainer.tracking.hub_server import serving
from trainer.errors import UserError
from trainer.tracking import hub
from trainer.tracking.hub import TOKEN_FILE, Hub, PromotedModel

MODEL = PromotedModel(
    name="my_model",
    version=3,
    uri="s3://models/registry/models/my_model/versions/000003",
    run_id="my_model-1",
    is_champion=True,
    properties={"test_accuracy": 0.9722, "dataset": "s3://models/datasets/d", "commit": None},
)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.delenv(TOKEN_FILE, raising=False)
    with serving() as (address, store):
        yield address, store


def test_a_promotion_is_a_model_a_version_and_an_artifact_with_its_uri(server):
    address, store = server
    identity = Hub(address).announce(MODEL)
    (model,) = store.kinds["registered_models"].values()
    (version,) = store.kinds["model_versions"].values()
    (artifact,) = store.kinds["artifacts"].values()
    assert (model["name"], version["name"], version["id"]) == ("my_model", "3", identity)
    assert version["registeredModelId"] == model["id"]
    assert artifact["parent"] == identity
    assert artifact["uri"] == MODEL.uri
    assert artifact["modelFormatName"] == "tensorflow"
    properties = version["customProperties"]
    assert properties["test_accuracy"]["double_value"] == pytest.approx(0.9722)
    assert set(properties) == {"test_accuracy", "dataset"}


def test_a_retry_adds_nothing_and_the_next_version_is_another_one(server):
    address, store = server
    first = Hub(address).announce(MODEL)
    assert Hub(address).announce(MODEL) == first
    second = Hub(address).announce(replace(MODEL, version=4, uri="s3://models/000004"))
    assert second != first
    assert [len(store.kinds[kind]) for kind in ("registered_models", "model_versions")] == [1, 2]
    assert [each["name"] for each in store.kinds["artifacts"].values()] == [
        "my_model-3",
        "my_model-4",
    ]


def test_a_name_that_another_one_is_like_is_its_own_model(server, monkeypatch):
    # By LIKE, `my_model` would be found as `my-model`.
    address, store = server
    monkeypatch.setattr(hub, "_PAGE", 2)
    for number in range(5):
        store.create("registered_models", "", {"name": f"other-{number}"})
    Hub(address).announce(replace(MODEL, name="my-model"))
    Hub(address).announce(MODEL)
    Hub(address).announce(MODEL)
    names = [each["name"] for each in store.kinds["registered_models"].values()]
    assert names[5:] == ["my-model", "my_model"]


def test_what_another_run_makes_at_the_same_moment_is_taken(server):
    address, store = server
    made = []

    def other_first(verb, path):
        kind = path.rpartition("/")[2]
        if verb == "POST" and kind == "registered_models" and not made:
            made.append(store.create(kind, "", {"name": MODEL.name}))

    store.fault = other_first
    Hub(address).announce(MODEL)
    assert list(store.kinds["registered_models"]) == [made[0]["id"]]


def test_a_version_of_another_registry_is_left_as_it_is(server):
    address, store = server
    Hub(address).announce(MODEL)
    other = replace(MODEL, uri="gs://elsewhere/000003")
    with pytest.raises(UserError, match="has another my_model, version 3, at s3://models"):
        Hub(address).announce(other)
    (artifact,) = store.kinds["artifacts"].values()
    assert artifact["uri"] == MODEL.uri


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((503, {"code": "Service Unavailable", "message": "database is away"}), "503 database is"),
        ((401, {"code": "Unauthorized", "message": "no token"}), "401 no token"),
        ((200, b"<html>hello</html>"), "no JSON object"),
        ((200, b"[1, 2]"), "no JSON object"),
        ((200, {"items": 3}), "a list of registered_models that is none"),
        ((302, b""), "302"),
    ],
)
def test_what_the_registry_says_wrong_is_one_line(server, answer, words):
    address, store = server
    store.fault = lambda _verb, _path: answer
    with pytest.raises(UserError, match=words) as caught:
        Hub(address).announce(MODEL)
    assert "\n" not in str(caught.value)


def test_a_registry_that_is_away_is_one_line(port):
    address = f"http://127.0.0.1:{port}"
    with pytest.raises(UserError, match=r"the model registry at http.*ConnectionError"):
        Hub(address).check()


def test_the_token_of_a_file_is_sent_and_never_over_plain_http_to_others(
    server, tmp_path, monkeypatch
):
    address, store = server
    (tmp_path / "token").write_text("T-o-k-e-n\n")
    monkeypatch.setenv(TOKEN_FILE, str(tmp_path / "token"))
    Hub(address).check()
    assert store.tokens == {"Bearer T-o-k-e-n"}
    with pytest.raises(UserError, match="plain http"):
        Hub("http://registry.example.com")
    monkeypatch.setenv(TOKEN_FILE, str(tmp_path / "absent"))
    with pytest.raises(UserError, match="cannot read"):
        Hub(address)

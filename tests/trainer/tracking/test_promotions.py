"""Tests both registries with stand-ins for their servers; see also `test_mlflow_run`."""

import json
import re
import threading
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from types import SimpleNamespace
from urllib.parse import parse_qsl, urlsplit

import pytest

from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.tracking import promotions
from flotilla.trainer.tracking.promotions import TOKEN_FILE, Hub, PromotedModel, register_in_mlflow


class Registry:
    """Numbers versions as MLflow does, without reusing the numbers of deleted versions."""

    def __init__(self):
        self.found, self.last, self.aliases = [], 0, {}

    def get_registered_model(self, name):
        return name

    def search_model_versions(self, _chosen):
        return self.found

    def create_model_version(self, _name, source, _run, tags):
        self.last += 1
        made = SimpleNamespace(version=str(self.last), source=source, tags=tags)
        self.found.append(made)
        return made

    def delete_model_version(self, _name, number):
        self.found = [each for each in self.found if each.version != number]

    def set_registered_model_alias(self, _name, alias, number):
        self.aliases[alias] = number

    @property
    def numbers(self):
        return {each.version: each.tags["flotilla.version"] for each in self.found}


@pytest.fixture
def there(monkeypatch):
    made = Registry()
    monkeypatch.setattr(promotions, "client_of_mlflow", lambda: made)
    monkeypatch.setattr(promotions, "_ensure_model", lambda *_: None)
    monkeypatch.setattr(promotions, "_place", lambda _client, model: (None, model.uri))
    return made


def model(version, champion=0):
    return PromotedModel(
        name="m", version=version, uri=f"s3://m/{version}", run_id="r", properties={},
        is_champion=champion == version,
    )  # fmt: skip


def test_versions_that_mlflow_has_missed_come_with_the_next_one(there):
    register_in_mlflow(model(1, champion=1))
    assert register_in_mlflow(model(3, champion=3), lambda: [model(n) for n in (1, 2, 3)]) == "3"
    assert there.numbers == {"1": "1", "2": "2", "3": "3"}
    assert there.aliases == {"champion": "3"}


def test_a_number_that_is_old_or_removed_is_not_given_to_another_version(there):
    earlier = [model(n) for n in range(1, 40) if n != 38]
    assert register_in_mlflow(model(40, champion=40), lambda: earlier) == "40"
    assert there.numbers == {str(n): str(n) for n in (35, 36, 37, 39, 40)} | {"34": "34"}


def test_an_earlier_champion_becomes_it_again(there):
    for number in (1, 2):
        register_in_mlflow(model(number, champion=number))
    assert register_in_mlflow(model(1, champion=1)) == "1"
    assert there.aliases == {"champion": "1"}
    assert there.numbers == {"1": "1", "2": "2"}


def test_a_number_that_is_taken_is_said(there, caplog):
    there.create_model_version("m", "s3://other", None, {"flotilla.version": "9"})
    assert register_in_mlflow(model(1, champion=1)) == "2"
    assert there.aliases == {"champion": "2"}
    assert "version 1 of m is version 2 in MLflow" in caplog.text


PATH = "/api/model_registry/v1alpha3"
_RESOURCE = {"name", "description", "externalId", "customProperties", "state"}
FIELDS = {
    "registered_models": _RESOURCE | {"owner", "readme", "maturity", "language", "tasks"},
    "model_versions": _RESOURCE | {"registeredModelId", "author"},
    "artifacts": _RESOURCE
    | {"artifactType", "uri", "modelFormatName", "modelFormatVersion", "storageKey", "storagePath"}
    | {"serviceAccountName", "modelSourceKind", "modelSourceClass", "modelSourceGroup"}
    | {"modelSourceId", "modelSourceName"},
}
VALUES = {
    "MetadataStringValue": ("string_value", str),
    "MetadataDoubleValue": ("double_value", float),
}
_PLACE = re.compile(
    rf"{PATH}/(?:(registered_models)|(model_versions)|registered_models/(\d+)/(versions)"
    r"|model_versions/(\d+)/(artifacts))"
)


class RefusedError(Exception):
    def __init__(self, status, message):
        super().__init__(message)
        self.status = status


class Store:
    """The registered resources by kind and ID; `fault` may replace the server's replies."""

    def __init__(self):
        self.kinds = defaultdict(dict)
        self.ids = count(1)
        self.lock = threading.Lock()
        self.requests = []
        self.tokens = set()
        self.fault = lambda _verb, _path: None

    def create(self, kind, parent, tree):
        if unknown := set(tree) - FIELDS[kind]:
            raise RefusedError(400, f'json: unknown field "{min(unknown)}"')
        if not tree.get("name"):
            raise RefusedError(422, "required field 'name' is zero value.")
        if kind == "model_versions" and parent not in self.kinds["registered_models"]:
            raise RefusedError(404, f"no registered model found for id {parent}: not found")
        for name, value in tree.get("customProperties", {}).items():
            field, form = VALUES[value["metadataType"]]
            if set(value) != {"metadataType", field} or not isinstance(value[field], form):
                raise RefusedError(400, f"{name}: bad request")
        if any(self.listed(kind, parent, tree["name"])):
            raise RefusedError(409, f"{kind} with name {tree['name']} already exists: conflict")
        made = {**tree, "id": str(next(self.ids)), "parent": parent}
        self.kinds[kind][made["id"]] = made
        return made

    def listed(self, kind, parent, name=""):
        for each in self.kinds[kind].values():
            if each["parent"] == parent and (not name or each["name"] == name):
                yield {key: value for key, value in each.items() if key != "parent"}


def place_of(path):
    """Return the kind of resources that a path lists, and the ID of their parent."""
    found = _PLACE.fullmatch(path)
    if not found:
        raise RefusedError(404, "404 page not found")
    models, versions, model, _, version, _ = found.groups()
    if models or versions:
        return models or versions, ""
    return ("model_versions", model) if model else ("artifacts", version)


class Handler(BaseHTTPRequestHandler):
    store: Store

    def do_GET(self):
        self.answer(self.read)

    def do_POST(self):
        self.answer(self.write)

    def read(self, path, query):
        kind, parent = place_of(path)
        if not re.fullmatch("[1-9][0-9]{0,8}", query.get("pageSize", "1")):
            raise RefusedError(400, "pageSize: bad request")
        every = list(self.store.listed(kind, parent))
        begin, size = int(query.get("nextPageToken", "0")), int(query.get("pageSize", "20"))
        items = every[begin : begin + size]
        token = str(begin + size) if begin + size < len(every) else ""
        page = {"items": items, "size": len(items), "pageSize": size, "nextPageToken": token}
        return HTTPStatus.OK, page

    def write(self, path, _query):
        kind, parent = place_of(path)
        tree = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if kind == "model_versions":
            parent = tree.get("registeredModelId", "")
        with self.store.lock:
            return HTTPStatus.CREATED, self.store.create(kind, parent, tree)

    def answer(self, work):
        parts = urlsplit(self.path)
        self.store.requests.append((self.command, parts.path.removeprefix(f"{PATH}/")))
        self.store.tokens.add(self.headers.get("Authorization", ""))
        status, tree = self.store.fault(self.command, parts.path) or (0, None)
        if not status:
            try:
                status, tree = work(parts.path, dict(parse_qsl(parts.query)))
            except RefusedError as error:
                status = error.status
                tree = {"code": HTTPStatus(status).phrase, "message": str(error)}
        body = tree if isinstance(tree, bytes) else json.dumps(tree).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json; charset=UTF-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextmanager
def serving():
    store = Store()
    handler = type("Bound", (Handler,), {"store": store})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", store
        finally:
            server.shutdown()
            thread.join()


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


def test_a_promotion_is_a_model_a_version_and_an_artifact_once(server):
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
    assert Hub(address).announce(MODEL) == identity
    second = Hub(address).announce(replace(MODEL, version=4, uri="s3://models/000004"))
    assert second != identity
    assert [len(store.kinds[kind]) for kind in ("registered_models", "model_versions")] == [1, 2]
    names = [each["name"] for each in store.kinds["artifacts"].values()]
    assert names == ["my_model-3", "my_model-4"]


def test_a_name_that_another_one_is_like_is_its_own_model(server, monkeypatch):
    # A search with LIKE would also find `my-model` for `my_model`.
    address, store = server
    monkeypatch.setattr(promotions, "_PAGE", 2)
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
    with pytest.raises(UserError, match="already has version 3 of my_model, with the URI s3://mo"):
        Hub(address).announce(other)
    (artifact,) = store.kinds["artifacts"].values()
    assert artifact["uri"] == MODEL.uri


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((503, {"code": "Service Unavailable", "message": "database is away"}), "503 database is"),
        ((401, {"code": "Unauthorized", "message": "no token"}), "401 no token"),
        ((200, b"<html>hello</html>"), "not a JSON object"),
        ((200, b"[1, 2]"), "not a JSON object"),
        ((200, {"items": 3}), "its list of registered_models is invalid"),
        ((302, b""), "302"),
    ],
)
def test_what_the_registry_says_wrong_is_one_line(server, answer, words):
    address, store = server
    store.fault = lambda _verb, _path: answer
    with pytest.raises(UserError, match=words) as caught:
        Hub(address).announce(MODEL)
    assert "\n" not in str(caught.value)


def test_a_list_whose_tokens_go_round_ends(server):
    address, store = server
    turns = count(1)
    page = {"items": [{"name": "another"}]}
    store.fault = lambda *_: (200, {**page, "nextPageToken": f"t{next(turns) % 3}"})
    with pytest.raises(UserError, match="no id for my_model"):
        Hub(address).announce(MODEL)
    assert len(store.requests) < 12


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

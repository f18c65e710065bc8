"""A stand-in of Kubeflow's Model Registry, made from its OpenAPI and what its Go server does.

Unknown fields are refused, a name within its parent is given once (409), an error is
`{"code": text of the status, "message"}`, a list has pages, and finding by name compares by LIKE.
"""

from __future__ import annotations

import json
import re
import threading
from collections import defaultdict
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from urllib.parse import parse_qsl, urlsplit

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
    """What is registered: resources by kind and by id; `fault` answers in place of the server."""

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
    """Return the kind of what a path lists, and the id of its parent."""
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
    """Yield the address of a registry, and its store."""
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

"""The API outside of a namespace's objects: version, kinds, nodes, namespaces, access reviews."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tests.kubernetes.store import RefusedError, Store, Tree

USER = "ann@example.com"
_REVIEWS = "/apis/authorization.k8s.io/v1/"


class Control:
    """Answers every request that is not about the objects of a namespace.

    Attributes:
        user: who sends the requests.
        denied: `(user, verb, resource)`; everything else is allowed.
        kinds: the resources of each group and version.
        absent: namespaces that do not exist.
        reviews: the specifications of all access reviews so far.
    """

    def __init__(self, store: Store) -> None:
        self.user = USER
        self.denied: set[tuple[str, str, str]] = set()
        self.kinds = {"kubeflow.org/v1": ["tfjobs", "tfjobs/status", "pytorchjobs"]}
        self.absent: set[str] = set()
        self.reviews: list[Tree] = []
        self._store = store
        self._answers: list[tuple[str, Callable[..., Tree]]] = [
            (r"GET /version/?", self._version),
            (r"GET /apis/(?P<group>[^/]+)", self._group),
            (r"GET /apis/(?P<group>[^/]+)/(?P<version>v[^/]+)", self._kinds),
            (r"GET /api/v1/namespaces/(?P<name>[^/]+)", self._namespace),
            (r"GET /api/v1/nodes", self._nodes),
            (r"GET /apis/scheduling.k8s.io/v1/priorityclasses/(?P<name>[^/]+)", self._class),
        ]

    def answer(self, method: str, path: str, body: Tree) -> Tree:
        if method == "POST":
            return self._review(path, body)
        for pattern, answer in self._answers:
            found = re.fullmatch(pattern, f"{method} {path}")
            if found:
                return answer(**found.groupdict())
        raise RefusedError(404, "NotFound", f"no such path: {path}")

    def deny(self, user: str, *permissions: str) -> None:
        """Take permissions such as `create tfjobs` or `get pods/log` from a user."""
        for permission in permissions:
            verb, _, resource = permission.partition(" ")
            self.denied.add((user, verb, resource))

    def _review(self, path: str, body: Tree) -> Tree:
        if path.endswith("/selfsubjectreviews"):
            return {**body, "status": {"userInfo": {"username": self.user}}}
        spec: dict[str, Any] = body["spec"]
        kinds = {
            "selfsubjectaccessreviews": "SelfSubjectAccessReview",
            "subjectaccessreviews": "SubjectAccessReview",
        }
        if kinds.get(path.removeprefix(_REVIEWS)) != body["kind"]:
            raise RefusedError(400, "BadRequest", f"{body['kind']} at {path}")
        attributes = spec["resourceAttributes"]
        self.reviews.append(spec)
        groups = {"tfjobs": "kubeflow.org"}
        if attributes["group"] != groups.get(attributes["resource"], ""):
            return {**body, "status": {"allowed": False, "reason": "no such group"}}
        part = attributes.get("subresource")
        resource = f"{attributes['resource']}/{part}" if part else attributes["resource"]
        key = (spec.get("user", self.user), attributes["verb"], resource)
        return {**body, "status": {"allowed": key not in self.denied}}

    def _version(self) -> Tree:
        commit = {
            "gitCommit": "a78aa47",
            "gitTreeState": "clean",
            "buildDate": "2024-12-10T18:42:08Z",
        }
        build = {"goVersion": "go1.22.9", "compiler": "gc", "platform": "linux/amd64"}
        return {"major": "1", "minor": "31", "gitVersion": "v1.31.4", **commit, **build}

    def _group(self, group: str) -> Tree:
        versions = [each.partition("/")[2] for each in self.kinds if each.startswith(f"{group}/")]
        if not versions:
            raise RefusedError(404, "NotFound", f"no such group: {group}")
        return {"versions": [{"version": each} for each in versions]}

    def _kinds(self, group: str, version: str) -> Tree:
        kinds = self.kinds.get(f"{group}/{version}")
        if kinds is None:
            raise RefusedError(404, "NotFound", f"no such version: {group}/{version}")
        return {"kind": "APIResourceList", "resources": [{"name": each} for each in kinds]}

    def _namespace(self, name: str) -> Tree:
        if name in self.absent:
            raise RefusedError(404, "NotFound", f'namespaces "{name}" not found')
        metadata = {"name": name, "labels": self._store.labels.get(name, {})}
        return {"metadata": metadata, "status": {"phase": "Active"}}

    def _nodes(self) -> Tree:
        return {"items": self._store.all("nodes")}

    def _class(self, name: str) -> Tree:
        return self._store.get("priorityclasses", "", name)

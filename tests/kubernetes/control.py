"""API endpoints outside namespaces: version, kinds, nodes, namespaces and access reviews."""

import re
from collections.abc import Callable
from typing import Any

from tests.kubernetes import job_validation, rbac
from tests.kubernetes.jobset_api import JobSetApi
from tests.kubernetes.store import NotServedError, RefusedError, Store, Tree

USER = "ann@example.com"
# The API's error if the operator's webhook, which has `failurePolicy: Fail`, does not respond.
WEBHOOK_FAILED = (
    "Internal error occurred: failed calling webhook "
    '"validator.tfjob.training-operator.kubeflow.org": failed to call webhook: Post '
    '"https://training-operator.kubeflow.svc:443/validate-kubeflow-org-v1-tfjob?timeout=10s": '
    'no endpoints available for service "training-operator"'
)
# API groups that the API server itself provides.
BUILT_IN = {"networking.k8s.io", "batch", "coordination.k8s.io"}
_REVIEWS = "/apis/authorization.k8s.io/v1/"


class Control:
    """Responds to all requests that do not concern objects in a namespace."""

    def __init__(self, store: Store) -> None:
        self.kubernetes = "1.31.4"
        self.user = USER
        self.users: dict[str, str] = {}
        self.granted: dict[str, rbac.Grants] = {}
        self.denied: set[tuple[str, str, str]] = set()
        self.kinds = {"kubeflow.org/v1": ["tfjobs", "tfjobs/status", "pytorchjobs"]}
        self.absent: set[str] = set()
        self.is_webhook_silent = False
        self.jobsets = JobSetApi()
        store.webhooks.append(self.jobsets.check)
        self.reviews: list[Tree] = []
        self._store = store
        self._answers: list[tuple[str, Callable[..., Tree]]] = [
            (r"GET /version/?", self._version),
            (r"GET /apis/(?P<group>[^/]+)", self._group),
            (r"GET /apis/(?P<group>[^/]+)/(?P<version>v[^/]+)", self._kinds),
            (r"GET /api/v1/namespaces/(?P<name>[^/]+)", self._namespace),
            (r"GET /api/v1/nodes", lambda: self._all("nodes")),
            (r"GET /apis/apps/v1/deployments", lambda: self._all("deployments")),
            (r"GET /apis/scheduling.k8s.io/v1/priorityclasses/(?P<name>[^/]+)", self._class),
        ]

    def answer(self, method: str, path: str, body: Tree, token: str = "") -> Tree:
        if method == "POST":
            return self._review(path, body, self.user_of(token))
        for pattern, answer in self._answers:
            found = re.fullmatch(pattern, f"{method} {path}")
            if found:
                return answer(**found.groupdict())
        raise NotServedError

    def check_served(self, group: str, version: str, kind: str) -> None:
        """Reject a path whose kind is not served in this API group and version."""
        if kind in ("jobsets", "jobs", "leases") and group != rbac.GROUPS[kind]:
            raise NotServedError
        if group in BUILT_IN:
            return
        if group and kind not in self.kinds.get(f"{group}/{version}", []):
            raise NotServedError

    def call_webhook(self) -> None:
        """Fail as the API server does if the operator's webhook does not respond."""
        if self.is_webhook_silent:
            raise RefusedError(500, "InternalError", WEBHOOK_FAILED)

    def install_kueue(self) -> None:
        self.kinds["kueue.x-k8s.io/v1beta1"] = ["localqueues", "clusterqueues", "workloads"]

    def admitted(self, kind: str, tree: Tree, query: dict[str, str]) -> Tree:
        """Validate an object, and return it with defaults, as the API stores it."""
        if kind == "jobsets":
            return self.jobsets.created(tree, strict=query.get("fieldValidation") == "Strict")
        if kind == "jobs":
            tree = job_validation.defaulted(tree)
            job_validation.check(tree)
        return tree

    def deny(self, user: str, *permissions: str) -> None:
        for permission in permissions:
            verb, _, resource = permission.partition(" ")
            self.denied.add((user, verb, resource))

    def user_of(self, token: str) -> str:
        return self.users.get(token, self.user)

    def may(self, user: str, verb: str, resource: str) -> bool:
        """Return whether a user may use a verb on a resource such as `pods/log`."""
        granted = self.granted.get(user)
        is_granted = granted is None or (verb, resource) in granted
        return is_granted and (user, verb, resource) not in self.denied

    def _review(self, path: str, body: Tree, caller: str) -> Tree:
        if path.endswith("/selfsubjectreviews"):
            return {**body, "status": {"userInfo": {"username": caller}}}
        spec: dict[str, Any] = body["spec"]
        kinds = {
            "selfsubjectaccessreviews": "SelfSubjectAccessReview",
            "subjectaccessreviews": "SubjectAccessReview",
        }
        if kinds.get(path.removeprefix(_REVIEWS)) != body["kind"]:
            raise RefusedError(400, "BadRequest", f"{body['kind']} at {path}")
        attributes = spec["resourceAttributes"]
        self.reviews.append(spec)
        if attributes["group"] != rbac.GROUPS.get(attributes["resource"], ""):
            return {**body, "status": {"allowed": False, "reason": "no such group"}}
        part = attributes.get("subresource")
        resource = f"{attributes['resource']}/{part}" if part else attributes["resource"]
        allowed = self.may(spec.get("user", caller), attributes["verb"], resource)
        return {**body, "status": {"allowed": allowed}}

    def _version(self) -> Tree:
        commit = {
            "gitCommit": "a78aa47",
            "gitTreeState": "clean",
            "buildDate": "2024-12-10T18:42:08Z",
        }
        build = {"goVersion": "go1.22.9", "compiler": "gc", "platform": "linux/amd64"}
        major, minor, _ = self.kubernetes.split(".")
        named = {"major": major, "minor": minor, "gitVersion": f"v{self.kubernetes}"}
        return {**named, **commit, **build}

    def _group(self, group: str) -> Tree:
        versions = [each.partition("/")[2] for each in self.kinds if each.startswith(f"{group}/")]
        if not versions:
            raise NotServedError
        listed = [{"version": each} for each in versions]
        return {"versions": listed, "preferredVersion": listed[0]}

    def _kinds(self, group: str, version: str) -> Tree:
        kinds = self.kinds.get(f"{group}/{version}")
        if kinds is None:
            raise NotServedError
        return {"kind": "APIResourceList", "resources": [{"name": each} for each in kinds]}

    def check_namespace(self, name: str) -> None:
        if name in self.absent:
            raise RefusedError(404, "NotFound", f'namespaces "{name}" not found')

    def _namespace(self, name: str) -> Tree:
        self.check_namespace(name)
        labels = self._store.labels.get(name, {})
        return {"metadata": {"name": name, "labels": labels}, "status": {"phase": "Active"}}

    def _all(self, kind: str) -> Tree:
        return {"items": self._store.all(kind)}

    def _class(self, name: str) -> Tree:
        return self._store.get("priorityclasses", "", name)

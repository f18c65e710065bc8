"""The Kubernetes API with short timeouts: an answer is data, silence is an error."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from http import HTTPStatus
from urllib.parse import quote

import urllib3

from components.kubernetes.api.client import Api, Connection, UnreachableError, connect
from components.kubernetes.api.kinds import Resource
from components.kubernetes.names import Tree
from pipelines.doctor import versions
from pipelines.doctor.examination import Finding
from trainer.errors import UserError

_TIMEOUT = urllib3.Timeout(connect=3, read=5)
_MOST_WORDS = 200
SHOW = "kubectl cluster-info"


class NoAnswerError(UserError):
    """The API is not there, or says nothing."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the API has answered."""

    status: int
    tree: Tree

    @property
    def is_good(self) -> bool:
        """Whether the request succeeded."""
        return self.status < HTTPStatus.MULTIPLE_CHOICES

    @property
    def is_missing(self) -> bool:
        """Whether there is no such thing."""
        return self.status == HTTPStatus.NOT_FOUND

    @property
    def is_forbidden(self) -> bool:
        """Whether a permission is missing."""
        return self.status == HTTPStatus.FORBIDDEN

    @property
    def items(self) -> list[Tree]:
        """Return the objects of a list."""
        found: list[Tree] = self.tree.get("items") or []
        return found

    @property
    def words(self) -> str:
        """Return what the API says of it, in one line."""
        message = " ".join(str(self.tree.get("message") or "").split())[:_MOST_WORDS]
        return f"HTTP {self.status}" + (f", {message}" if message else "")


class Kubernetes:
    """The API to which the configuration of this machine, or of this pod, leads."""

    def __init__(self, namespace: str) -> None:
        """Ask nothing yet; an empty namespace is that of the context."""
        self._namespace = namespace

    @cached_property
    def _connection(self) -> Connection:
        return connect()

    @cached_property
    def _api(self) -> Api:
        return Api(self._connection, self.namespace)

    @property
    def namespace(self) -> str:
        """Where the job is to run; raises `UserError`."""
        return self._namespace or self._connection.namespace

    @property
    def is_named(self) -> bool:
        """Whether the namespace was named, and not left to the context."""
        return bool(self._namespace)

    @property
    def host(self) -> str:
        """The address of the API; raises `UserError`."""
        return str(self._connection.configuration.host)

    def find(self, kind: str, name: str = "") -> Answer:
        """Return an object of the namespace, or all of a kind; raises `NoAnswerError`."""
        path = f"/api/v1/namespaces/{quote(self.namespace)}/{kind}"
        return self.get(f"{path}/{quote(name)}" if name else path)

    def get(self, path: str) -> Answer:
        """Return the answer to a GET; raises `NoAnswerError`."""
        return self._ask("GET", path)

    def post(self, path: str, body: Tree) -> Answer:
        """Return the answer to a review, which is a POST; raises `NoAnswerError`."""
        return self._ask("POST", path, body)

    def try_to_create(self, resource: Resource, tree: Tree, *, strict: bool = False) -> Answer:
        """Return the answer to the creation of an object in the namespace; nothing is made.

        All that admits objects is asked; with `strict` a field that is not known is refused. Raises
        `NoAnswerError`.
        """
        metadata = {**tree["metadata"], "namespace": self.namespace}
        query = "fieldValidation=Strict&dryRun=All" if strict else "dryRun=All"
        path = f"{resource.path(quote(self.namespace))}?{query}"
        return self._ask("POST", path, {**tree, "metadata": metadata})

    def _ask(self, method: str, path: str, body: Tree | None = None) -> Answer:
        try:
            answer = self._api.request(method, path, body=body, timeout=_TIMEOUT)
        except UnreachableError as error:
            words = " ".join(str(error).split())[:_MOST_WORDS]
            raise NoAnswerError(f"{self.host} does not answer {words}") from None
        try:
            tree = answer.json()
        except ValueError:
            tree = {"message": "not the answer of a Kubernetes API"}
        return Answer(status=answer.status, tree=tree if isinstance(tree, dict) else {})


def unexpected(answer: Answer, what: str, command: str) -> Finding:
    """Return the finding for an answer that is neither the object nor its absence.

    Args:
        answer: the answer.
        what: the object of the request.
        command: shows, or fixes, it.
    """
    if answer.is_forbidden:
        return Finding("warn", f"may not read {what} ({answer.words})", command)
    return Finding("fail", f"cannot read {what} ({answer.words})", command)


def answers(kubernetes: Kubernetes) -> Finding:
    """Check that the API answers, and knows the caller."""
    try:
        host = kubernetes.host
    except UserError as error:
        return Finding("fail", str(error), "kubectl config get-contexts")
    try:
        answer = kubernetes.get("/version")
    except NoAnswerError as error:
        return Finding("fail", str(error), SHOW)
    if answer.status == HTTPStatus.UNAUTHORIZED:
        message = f"{host} does not know the caller, or no longer ({answer.words})"
        return Finding("fail", f"{message}: renew the login", "kubectl auth whoami")
    if answer.is_forbidden:
        message = f"{host} answers, but does not return its version ({answer.words})"
        return Finding("warn", message, "kubectl auth whoami")
    if not answer.is_good or "gitVersion" not in answer.tree:
        message = f"{host} is no Kubernetes API ({answer.words})"
        return Finding("fail", message, SHOW)
    version = str(answer.tree["gitVersion"])
    return versions.judged(versions.KUBERNETES, version, f"{version} at {host}", SHOW)


def namespace(kubernetes: Kubernetes) -> Finding:
    """Check that the namespace of the job is there."""
    name = kubernetes.namespace
    answer = kubernetes.get(f"/api/v1/namespaces/{quote(name)}")
    if answer.is_missing:
        return Finding("fail", f"there is no namespace {name}", f"kubectl create namespace {name}")
    if not answer.is_good:
        return unexpected(answer, f"the namespace {name}", f"kubectl get namespace {name}")
    phase = answer.tree.get("status", {}).get("phase", "Active")
    if phase != "Active":
        message = f"{name} is {phase}: nothing can be created there"
        return Finding("fail", message, f"kubectl get namespace {name} --output yaml")
    if not kubernetes.is_named:
        return Finding("ok", f"{name}, to which the context leads; --namespace names another")
    return Finding("ok", name)

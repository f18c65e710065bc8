"""A client of Kubeflow's Model Registry (Hub), which records promoted versions.

The client uses the REST API v1alpha3. It changes no existing entry, so a retry is safe.
https://github.com/kubeflow/hub/blob/main/api/openapi/model-registry.yaml
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.runtime.json_records import is_number
from flotilla.trainer.runtime.masking import is_sent_openly, mask

if TYPE_CHECKING:
    import requests

PATH = "/api/model_registry/v1alpha3"
# Environment variable with the path of the token file, as in the registry's Python client. Without
# it, a pod's default path is used.
TOKEN_FILE = "KF_PIPELINES_SA_TOKEN_PATH"
_POD_TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
# Timeouts for connecting and for each response, in seconds.
_TIMEOUT = (3.0, 5.0)
_PAGE = 100


@dataclass(frozen=True, kw_only=True)
class PromotedModel:
    """A promoted version. Its `properties` are the numbers and strings of its lineage."""

    name: str
    version: int
    uri: str
    run_id: str
    is_champion: bool
    properties: Mapping[str, Any]


class Hub:
    """A client of one Model Registry."""

    def __init__(self, address: str) -> None:
        """Store the address, such as `http://model-registry-service.kubeflow:8080`."""
        self._home = f"{address.rstrip('/')}{PATH}"
        import requests

        self._session = requests.Session()
        if token := _token():
            if is_sent_openly(address):
                raise UserError(
                    f"registry.hub: {mask(address)} is plain http, and a token is sent only "
                    "over https; use https"
                )
            self._session.headers["Authorization"] = f"Bearer {token}"

    def check(self) -> str:
        """Return a line that confirms that the registry responds. Raises `UserError` if not."""
        self._ask("GET", "registered_models", query={"pageSize": "1"})
        return f"the model registry responds at {mask(self._home)}"

    def announce(self, model: PromotedModel) -> str:
        """Register a promoted version and return its id in the registry. Raises `UserError`."""
        owner = {"name": model.name, "state": "LIVE", "owner": "flotilla"}
        parent = self._ensure("registered_models", owner)["id"]
        wanted = {
            "name": str(model.version),
            "registeredModelId": parent,
            "state": "LIVE",
            "author": f"run {model.run_id}",
            "customProperties": _properties(model.properties),
        }
        listed = f"registered_models/{parent}/versions"
        version = str(self._ensure("model_versions", wanted, listed)["id"])
        artifact = {
            "artifactType": "model-artifact",
            "name": f"{model.name}-{model.version}",
            "uri": model.uri,
            "modelFormatName": "tensorflow",
            "modelFormatVersion": "2",
            "modelSourceKind": "flotilla",
            "modelSourceId": model.run_id,
            "state": "LIVE",
        }
        found = self._ensure(f"model_versions/{version}/artifacts", artifact)
        if found.get("uri") != model.uri:
            raise UserError(
                f"the model registry at {mask(self._home)} already has version {model.version} of "
                f"{model.name}, with the URI {mask(str(found.get('uri')))}; give this model "
                "another name"
            )
        return version

    def _ensure(self, kind: str, wanted: Mapping[str, Any], listed: str = "") -> dict[str, Any]:
        listed = listed or kind
        found = self._find(listed, wanted["name"])
        found = found or self._ask("POST", kind, body=wanted, unless=HTTPStatus.CONFLICT)
        # Use the entry of another run that created it in the meantime.
        found = found or self._find(listed, wanted["name"])
        if not found or "id" not in found:
            raise self._strange(f"its response has no id for {wanted['name']}")
        return found

    def _find(self, place: str, name: str) -> dict[str, Any] | None:
        # The server searches names with LIKE, so `my_model` would also match `my-model`.
        return next((each for each in self._list(place) if each.get("name") == name), None)

    def _list(self, place: str) -> Iterator[dict[str, Any]]:
        query, seen = {"pageSize": str(_PAGE)}, set[object]()
        while True:
            page = self._ask("GET", place, query=query) or {}
            items = page.get("items", [])
            if not isinstance(items, list):
                raise self._strange(f"its list of {place} is invalid")
            yield from (each for each in items if isinstance(each, dict))
            token = page.get("nextPageToken")
            # Stop at a repeated page token, because it would cause an endless loop.
            if not token or token in seen:
                return
            seen.add(token)
            query["nextPageToken"] = str(token)

    def _ask(
        self,
        verb: str,
        place: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        unless: HTTPStatus | None = None,
    ) -> dict[str, Any] | None:
        """Return the JSON response, or None for a response with the status `unless`."""
        import requests

        url = f"{self._home}/{place}"
        try:
            answer = self._session.request(
                verb, url, params=query, json=body, timeout=_TIMEOUT, allow_redirects=False
            )
        except requests.RequestException as error:
            raise self._strange(type(error).__name__) from None
        if answer.status_code == unless:
            return None
        if answer.status_code not in (HTTPStatus.OK, HTTPStatus.CREATED):
            raise self._strange(f"{answer.status_code} {_words(answer)}")
        try:
            tree = answer.json()
        except ValueError:
            tree = None
        if not isinstance(tree, dict):
            raise self._strange("its response is not a JSON object")
        return tree

    def _strange(self, words: str) -> UserError:
        return UserError(f"the model registry at {mask(self._home)}: {mask(words)[:300]}")


def _words(answer: requests.Response) -> str:
    try:
        return str(answer.json()["message"])
    except (ValueError, KeyError, TypeError):
        return answer.reason or ""


def _token() -> str:
    named = os.environ.get(TOKEN_FILE)
    try:
        return Path(named or _POD_TOKEN).read_text(encoding="utf-8").strip()
    except OSError as error:
        if named:
            raise UserError(f"{TOKEN_FILE}: cannot read {named}: {error.strerror}") from None
        return ""


def _properties(values: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in values.items():
        if is_number(value):
            made[name] = {"metadataType": "MetadataDoubleValue", "double_value": float(value)}
        elif isinstance(value, str) and value:
            made[name] = {"metadataType": "MetadataStringValue", "string_value": mask(value)}
    return made

"""Announces promotions to the registries of MLflow and Kubeflow.

In MLflow, versions have the same numbers and champion as in the registry of Flotilla. MLflow
assigns consecutive numbers. To keep the numbers equal, recent versions that MLflow lacks are
registered too. For each old or removed version, a placeholder is registered and then deleted.

The client of Kubeflow's Model Registry (Hub) uses the REST API v1alpha3. It changes no existing
entry, so a retry is safe.
https://github.com/kubeflow/hub/blob/main/api/openapi/model-registry.yaml
"""

from __future__ import annotations

import functools
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flotilla.trainer import storage
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.runtime.json_records import is_number
from flotilla.trainer.runtime.masking import is_sent_openly, mask
from flotilla.trainer.tracking import addresses
from flotilla.trainer.tracking.mlflow_run import RunName, client_of_mlflow, create_run, find_run
from flotilla.trainer.tracking.tracker import MISSING

if TYPE_CHECKING:
    import requests

CHAMPION = "champion"
_VERSION = "flotilla.version_uri"
# Maximum number of earlier versions to register if MLflow lacks them. It is low, because local
# models are uploaded.
_MOST_EARLIER = 5
# Maximum number of missing version numbers to fill.
_MOST_NUMBERS = 1000
log = logging.getLogger(__name__)


def register_in_mlflow(
    model: PromotedModel, list_earlier: Callable[[], Sequence[PromotedModel]] = tuple
) -> str:
    """Register a version in MLflow, linked to its run, and return its number there.

    A champion gets the alias `champion`. A model in a local folder is uploaded to the run, because
    MLflow's server accepts no local path.
    """
    client = client_of_mlflow()
    _ensure_model(client, model.name)
    known = {
        each.tags.get(_VERSION): each
        for each in client.search_model_versions(f"name = '{model.name}'")
    }
    number = str(known[model.uri].version) if model.uri in known else ""
    if not number:
        newest = max((int(each.version) for each in known.values()), default=0)
        if newest + 1 < model.version:
            earlier = [each for each in list_earlier() if newest < each.version < model.version]
            for each in earlier[-_MOST_EARLIER:]:
                _create(client, each)
        number = _create(client, model)
    if model.is_champion:
        client.set_registered_model_alias(model.name, CHAMPION, number)
    return number


def is_champion_known(name: str, uri: str) -> bool:
    """Return whether MLflow's champion of a model is the version at a URI."""
    from mlflow.exceptions import MlflowException

    try:
        found = client_of_mlflow().get_model_version_by_alias(name, CHAMPION)
    except MlflowException as error:
        # Some stores report an unknown alias as an invalid parameter.
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return False
        raise
    return bool(found.tags.get(_VERSION) == uri)


def _ensure_model(client: Any, name: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.get_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        try:
            client.create_registered_model(name)
        except MlflowException as late:
            # Ignore the error if another run created the model in the meantime.
            if late.error_code != "RESOURCE_ALREADY_EXISTS":
                raise


def _create(client: Any, model: PromotedModel) -> str:
    """Register a version under its number or, if that is taken, under the next free number."""
    run_id, source = _place(client, model)
    tags = {_VERSION: model.uri, "flotilla.version": str(model.version)}
    tags |= {f"flotilla.{key}": str(value) for key, value in model.properties.items() if value}
    for _ in range(_MOST_NUMBERS):
        made = client.create_model_version(model.name, source, run_id, tags=tags)
        if int(made.version) >= model.version:
            break
        client.delete_model_version(model.name, made.version)
    if int(made.version) != model.version:
        log.warning(
            "version %d of %s is version %s in MLflow, because MLflow has other versions of this "
            "model; load it by its alias, or find it by the tag flotilla.version",
            model.version,
            model.name,
            made.version,
        )
    return str(made.version)


def _place(client: Any, model: PromotedModel) -> tuple[str | None, str]:
    """Return the id of the version's run and the URI of its files. Upload a local model first."""
    name = RunName(run_id=model.run_id, experiment=model.name, parameters={})
    experiment, run = find_run(client, name)
    folder = storage.local_path(model.uri)
    if not folder:
        return run.info.run_id if run else None, model.uri.partition("?")[0]
    if run is None:
        # Create a run if the run was not tracked, because the files are uploaded to a run.
        run = create_run(client, name, experiment)
        client.set_terminated(run.info.run_id, "FINISHED")
    place = f"models/{model.version}"
    client.log_artifacts(run.info.run_id, os.fspath(folder), place)
    return run.info.run_id, f"{run.info.artifact_uri}/{place}"


# Timeout for each registry in seconds, including the upload of a local model.
SECONDS = 120.0


def announce(
    model: PromotedModel,
    hub: str,
    list_earlier: Callable[[], Sequence[PromotedModel]] = tuple,
    *,
    seconds: float = SECONDS,
) -> None:
    """Announce a promotion to all configured registries. Failures are only logged.

    `list_earlier` returns the earlier versions, to register those that MLflow lacks.
    """
    wanted: dict[str, Callable[[], object]] = {}
    if addresses.is_tracked():
        wanted["MLflow"] = lambda: register_in_mlflow(model, list_earlier)
    if hub:
        wanted["the model registry"] = lambda: Hub(hub).announce(model)
    answers: dict[str, queue.SimpleQueue[str]] = {}
    for name, call in wanted.items():
        answers[name] = queue.SimpleQueue()
        # Use a daemon thread, so that a slow registry does not keep the process alive.
        work = functools.partial(_answer, call, answers[name])
        threading.Thread(target=work, name="promotion", daemon=True).start()
    for name, answer in answers.items():
        try:
            words = answer.get(timeout=seconds)
        except queue.Empty:
            words = f"no response within {seconds:g} s"
        if words:
            log.warning(
                "cannot tell %s that version %d of %s was promoted: %s; the promotion is valid, "
                "and the next run or promotion of this model tries again",
                name,
                model.version,
                model.name,
                words,
            )


def _answer(call: Callable[[], object], answer: queue.SimpleQueue[str]) -> None:
    words = ""
    try:
        call()
    except ImportError:
        words = MISSING
    except Exception as error:
        words = " ".join(mask(f"{type(error).__name__}: {error}").split())[:300]
    answer.put(words)


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

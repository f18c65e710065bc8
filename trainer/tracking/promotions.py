"""Announcements of a promotion to MLflow's registry and Kubeflow's Model Registry."""

from __future__ import annotations

import functools
import logging
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

from flotilla.trainer import storage
from flotilla.trainer.runtime.masking import mask
from flotilla.trainer.tracking import addresses
from flotilla.trainer.tracking.hub import Hub, PromotedModel
from flotilla.trainer.tracking.mlflow_run import RunName, client_of_mlflow, find_run
from flotilla.trainer.tracking.tracker import MISSING

# The timeout of each address; it includes the upload of a local run's model.
SECONDS = 120.0
CHAMPION = "champion"
_VERSION = "flotilla.version_uri"
log = logging.getLogger(__name__)


def announce(model: PromotedModel, hub: str, *, seconds: float = SECONDS) -> None:
    """Announce a promotion to all configured addresses; never raises."""
    wanted: dict[str, Callable[[], object]] = {}
    if addresses.is_tracked():
        wanted["MLflow"] = lambda: register_in_mlflow(model)
    if hub:
        wanted["the model registry"] = lambda: Hub(hub).announce(model)
    answers: dict[str, queue.SimpleQueue[str]] = {}
    for name, call in wanted.items():
        answers[name] = queue.SimpleQueue()
        # A late answer is not waited for.
        work = functools.partial(_answer, call, answers[name])
        threading.Thread(target=work, name="promotion", daemon=True).start()
    for name, answer in answers.items():
        try:
            words = answer.get(timeout=seconds)
        except queue.Empty:
            words = f"no answer within {seconds:g} s"
        if words:
            log.warning(
                "%s does not know that version %d of %s was promoted: %s; the promotion holds",
                name,
                model.version,
                model.name,
                words,
            )


def _answer(call: Callable[[], object], answer: queue.SimpleQueue[str]) -> None:
    """Put the reason of a failed call, or an empty text."""
    words = ""
    try:
        call()
    except ImportError:
        words = MISSING
    except Exception as error:
        words = " ".join(mask(f"{type(error).__name__}: {error}").split())[:300]
    answer.put(words)


def register_in_mlflow(model: PromotedModel) -> str:
    """Register a version in MLflow, linked to its run, as its `champion`; return its number.

    A model in a local folder is uploaded to the run, because MLflow's server takes no path.
    """
    client = client_of_mlflow()
    _ensure_model(client, model.name)
    known = client.search_model_versions(f"name = '{model.name}'")
    version = next((each for each in known if each.tags.get(_VERSION) == model.uri), None)
    version = version or _create(client, model)
    if model.is_champion:
        client.set_registered_model_alias(model.name, CHAMPION, version.version)
    return str(version.version)


def _ensure_model(client: Any, name: str) -> None:
    from mlflow.exceptions import MlflowException

    # Any other failure is the server's, which is not asked again.
    try:
        client.get_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        try:
            client.create_registered_model(name)
        except MlflowException as late:
            # Another run may have created it meanwhile.
            if late.error_code != "RESOURCE_ALREADY_EXISTS":
                raise


def _create(client: Any, model: PromotedModel) -> Any:
    name = RunName(run_id=model.run_id, experiment=model.name, parameters={})
    _, run = find_run(client, name)
    source, folder = model.uri.partition("?")[0], storage.local_path(model.uri)
    if folder and run:
        place = f"models/{model.version}"
        client.log_artifacts(run.info.run_id, os.fspath(folder), place)
        source = f"{run.info.artifact_uri}/{place}"
    tags = {_VERSION: model.uri, "flotilla.version": str(model.version)}
    tags |= {f"flotilla.{key}": str(value) for key, value in model.properties.items() if value}
    return client.create_model_version(
        model.name, source, run.info.run_id if run else None, tags=tags
    )

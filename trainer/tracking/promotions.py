"""Announces promotions to the registries of MLflow and Kubeflow.

In MLflow, versions have the same numbers and champion as in the registry of Flotilla. MLflow
assigns consecutive numbers. To keep the numbers equal, recent versions that MLflow lacks are
registered too. For each old or removed version, a placeholder is registered and then deleted.
"""

from __future__ import annotations

import functools
import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from flotilla.trainer import storage
from flotilla.trainer.runtime.masking import mask
from flotilla.trainer.tracking import addresses
from flotilla.trainer.tracking.hub import Hub, PromotedModel
from flotilla.trainer.tracking.mlflow_run import RunName, client_of_mlflow, create_run, find_run
from flotilla.trainer.tracking.tracker import MISSING

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

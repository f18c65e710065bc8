"""The addresses of MLflow and of Kubeflow's Model Registry, from environment variables."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from flotilla.trainer import events
from flotilla.trainer.runtime.masking import find_credentials

URI, RUN = "MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID"
EXPERIMENT, EXPERIMENT_NAME = "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME"
# Variables whose values are copied to the pods of a training job. KFP sets all of them except the
# experiment name.
PLAIN = (URI, RUN, EXPERIMENT, EXPERIMENT_NAME, "MLFLOW_WORKSPACE", "MLFLOW_TRACKING_AUTH")
# The secret from which KFP's MLflow plugin reads its credentials, and its default keys. Other keys
# can be set in `cluster.kubernetes.pod.secret_env`.
KFP_SECRET = "kfp-mlflow-credentials"
SECRET_KEYS = {
    "MLFLOW_TRACKING_TOKEN": "token",
    "MLFLOW_TRACKING_USERNAME": "username",
    "MLFLOW_TRACKING_PASSWORD": "password",
}
#: All tracking variables that a manifest may contain.
VARIABLES = frozenset((*PLAIN, *SECRET_KEYS))
# Environment variable with the address of the Model Registry, used if `registry.hub` is empty.
HUB = "FLOTILLA_MODEL_REGISTRY"
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Place:
    """The location of a run in MLflow: its run id, or an experiment by id or name."""

    run: str = field(default_factory=lambda: os.environ.get(RUN, ""))
    experiment: str = field(default_factory=lambda: os.environ.get(EXPERIMENT, ""))
    experiment_name: str = field(default_factory=lambda: os.environ.get(EXPERIMENT_NAME, ""))


def is_tracked() -> bool:
    """Return whether the environment sets MLflow's tracking URI."""
    return bool(os.environ.get(URI))


def is_given_run() -> bool:
    """Return whether the environment sets the MLflow run, as KFP does for each step."""
    return bool(os.environ.get(RUN))


def writes_itself() -> bool:
    """Return whether this process must write its run to MLflow, because no CLI process does."""
    return is_tracked() and not os.environ.get(events.VARIABLE)


def list_pod_variables() -> tuple[dict[str, str], dict[str, str]]:
    """Return the variables for a job's pods: values, and references `SECRET/KEY` to secrets."""
    address = os.environ.get(URI, "")
    if words := find_credentials(address):
        log.warning(
            "not passing %s to the pods of the job: %s, which other users could read there; put "
            "the address into a secret (see docs/how-to/tracking.md)",
            URI,
            words,
        )
        return {}, {}
    if not address:
        return {}, {}
    values = {name: os.environ[name] for name in PLAIN if os.environ.get(name)}
    secrets = {
        name: f"{KFP_SECRET}/{key}" for name, key in SECRET_KEYS.items() if os.environ.get(name)
    }
    return values, secrets


def find_hub(configured: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return the address of the Model Registry, or an empty string."""
    return (configured or environment.get(HUB, "")).rstrip("/")

"""Where the trackers are: the variables of MLflow, and the address of Kubeflow's Model Registry."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from flotilla.trainer import events
from flotilla.trainer.runtime.masking import find_credentials

URI, RUN = "MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID"
EXPERIMENT, EXPERIMENT_NAME = "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME"
# What the pods of a training job get as values. KFP sets all but the name of the experiment.
PLAIN = (URI, RUN, EXPERIMENT, EXPERIMENT_NAME, "MLFLOW_WORKSPACE", "MLFLOW_TRACKING_AUTH")
# The secret that KFP's plugin for MLflow reads its credentials from, and the keys that its own
# installation gives it. A key of another name is set by `cluster.kubernetes.pod.secret_env`.
KFP_SECRET = "kfp-mlflow-credentials"
SECRET_KEYS = {
    "MLFLOW_TRACKING_TOKEN": "token",
    "MLFLOW_TRACKING_USERNAME": "username",
    "MLFLOW_TRACKING_PASSWORD": "password",
}
#: What a manifest may have of a tracker.
VARIABLES = frozenset((*PLAIN, *SECRET_KEYS))
# The address of the Model Registry where `registry.hub` is empty.
HUB = "FLOTILLA_MODEL_REGISTRY"
log = logging.getLogger(__name__)


def is_tracked() -> bool:
    """Return whether the environment names a tracker."""
    return bool(os.environ.get(URI))


def is_given_run() -> bool:
    """Return whether the environment names a run of MLflow, as KFP does for each step."""
    return bool(os.environ.get(RUN))


def writes_itself() -> bool:
    """Return whether this process writes to the tracker, and no command line follows it."""
    return is_tracked() and not os.environ.get(events.VARIABLE)


def list_pod_variables() -> tuple[dict[str, str], dict[str, str]]:
    """Return the variables for the pods of a job: values, and references `SECRET/KEY`."""
    address = os.environ.get(URI, "")
    if words := find_credentials(address):
        log.warning(
            "%s is not given to the pods of the job, where many could read it: %s; write them into "
            "a secret, see docs/how-to/tracking.md",
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
    """Return the address of the Model Registry; empty for none."""
    return (configured or environment.get(HUB, "")).rstrip("/")

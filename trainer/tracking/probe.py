"""Whether the trackers of a run answer, asked before it."""

from __future__ import annotations

import os
from importlib.util import find_spec

import requests

from trainer.errors import UserError
from trainer.masking import masked
from trainer.tracking import addresses
from trainer.tracking.hub import Hub

_SECONDS = 5.0


def tracker() -> str:
    """Return what answers at `MLFLOW_TRACKING_URI`.

    Raises:
        UserError: nothing does, or the package is not installed.
    """
    if find_spec("mlflow") is None:
        raise UserError("MLFLOW_TRACKING_URI is set, and the extra mlflow is not installed")
    address = os.environ[addresses.URI]
    if not address.startswith(("http://", "https://")):
        return f"MLflow writes to {masked(address)}"
    # The server of MLflow answers this without a token.
    url = f"{address.rstrip('/')}/health"
    try:
        answer = requests.get(url, timeout=_SECONDS, allow_redirects=False)
    except (requests.RequestException, ValueError) as error:
        raise UserError(f"{masked(url)} does not answer: {type(error).__name__}") from None
    if answer.status_code != requests.codes.ok:
        raise UserError(f"{masked(url)} answers {answer.status_code}: is it a server of MLflow?")
    return f"MLflow answers at {masked(address)}"


def hub(configured: str) -> str:
    """Return what answers at the address of the Model Registry; raises `UserError`."""
    address = addresses.hub_of(configured)
    Hub(address).check()
    return f"the model registry answers at {masked(address)}"

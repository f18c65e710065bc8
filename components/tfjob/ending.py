"""The exit step's part: end every job of a run, by its label."""

from __future__ import annotations

import logging
import time
from functools import partial

from components.tfjob import names
from components.tfjob.api import Api, RefusedError
from components.tfjob.connection import connect
from components.tfjob.patience import patiently
from trainer.errors import UserError
from trainer.kubernetes_config import KubernetesConfig

log = logging.getLogger(__name__)
SECONDS = 120.0


def end_run(settings: KubernetesConfig, run_id: str) -> list[str]:
    """Delete the jobs of a run that are left, and return their names; raises `UserError`."""
    connection = connect()
    api = Api(connection, settings.namespace or connection.namespace)
    label = f"{names.RUN}={names.run_label(run_id)}"
    try:
        left = patiently(lambda: api.jobs(label), SECONDS, time.sleep)
        for job in left:
            name, uid = job["metadata"]["name"], job["metadata"]["uid"]
            log.warning("the job %s was left, and is deleted", name)
            patiently(partial(api.delete_job, name, uid), SECONDS, time.sleep)
    except RefusedError as error:
        raise UserError(f"cannot delete the jobs with the label {label}: {error}") from None
    return [job["metadata"]["name"] for job in left]

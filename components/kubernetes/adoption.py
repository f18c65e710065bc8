"""Adopt the unfinished job of an earlier attempt of the step, or create a new one.

A retry of the step finds the job of the earlier attempt under the same name. It adopts the job if
the digest of the manifest is the same. A job that has finished, is being stopped or deleted, or
has another manifest is replaced by a new one, whose training resumes from the newest checkpoint.
No job is created while a pod of an earlier one is left: two would train at the same time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from components.kubernetes import names
from components.kubernetes.api.client import Api, RefusedError
from components.kubernetes.api.retry import refused, with_retry
from components.kubernetes.names import Tree
from components.kubernetes.pods import pod_state
from components.kubernetes.pods.shutdown import Stop
from trainer.config.kubernetes import DeadlinesConfig
from trainer.errors import UserError

log = logging.getLogger(__name__)
POLL_SECONDS = 1.0


class Adoption:
    """Ensures that the job of a manifest exists.

    Attributes:
        is_adopted: whether it is the job of an earlier attempt, whose tasks may run already.
    """

    def __init__(self, api: Api, deadlines: DeadlinesConfig, wait: Callable[[float], None]) -> None:
        """Take the API, how long it and the operator may be silent, and a function that sleeps."""
        self._api = api
        self._deadlines = deadlines
        self._wait = wait
        self.is_adopted = False

    def adopt_or_create(self, manifest: Tree, own: Tree, delete_seconds: float) -> Tree:
        """Return the job as the API holds it.

        Args:
            manifest: the job as it should be.
            own: metadata of this attempt: the owner reference and the heartbeat.
            delete_seconds: how long the deletion of another job of this name may take.

        Raises:
            UserError: the API refuses or does not answer, or the other job is not deleted in time.
        """
        metadata = manifest["metadata"]
        name = metadata["name"]
        annotations = {**metadata["annotations"], **own["annotations"]}
        job = {**manifest, "metadata": {**metadata, **own, "annotations": annotations}}
        while True:
            found = self._get(name)
            if found is None:
                self.wait_until_deleted(name, delete_seconds)
                # It may exist by now, perhaps since the answer of a call was lost.
                created = self._ask(lambda: self._api.create_job(job), unless=HTTPStatus.CONFLICT)
                if created is not None:
                    return created
                continue
            if _is_same(found, metadata) and not pod_state.is_finished(found):
                adopted = self._ask(
                    lambda: self._api.patch_job(name, {"metadata": own}),
                    unless=HTTPStatus.NOT_FOUND,
                )
                if adopted is None:
                    continue
                log.info("adopted the job %s of an earlier attempt", name)
                self.is_adopted = True
                return adopted
            self._delete(found, delete_seconds)

    def wait_until_deleted(self, name: str, seconds: float) -> None:
        """Wait until no pod of a job is left; raises `UserError` after so many seconds."""
        label = f"{names.JOB_NAME}={name}"
        left = seconds
        while self._get(name) or self._ask(lambda: self._api.labelled("pods", label)):
            if left == seconds:
                log.info("waiting until the earlier job %s and its pods are gone", name)
            if left <= 0:
                raise UserError(
                    f"the earlier job {name} is not deleted after {seconds:g} s; look at its pods: "
                    f"kubectl get pods -l {label}"
                )
            self._wait(POLL_SECONDS)
            left -= POLL_SECONDS

    def _delete(self, found: Tree, seconds: float) -> None:
        metadata = found["metadata"]
        if _is_stopping(found) and not pod_state.is_finished(found):
            # Its chief still saves.
            Stop(found).wait(self._api, self._wait)
        if not metadata.get("deletionTimestamp"):
            self._ask(lambda: self._api.delete_job(metadata["name"], metadata["uid"]))
        self.wait_until_deleted(metadata["name"], seconds)

    def _get(self, name: str) -> Tree | None:
        found: Tree | None = self._ask(lambda: self._api.get_job(name), unless=HTTPStatus.NOT_FOUND)
        return found

    def _ask(self, call: Callable[[], Any], unless: HTTPStatus | None = None) -> Any:
        """Return the result of a call; None where the API refuses it with the status `unless`."""
        try:
            limits = self._deadlines
            return with_retry(call, limits.unreachable, self._wait, limits.operator)
        except RefusedError as error:
            if error.code == unless:
                return None
            raise UserError(refused(error)) from None


def _is_same(found: Tree, metadata: Tree) -> bool:
    annotations = found["metadata"].get("annotations", {})
    same = annotations.get(names.MANIFEST) == metadata["annotations"][names.MANIFEST]
    return same and not found["metadata"].get("deletionTimestamp") and not _is_stopping(found)


def _is_stopping(found: Tree) -> bool:
    return names.STOP in found["metadata"].get("annotations", {})

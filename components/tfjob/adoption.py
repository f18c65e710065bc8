"""Come by the job: adopt the unfinished one of an earlier attempt, or make it.

A retry of the step finds the job that it left under the same name. With the same manifest it goes
on with it; one that has ended, is being deleted or is another is waited out and made anew, and
training resumes from the newest checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from components.tfjob import names, state
from components.tfjob.client import Api, RefusedError, Tree
from components.tfjob.retry import refused, with_retry
from trainer.errors import UserError

log = logging.getLogger(__name__)
LOOK_SECONDS = 1.0


class Adoption:
    """Makes sure that the job of a manifest is there."""

    def __init__(self, api: Api, unreachable: float, wait: Callable[[float], None]) -> None:
        """Take the API, how long it may be out of reach, and how to wait."""
        self._api = api
        self._unreachable = unreachable
        self._wait = wait

    def job(self, manifest: Tree, own: Tree, gone_seconds: float) -> Tree:
        """Return the job, adopted or made.

        Args:
            manifest: the job as it should be.
            own: metadata of this attempt: the owner and the heartbeat.
            gone_seconds: how long another job of its name may take to go.

        Raises:
            UserError: the API refuses, does not answer, or another job does not go.
        """
        meta = manifest["metadata"]
        name = meta["name"]
        made = {**manifest, "metadata": _laid(meta, own)}
        while True:
            found = self._found(name)
            if found is None:
                created = self._created(made)
                if created is not None:
                    return created
                continue
            if _is_same(found, meta) and not state.is_over(found):
                log.info("adopted the job %s of an earlier attempt", name)
                return self._ask(lambda: self._api.patch_job(name, {"metadata": own}))
            log.info("waiting for an earlier job %s to go", name)
            self._gone(found, gone_seconds)

    def gone(self, name: str, seconds: float) -> None:
        """Wait until no pod of a job is left; raises `UserError` after so many seconds."""
        label = f"{names.JOB_NAME}={name}"
        left = seconds
        while self._found(name) or self._ask(lambda: self._api.pods(label)):
            if left <= 0:
                raise UserError(
                    f"the earlier job {name} is not gone after {seconds:g} s; look at its pods "
                    f"(kubectl get pods -l {label})"
                )
            self._wait(LOOK_SECONDS)
            left -= LOOK_SECONDS

    def _gone(self, found: Tree, seconds: float) -> None:
        meta = found["metadata"]
        if not meta.get("deletionTimestamp"):
            self._ask(lambda: self._api.delete_job(meta["name"], meta["uid"]))
        self.gone(meta["name"], seconds)

    def _found(self, name: str) -> Tree | None:
        def get() -> Tree | None:
            try:
                return self._api.get_job(name)
            except RefusedError as error:
                if error.is_missing:
                    return None
                raise

        return self._ask(get)

    def _created(self, made: Tree) -> Tree | None:
        """Create the job; None where somebody, perhaps this very call, has done so already."""

        def create() -> Tree | None:
            try:
                return self._api.create_job(made)
            except RefusedError as error:
                if error.is_conflict:
                    return None
                raise

        return self._ask(create)

    def _ask(self, call: Callable[[], Any]) -> Any:
        try:
            return with_retry(call, self._unreachable, self._wait)
        except RefusedError as error:
            raise UserError(refused(error)) from None


def _laid(meta: Tree, own: Tree) -> Tree:
    annotations = {**meta["annotations"], **own["annotations"]}
    return {**meta, **own, "annotations": annotations}


def _is_same(found: Tree, meta: Tree) -> bool:
    annotations = found["metadata"].get("annotations", {})
    same = annotations.get(names.MANIFEST) == meta["annotations"][names.MANIFEST]
    return same and not found["metadata"].get("deletionTimestamp")

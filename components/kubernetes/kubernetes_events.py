"""Reads the Kubernetes events of a job and its pods, by the uid of the involved object.

Unlike the conditions of the job, events tell why a pod cannot be created. The permission to list
events is optional.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus

from flotilla.components.kubernetes.api.client import Api, RefusedError, UnreachableError
from flotilla.components.kubernetes.deadlines import Deadlines
from flotilla.components.kubernetes.names import EVENTS, JobKind, Tree

log = logging.getLogger(__name__)
REPORTED = 3
# Seconds between two reads of a job's events while pods are missing.
LOOK_SECONDS = 5.0
# Event reasons of the training operator and the Job controller if a pod cannot be created.
_REFUSALS = ("FailedCreatePod", "FailedCreate")
# Messages of permanent refusals by the API server's admission control. Every retry fails too.
_FINAL = re.compile(r" is forbidden: | is invalid: |admission webhook .* denied the request")
# Messages about transient causes: other jobs use the quota, or a pod of this name still exists.
_TEMPORARY = re.compile(r"exceeded quota: |object is being deleted|already exists")


def last_events(api: Api, *uids: str) -> str:
    """Return a suffix for an error message with the last events of objects, or an empty string.

    If the permission to list events is missing, the result states this. If the events cannot be
    read for another reason, the result is empty.
    """
    try:
        found = sorted((each for uid in uids for each in _events(api, uid)), key=_read_time)
    except UnreachableError:
        return ""
    except RefusedError as error:
        if error.code == HTTPStatus.FORBIDDEN:
            return "; the launcher lacks permission to list events"
        return ""
    lines = (f"{each.get('reason')}: {each.get('message')}" for each in found[-REPORTED:])
    text = " ".join(" | ".join(lines).split())
    return f"; last events: {text}" if text else ""


def _events(api: Api, uid: str) -> list[Tree]:
    found, _ = api.list_objects(EVENTS, {"fieldSelector": f"involvedObject.uid={uid}"})
    return sorted(found, key=_read_time)


def _read_time(event: Tree) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime"))


def is_final(refusal: str) -> bool:
    """Return whether the refusal of a pod with this message is permanent."""
    return bool(_FINAL.search(refusal)) and not _TEMPORARY.search(refusal)


class PodRefusals:
    """Finds out why pods of a job are missing."""

    def __init__(
        self,
        api: Api,
        kind: JobKind,
        reporters: Callable[[], Sequence[str]],
        deadlines: Deadlines,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Store the arguments. Events are read for the uids that `reporters` returns."""
        self._api, self._kind = api, kind
        self._reporters = reporters
        self._deadlines = deadlines
        self._clock = clock
        self._look_at = clock() + LOOK_SECONDS
        self._logged: set[str] = set()
        self.newest = ""

    def final(self) -> str:
        """Return why a job that has not run can never get its pods, or an empty string."""
        if self._clock() < self._look_at:
            return ""
        self._look_at = self._clock() + LOOK_SECONDS
        try:
            found = [each for uid in self._reporters() for each in _events(self._api, uid)]
        except (RefusedError, UnreachableError) as error:
            log.debug("the events of the job cannot be read: %s", error)
            return ""
        if found:
            self._deadlines.take_up()
        messages = [str(each.get("message")) for each in found if each.get("reason") in _REFUSALS]
        if not messages:
            self.newest = ""
            return ""
        newest = self.newest = " ".join(messages[-1].split())
        if is_final(newest) and not self._deadlines.has_run:
            return newest
        # Ignore names and numbers, which differ between attempts.
        key = re.sub(r'"[^"]*"|\d+', "", newest)
        if key not in self._logged:
            self._logged.add(key)
            log.warning("the %s cannot create all pods yet: %s", self._kind.controller, newest)
        return ""

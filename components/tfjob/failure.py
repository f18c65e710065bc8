"""The report of a failure in one line: which task, how it ended, what it and Kubernetes said."""

from __future__ import annotations

from collections.abc import Iterable

from components.tfjob.api import Api, RefusedError, Tree, UnreachableError
from components.tfjob.state import Ended
from trainer.errors import FAILED, USAGE

LAST_EVENTS = 3


class Reporter:
    """Writes reports; what needs a permission that is missing is left out, and said so once."""

    def __init__(self, api: Api) -> None:
        """Ask nothing yet."""
        self._api = api

    def of_task(self, ended: Ended, tail: Iterable[str]) -> str:
        """Return the report of a task that ended badly."""
        if ended.code in (FAILED, USAGE) and ended.words:
            return f"{ended.words} ({ended.task}, pod {ended.pod})"
        said = f"{ended.task} ended with {ended.cause}"
        lines = " | ".join(tail) or ended.words
        last = f"; its last lines: {lines}" if lines and ended.code is not None else ""
        return f"{said} (pod {ended.pod}){self.events(ended.pod)}{last}"

    def events(self, about: str) -> str:
        """Return the last events about an object, or nothing."""
        try:
            found = sorted(self._api.events(about), key=_time)[-LAST_EVENTS:]
        except UnreachableError:
            return ""
        except RefusedError as error:
            if error.is_forbidden:
                return "; its events may not be read with these permissions"
            return ""
        said = (f"{each.get('reason')}: {each.get('message')}" for each in found)
        text = " ".join(" | ".join(said).split())
        return f"; last events: {text}" if text else ""


def _time(event: Tree) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or "")

"""How far training has come, from what the leading task writes to its log."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from typing import Any

from trainer import events

log = logging.getLogger(__name__)
_MARK = '{"event": '
# Where no command line follows the events, a line of progress comes at most so often.
LINE_SECONDS = 10.0


class Progress:
    """Passes the events of the leading task on, and tells when training has moved."""

    def __init__(self, moved: Callable[[], None]) -> None:
        """Take what to call when the global step has grown."""
        self._moved = moved
        self._step = -1
        self._line_at = -LINE_SECONDS

    def take(self, text: str) -> None:
        """Look at one line of the log."""
        event = _event(text)
        if event is None:
            return
        fields = {key: value for key, value in event.items() if key not in ("event", "time")}
        step = fields.get("global_step")
        if isinstance(step, int) and step != self._step:
            self._step = step
            self._moved()
        if os.environ.get(events.VARIABLE):
            events.emit(event["event"], **fields)
        elif event["event"] == "progress":
            self._say(fields)

    def _say(self, fields: dict[str, Any]) -> None:
        if time.monotonic() - self._line_at < LINE_SECONDS:
            return
        self._line_at = time.monotonic()
        log.info(
            "global step %s/%s  loss %.4f  %.0f steps/s  %.0f s left",
            *(fields.get(key, 0) for key in _SHOWN),
        )


_SHOWN = ("global_step", "steps", "loss", "steps_per_second", "seconds_left")


# What a task may tell, with what whoever follows relies on; any other text is just a line.
_PASSED_ON: dict[str, set[str]] = {
    "life": {"global_step", "steps", "resumed"},
    "progress": set(_SHOWN),
    "checkpoint": {"uri", "global_step"},
    "checkpoint_passed_over": {"uri", "reason"},
}


def _event(text: str) -> dict[str, Any] | None:
    at = text.find(_MARK)
    if at < 0:
        return None
    try:
        tree = json.loads(text[at:])
    except ValueError:
        return None
    needed = _PASSED_ON.get(str(tree.get("event"))) if isinstance(tree, dict) else None
    return tree if needed is not None and needed <= tree.keys() else None

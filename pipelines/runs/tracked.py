"""A run on this machine in MLflow: the process that follows its events is the one that writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pipelines.runs.outcome import RunResult
from trainer.config.schema import Config
from trainer.events import Event
from trainer.tracking import tracker
from trainer.tracking.pending import ended

_STATUS = {"failed": "FAILED", "interrupted": "KILLED"}


class Tracked:
    """What a run says, passed on to who asked for it and to the tracker, where there is one."""

    def __init__(
        self,
        config: Config,
        run_id: str,
        history: Path,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        """Begin with what the file `history` says of earlier starts of the run."""
        self._on_event = on_event
        self._tracker = tracker.of_local_run(config, run_id, history)

    def hear(self, event: Event) -> None:
        """Pass one event on."""
        if self._tracker:
            self._tracker.hear(event)
        if self._on_event:
            self._on_event(event)

    def end(self, result: RunResult) -> RunResult:
        """Write how the run ended, which takes seconds at most; return the same."""
        if self._tracker:
            status = _STATUS.get(result.status, "FINISHED")
            self._tracker.close(ended(status, result.message, result.status))
        return result

"""The evaluator of a local cluster: started again when it dies, and never a reason to end a run."""

from __future__ import annotations

from contextlib import suppress

from trainer import events
from trainer.cluster import Task
from trainer.errors import DONE
from trainer.task_process import OVER, End, TaskProcess, report

EVALUATOR = Task(role="evaluator", index=0)
# One that cannot live is given up; its restarts are none of `cluster.max_restarts`.
MOST_RESTARTS = 20


class EvaluatorCare:
    """What becomes of the evaluator, if there is one."""

    def __init__(self, process: TaskProcess | None) -> None:
        """Take care of `process`."""
        self._process = process
        self._restarts = 0
        self.running = False

    def begin(self) -> TaskProcess | None:
        """Return what is to be started at first."""
        if self._process:
            # What cannot be removed there cannot be started there either, which says so.
            with suppress(OSError):
                (self._process.folder / OVER).unlink()
            self.running = True
        return self._process

    def ended(self, end: End) -> TaskProcess | None:
        """Take its end in; return what is to be started again."""
        process = self._process
        if process is None or end.code == DONE:
            self.running = False
            return None
        if end.is_final or self._restarts >= MOST_RESTARTS:
            self.running = False
            report(process, end)
            return None
        self._restarts += 1
        events.emit("restart", task=str(process.task), cause=end.cause, restarts=self._restarts)
        return process

    def give_up(self, reason: str) -> None:
        """Go on without it."""
        self.running = False
        events.emit("evaluator_left", reason=reason)

    def training_is_over(self) -> None:
        """Tell it that no checkpoint will follow."""
        # On a full disk it is not told; the wait for it has an end.
        if self._process:
            with suppress(OSError):
                (self._process.folder / OVER).touch()

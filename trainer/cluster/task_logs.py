"""Follow the logs of the tasks of this machine, to be lines of the launcher's own log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainer import events
from trainer.background import Loop
from trainer.cluster.event_lines import LogLines
from trainer.cluster.process import LOG
from trainer.errors import UserError

log = logging.getLogger(__name__)
# A file sends no event when it grows.
_LOOK_SECONDS = 0.5
# Takes the name of a task and a line of its log.
LineSink = Callable[[str, str], None]


class TaskLogs:
    """The logs below a folder, each line once; `traceback` is of the user's code, or empty."""

    def __init__(self, workdir: Path, sink: LineSink) -> None:
        """Begin behind what earlier attempts have left there."""
        self.traceback = ""
        self._sink = sink
        self._workdir = workdir
        self._lines = LogLines()
        self._positions = {path: path.stat().st_size for path in self._logs()}

    def take(self) -> None:
        """Take what is new: events are logged in words, any other line goes to the sink."""
        for path in self._logs():
            # Its folder can be removed while it is read.
            with suppress(OSError):
                for line in self._new(path):
                    self._pass_on(path.parent.name, line)

    def _logs(self) -> list[Path]:
        return sorted(self._workdir.glob(f"*/{LOG}"))

    def _new(self, path: Path) -> Iterator[str]:
        with path.open("rb") as file:
            file.seek(self._positions.get(path, 0))
            for line in file:
                # Of a line that is not complete yet the rest comes with the next look.
                if line.endswith(b"\n"):
                    self._positions[path] = file.tell()
                    yield line.decode("utf-8", errors="replace").rstrip("\n")

    def _pass_on(self, task: str, line: str) -> None:
        event = events.parse(line)
        if isinstance(event, events.UserCodeFailed):
            self.traceback = event.traceback
        if not event:
            self._sink(task, line)
        elif words := self._lines.take(event):
            log.info("%s", words)


@contextmanager
def relayed(workdir: Path, sink: LineSink) -> Iterator[None]:
    """Pass on the logs of the tasks below `workdir` until the block ends, to their last line."""
    logs = TaskLogs(workdir, sink)
    follower = Loop(
        logs.take, _LOOK_SECONDS, name="task logs", failing="logs of tasks are not followed"
    ).start()
    try:
        try:
            yield
        finally:
            follower.stop()
            follower.join()
            logs.take()
    except UserError as error:
        error.traceback = error.traceback or logs.traceback
        raise

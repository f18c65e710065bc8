"""The first process of every pod: lays out the configuration, runs the task, heeds its signals.

    python -m components.tfjob.guard -- python -m trainer task ...

Beside the leading task it watches the launcher's heartbeat on the job. When the sign stands still,
training ends with a last checkpoint and the job with it. An API that does not answer is no sign of
a launcher that is gone: only time in which the sign could be read, and was the same, counts.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType

from components.tfjob import names
from components.tfjob.manifest import CONFIG_FILE, CONFIG_VARIABLE, LAUNCHER_VARIABLE
from components.tfjob.shutdown import NOTICE_SECONDS, ShutdownConnection, ShutdownServer
from trainer.cluster import termination
from trainer.errors import FAILED, USAGE, UserError
from trainer.topology import Cluster, Task, from_tf_config, leader

log = logging.getLogger(__name__)
# How often the sign is read before the launcher is given up.
LOOKS = 10
# A task that does not end by itself when it is asked to.
END_SECONDS = 110.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class HeartbeatAge:
    """How long a sign has stood still, in seconds during which it could be read."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Take a clock that only grows."""
        self._clock = clock
        self._sign = ""
        self._read_at: float | None = None
        self._seconds = 0.0

    def read(self, sign: str) -> float:
        """Take the sign as it is, and return how long it has stood still."""
        now = self._clock()
        if sign != self._sign:
            self._sign, self._seconds = sign, 0.0
        elif self._read_at is not None:
            self._seconds += now - self._read_at
        self._read_at = now
        return self._seconds

    def unreadable(self) -> None:
        """The sign cannot be read: the time until it can does not count."""
        self._read_at = None


class Guard:
    """One task, and the end of it."""

    def __init__(self, command: list[str], environment: Mapping[str, str]) -> None:
        """Start the task."""
        self._abandoned = ""
        self._process = subprocess.Popen(command, env=dict(environment))

    def pass_on(self, number: int) -> None:
        """Hand a signal to the task."""
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    def abandon(self, why: str) -> None:
        """End the task with a last checkpoint, and this guard with a code that ends the job."""
        self._abandoned = why
        self.pass_on(signal.SIGTERM)
        killer = threading.Timer(END_SECONDS, self.pass_on, (signal.SIGKILL,))
        killer.daemon = True
        killer.start()

    def wait(self) -> int:
        """Return the exit code of the task: 128 and its number for a signal."""
        code = self._process.wait()
        if self._abandoned:
            folder = Path.cwd()
            termination.leave(folder, f"{self._abandoned}; {termination.read(folder)}")
            return FAILED
        return code if code >= 0 else 128 - code

    @property
    def abandoned(self) -> bool:
        """Whether the launcher was given up."""
        return bool(self._abandoned)


def main(arguments: list[str]) -> int:
    """Run the command after `--`, and return its exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    if arguments[:1] != ["--"] or not arguments[1:]:
        sys.stderr.write("guard: write it as: python -m components.tfjob.guard -- COMMAND\n")
        return USAGE
    environment = dict(os.environ)
    config = environment.pop(CONFIG_VARIABLE, "")
    try:
        if config:
            Path(CONFIG_FILE).write_text(config, encoding="utf-8")
        guard = Guard(arguments[1:], environment)
    except OSError as error:
        what = error.filename or arguments[1]
        sys.stderr.write(f"guard: cannot begin in {Path.cwd()}: {what}: {error.strerror}\n")
        return FAILED
    tasks, this = _place(environment.get("TF_CONFIG", ""))
    leads = tasks is not None and this == leader(tasks)
    _heed_signals(guard, tasks, this)
    watched = json.loads(environment.get(LAUNCHER_VARIABLE) or "{}") if leads else {}
    if watched:
        threading.Thread(target=_watch, args=(guard, watched), daemon=True).start()
    code = guard.wait()
    if guard.abandoned:
        _delete(watched)
    return code


def _place(tf_config: str) -> tuple[Cluster, Task] | tuple[None, None]:
    """Return the cluster and this task; nothing where the task itself will say what is wrong."""
    try:
        return from_tf_config(tf_config)
    except UserError:
        return None, None


def _heed_signals(guard: Guard, tasks: Cluster | None, this: Task | None) -> None:
    """Pass signals on; from a server only when its leader has ended."""
    tell: Callable[[], None] = lambda: None  # noqa: E731
    if tasks is not None and this == leader(tasks):
        tell = ShutdownServer().ending
    elif tasks is not None and this is not None and this.role in ("ps", "worker"):
        host, _, _ = tasks.address(leader(tasks)).rpartition(":")
        _hold(guard, ShutdownConnection(host))
        return

    def pass_on(number: int, _frame: FrameType | None) -> None:
        tell()
        guard.pass_on(number)

    for number in _SIGNALS:
        signal.signal(number, pass_on)


def _hold(guard: Guard, tether: ShutdownConnection) -> None:
    def end() -> None:
        tether.wait(NOTICE_SECONDS, END_SECONDS)
        guard.pass_on(signal.SIGTERM)

    def ask(_number: int, _frame: FrameType | None) -> None:
        threading.Thread(target=end, daemon=True).start()

    for number in _SIGNALS:
        signal.signal(number, ask)


def _watch(guard: Guard, place: Mapping[str, str]) -> None:
    # The client of the API takes a while to import, which nothing has to wait for.
    from components.tfjob.client import Api, RefusedError, UnreachableError, connect

    limit = float(place["seconds"])
    standing = HeartbeatAge()
    try:
        api = Api(connect(), place["namespace"])
    except UserError as error:
        log.warning("the launcher is not watched: %s", error)
        return
    while True:
        try:
            meta = api.get_job(place["job"])["metadata"]
            sign = meta.get("annotations", {}).get(names.HEARTBEAT, "")
            if not sign:
                log.info("the job has no heartbeat: its launcher is not watched")
                return
            if standing.read(sign) >= limit:
                why = f"the launcher has given no sign of life for {limit:g} s"
                log.warning("%s: training ends", why)
                guard.abandon(why)
                return
        except RefusedError as error:
            log.warning("the launcher is not watched: %s", error)
            return
        except UnreachableError:
            standing.unreadable()
        time.sleep(limit / LOOKS)


def _delete(place: Mapping[str, str]) -> None:
    """Delete the job if that is allowed; its failed leader ends it otherwise."""
    from components.tfjob.client import Api, RefusedError, UnreachableError, connect

    with suppress(UserError, RefusedError, UnreachableError):
        Api(connect(), place["namespace"]).delete_job(place["job"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

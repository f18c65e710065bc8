"""The numbers of running tasks and of restarts in the cluster.

The leading task probes the port of each other task every two seconds, or less often if there are
more than 64. Loading TensorFlow takes seconds, so hardly any restart is missed. Restarts of
the leading task, and of forked tasks in a local run, are counted in files in the tasks' folders.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from flotilla.trainer.cluster.liveness import Peers, probe_peers
from flotilla.trainer.cluster.process import STARTS
from flotilla.trainer.config.topology import Cluster, Task

FILE = "restarts.json"
# The pause between two rounds of probes, in seconds (longer if there are many tasks), and the
# maximum number of tasks to probe per second.
PAUSE_SECONDS, TASKS_PER_SECOND = 2.0, 32
# Timeout of the last probe, in seconds. This probe shows which task has ended the attempt.
LAST_SECONDS = 1.0
Counts = Mapping[str, int]
log = logging.getLogger(__name__)


class TaskWatch:
    """Counts the responding tasks and the restarts of each role."""

    def __init__(
        self,
        cluster: Cluster,
        this: Task,
        folder: Path,
        report: Callable[[Counts, Counts, Counts], None],
    ) -> None:
        """Watch from `this`. `report` gets the numbers of running tasks, all tasks and restarts."""
        self._cluster, self._this, self._report = cluster, this, report
        # Make the path absolute, because this process changes its working directory later.
        self._file = folder.absolute() / FILE
        self._tasks = [
            Task(role=role, index=index)
            for role, hosts in cluster.addresses.items()
            for index in range(len(hosts))
        ]
        self._expected = Counter(task.role for task in self._tasks)
        self._restarts: Counter[str] = Counter()
        # The restarts that the launcher has counted, if known.
        self._started_again: Counter[str] | None = None
        # The tasks that have ever responded, and those of them that did not respond in the last
        # round.
        self._seen, self._lost = set[str](), set[str]()
        self._over = threading.Event()
        self._once = threading.Lock()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch during this block, and probe once more if an error ends it."""
        self._add_earlier_counts()
        self._report({self._this.role: 1}, self._expected, self._count_restarts())
        threading.Thread(target=self._watch, name="metrics-tasks", daemon=True).start()
        try:
            yield
        except BaseException:
            self._over.set()
            with suppress(Exception):
                self.look(LAST_SECONDS)
            raise
        finally:
            self._over.set()

    def look(self, timeout: float | None = None) -> None:
        """Probe all tasks once, and report the result."""
        with self._once:
            self.note(
                probe_peers(self._cluster, self._this, timeout)
                if timeout
                else probe_peers(self._cluster, self._this)
            )

    def note(self, peers: Peers) -> None:
        """Process the result of one round of probes."""
        absent = {str(task) for task in (*peers.silent, *peers.gone)}
        alive = [task for task in self._tasks if str(task) not in absent]
        before = (set(self._seen), set(self._lost))
        for task in alive:
            if str(task) in self._lost:
                self._restarts[task.role] += 1
        here = {str(task) for task in alive}
        self._seen |= here
        self._lost = self._seen - here
        if (self._seen, self._lost) != before:
            self._keep()
        self._report(Counter(task.role for task in alive), self._expected, self._count_restarts())

    def _count_restarts(self) -> Counter[str]:
        self._started_again = self._read_launcher() or self._started_again
        return self._started_again or self._restarts

    def _read_launcher(self) -> Counter[str] | None:
        found = Counter[str]()
        try:
            for task in self._tasks:
                at = self._file.parents[1] / str(task) / STARTS
                found[task.role] += int(at.read_text(encoding="ascii")) - 1
        except (OSError, ValueError):
            return None
        return found

    def _watch(self) -> None:
        pause = max(PAUSE_SECONDS, len(self._tasks) / TASKS_PER_SECOND)
        while not self._over.is_set():
            try:
                self.look()
            except Exception as error:
                log.warning(
                    "can no longer count the tasks of the cluster: %s",
                    error,
                )
                return
            self._over.wait(pause)

    def _add_earlier_counts(self) -> None:
        """Add the counts of earlier attempts of this task under the same launcher."""
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            kept = json.loads(self._file.read_text(encoding="utf-8"))
            if kept["launcher"] == _launcher():
                self._restarts.update({str(k): int(n) for k, n in kept["restarts"].items()})
                self._seen, self._lost = set(kept["seen"]), set(kept["lost"])
                self._restarts[self._this.role] += 1
        self._keep()

    def _keep(self) -> None:
        kept = {
            "launcher": _launcher(),
            "restarts": dict(self._restarts),
            "seen": sorted(self._seen),
            "lost": sorted(self._lost),
        }
        # If the disk is full, the next attempt starts counting at zero.
        with suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text(json.dumps(kept), encoding="utf-8")


def _launcher() -> str:
    parent = os.getppid()
    with suppress(OSError, IndexError):
        # According to proc(5), the name of the program is in parentheses and may contain spaces.
        fields = Path(f"/proc/{parent}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return f"{parent} {fields[19]}"
    return str(parent)

"""How many tasks of the cluster are alive, and how often one has begun again.

The leading task asks each other one on its port, every two seconds: a task that has died takes that
long to load TensorFlow. For itself, and for the forked tasks of a local run, files in the folders
of the tasks count the starts.
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
# The pause between two rounds; of many tasks it is longer, so that this many are asked a second.
PAUSE_SECONDS, TASKS_PER_SECOND = 2.0, 32
# At the end of an attempt, to see what has ended it.
LAST_SECONDS = 1.0
Counts = Mapping[str, int]
log = logging.getLogger(__name__)


class TaskWatch:
    """Counts the tasks that answer, and those that have begun again, by role."""

    def __init__(
        self,
        cluster: Cluster,
        this: Task,
        folder: Path,
        report: Callable[[Counts, Counts, Counts], None],
    ) -> None:
        """Watch from the task `this`; `report` gets the living, all, and the restarts."""
        self._cluster, self._this, self._report = cluster, this, report
        # This process changes into its folder.
        self._file = folder.absolute() / FILE
        self._tasks = [
            Task(role=role, index=index)
            for role, hosts in cluster.addresses.items()
            for index in range(len(hosts))
        ]
        self._expected = Counter(task.role for task in self._tasks)
        self._restarts: Counter[str] = Counter()
        # By the launcher, where that says so.
        self._started_again: Counter[str] | None = None
        # Those that have answered before, and of them those that did not the last time.
        self._seen, self._lost = set[str](), set[str]()
        self._over = threading.Event()
        self._once = threading.Lock()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch in this block, and look once more where an error ends it."""
        self._begin_again()
        self._report({self._this.role: 1}, self._expected, self._counted())
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
        """Ask all tasks once, and report."""
        with self._once:
            self.note(
                probe_peers(self._cluster, self._this, timeout)
                if timeout
                else probe_peers(self._cluster, self._this)
            )

    def note(self, peers: Peers) -> None:
        """Count what one round has found."""
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
        self._report(Counter(task.role for task in alive), self._expected, self._counted())

    def _counted(self) -> Counter[str]:
        """Return how often tasks have begun again; it becomes no less while a count is written."""
        self._started_again = self._of_launcher() or self._started_again
        return self._started_again or self._restarts

    def _of_launcher(self) -> Counter[str] | None:
        """Return how often the launcher has started tasks again; None where it does not say so."""
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
                log.warning("the tasks of the cluster are not counted: %s", error)
                return
            self._over.wait(pause)

    def _begin_again(self) -> None:
        """Take over the counts of this task's earlier attempts under the same launcher."""
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
        # On a full disk the counts begin again with the next attempt.
        with suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text(json.dumps(kept), encoding="utf-8")


def _launcher() -> str:
    """Return what differs for another launcher: its process, and when that was started."""
    parent = os.getppid()
    with suppress(OSError, IndexError):
        # proc(5): the name of the program, in brackets, may have spaces in it.
        fields = Path(f"/proc/{parent}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return f"{parent} {fields[19]}"
    return str(parent)

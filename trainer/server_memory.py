"""What lives of a chief leave behind in the servers, and when a server has to begin anew for it.

TensorFlow's servers outlive a chief and keep what its graphs needed: a parameter server tens of
megabytes a life, a worker a hundred and more. A server that would grow by more than `MOST_GROWTH`
is renewed when a chief begins again, which costs no step: the chief reads its variables from a
checkpoint then, and loads TensorFlow as long as the server does.
"""

from __future__ import annotations

from trainer.cluster import Task
from trainer.task_process import TaskProcess

# Share by which a server's memory may grow over what it was at the end of its first chief's life.
MOST_GROWTH = 0.25


class ServerMemory:
    """The resident memory of servers at each end of a chief's life."""

    def __init__(self) -> None:
        """Begin with the first life."""
        self._first: dict[Task, int] = {}
        self._last: dict[Task, int] = {}

    def renew_grown(self, chief: TaskProcess, servers: list[TaskProcess]) -> None:
        """End those servers of which another life of a chief would make too much.

        Args:
            chief: whose life has ended, and which is not yet started again.
            servers: those that may have served it.
        """
        for server in servers:
            now = server.resident_bytes()
            renewed = server.task in self._first and server.task not in self._last
            # One that was started meanwhile, for another reason, has not served for a whole life.
            if not now or (server.started_at > chief.started_at and not renewed):
                continue
            first = self._first.setdefault(server.task, now)
            growth = max(0, now - self._last.get(server.task, now))
            self._last[server.task] = now
            if now + growth > (1 + MOST_GROWTH) * first:
                del self._last[server.task]
                server.kill_grown(first, now)

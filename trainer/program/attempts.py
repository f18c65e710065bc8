"""The attempts of a program, and how its workers start together.

If there are neither a chief nor parameter servers, all workers start together, or none does. Each
worker except the leader writes a new ticket next to the checkpoints when it starts. The leader
starts an attempt when each of these workers has a ticket that the previous attempt did not use. It
then writes the checkpoint and these tickets to a file, so that no two tasks ever start from
different checkpoints. A worker whose ticket is not in the file waits. The leader restarts if it
finds a new ticket of a worker, and a worker restarts if it finds a new attempt.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from flotilla.trainer import storage
from flotilla.trainer.cluster.launcher import Job
from flotilla.trainer.config.topology import Task
from flotilla.trainer.runtime.errors import ClusterLostError
from flotilla.trainer.runtime.json_records import read_record

FOLDER, FILE = "program", "attempt.json"
# Polling intervals in seconds. Polling is needed, because a store sends no notifications.
LOCAL_SECONDS, REMOTE_SECONDS = 0.5, 3.0


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """An attempt: the checkpoint that it starts from, and the tickets of its workers."""

    number: int
    checkpoint: str = ""
    tickets: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """The file that a worker writes when it waits for an attempt."""

    ticket: str


class Attempts:
    """Starts, joins and checks the attempts of a run on behalf of one task."""

    def __init__(self, job: Job, this: Task, others: Sequence[Task]) -> None:
        """Store the run and `others`, the workers other than the leader."""
        self._folder = storage.join(job.checkpoints, FOLDER)
        self._this, self._others = str(this), [str(each) for each in others]
        self.seconds = LOCAL_SECONDS if storage.local_path(self._folder) else REMOTE_SECONDS
        self.current = Attempt(number=0)

    def lead(self, checkpoint: str, wait: Callable[[float], None]) -> Attempt:
        """Wait until all workers have new tickets, then start an attempt. Raises `UserError`."""
        before = self._read() or Attempt(number=0)
        gathering = Attempt(number=before.number + 1)
        if self._others:
            # Tell workers that are still running the previous attempt that it has ended.
            self._write(FILE, gathering)
        tickets: dict[str, str] = {}
        while len(tickets) < len(self._others):
            tickets = self._read_tickets(set(before.tickets.values()))
            if len(tickets) < len(self._others):
                wait(self.seconds)
        self.current = Attempt(number=gathering.number, checkpoint=checkpoint, tickets=tickets)
        self._write(FILE, self.current)
        return self.current

    def join(self, wait: Callable[[float], None]) -> Attempt:
        """Write a new ticket, and wait for an attempt that lists it. Raises `UserError`."""
        own = Ticket(ticket=secrets.token_hex(8))
        self._write(f"{self._this}.json", own)
        while True:
            found = self._read()
            if found and found.tickets.get(self._this) == own.ticket:
                self.current = found
                return found
            wait(self.seconds)

    def check(self) -> None:
        """Raise `ClusterLostError` if a new attempt began or, for a leader, a worker restarted."""
        if self._this in self.current.tickets:
            found = self._read()
            if found and found.number != self.current.number:
                raise ClusterLostError("a new attempt has begun; this worker restarts to join it")
            return
        there = self._read_tickets(set())
        for name, ticket in self.current.tickets.items():
            if there.get(name, ticket) != ticket:
                raise ClusterLostError(f"{name} was restarted, so all workers restart")

    def _read(self) -> Attempt | None:
        try:
            return read_record(Attempt, storage.read_bytes(storage.join(self._folder, FILE)))
        except storage.Missing:
            return None

    def _read_tickets(self, used: set[str]) -> dict[str, str]:
        found = {}
        for name in self._others:
            try:
                data = storage.read_bytes(storage.join(self._folder, f"{name}.json"))
            except storage.Missing:
                continue
            ticket = read_record(Ticket, data)
            if ticket and ticket.ticket not in used:
                found[name] = ticket.ticket
        return found

    def _write(self, name: str, record: Attempt | Ticket) -> None:
        data = json.dumps(asdict(record)).encode()
        storage.write_bytes(storage.join(self._folder, name), data)

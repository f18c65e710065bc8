"""The attempts of a program whose workers all lead: they begin together, or not at all.

Each worker that starts writes a new ticket next to the checkpoints. The leader begins an attempt
when every worker has a ticket that no attempt had, and names these tickets and the checkpoint: no
two tasks ever begin from different checkpoints. A worker that is not named waits. The leader that
sees another ticket begins again, and so does a worker that sees another attempt.
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
# A store sends no event.
LOCAL_SECONDS, REMOTE_SECONDS = 0.5, 3.0


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """An attempt: the checkpoint that it begins from, and the tickets of its workers."""

    number: int
    checkpoint: str = ""
    tickets: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """What a worker that waits for an attempt writes."""

    ticket: str


class Attempts:
    """The attempts of one run, as the task `this` takes part in them."""

    def __init__(self, job: Job, this: Task, others: Sequence[Task]) -> None:
        """Take the run, and the workers besides the leader."""
        self._folder = storage.join(job.checkpoints, FOLDER)
        self._this, self._others = str(this), [str(each) for each in others]
        self.seconds = LOCAL_SECONDS if storage.local_path(self._folder) else REMOTE_SECONDS
        self.current = Attempt(number=0)

    def lead(self, checkpoint: str, wait: Callable[[float], None]) -> Attempt:
        """Begin an attempt from a checkpoint, when all workers wait for it; raises `UserError`."""
        before = self._read() or Attempt(number=0)
        gathering = Attempt(number=before.number + 1)
        if self._others:
            # Tell workers that still run the previous attempt that it has ended.
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
        """Wait for an attempt that names this worker; raises `UserError`."""
        own = Ticket(ticket=secrets.token_hex(8))
        self._write(f"{self._this}.json", own)
        while True:
            found = self._read()
            if found and found.tickets.get(self._this) == own.ticket:
                self.current = found
                return found
            wait(self.seconds)

    def check(self) -> None:
        """Raise `ClusterLostError` if the attempt of this task is over."""
        if self._this in self.current.tickets:
            found = self._read()
            if found and found.number != self.current.number:
                raise ClusterLostError("another attempt begins: this worker begins again with it")
            return
        there = self._read_tickets(set())
        for name, ticket in self.current.tickets.items():
            if there.get(name, ticket) != ticket:
                raise ClusterLostError(f"{name} was started again: all workers begin again")

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

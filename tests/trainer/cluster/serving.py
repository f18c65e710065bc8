"""A fork server for tests, and requests to it."""

import json
import os
import secrets
import select
import socket
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

from flotilla.trainer.cluster import forks
from flotilla.trainer.cluster.forks import Request
from flotilla.trainer.runtime import signals

SECONDS = 120
PROGRAM = "tests.trainer.cluster.program"
LOADED = "json"


@dataclass(kw_only=True)
class Serving:
    """A fork server: its process, and the addresses of its two servers."""

    process: subprocess.Popen
    first: str
    second: str


@contextmanager
def serving(folder, at_once=LOADED, later="", **environment):
    """Run a server in this block; requests wait until it has started."""
    name = f"test-{secrets.token_hex(8)}"
    sockets = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(2)]
    for each, address in zip(sockets, (name, f"{name}.tf"), strict=True):
        each.bind(f"\0{address}")
        each.listen(forks.BACKLOG)
    numbers = [each.fileno() for each in sockets]
    names = ":".join(map(str, numbers))
    process = subprocess.Popen(
        [sys.executable, "-m", forks.__name__, str(folder), names, at_once, later],
        env={**os.environ, **signals.parent_environment(), **environment},
        stdin=subprocess.PIPE,
        pass_fds=numbers,
    )
    for each in sockets:
        each.close()
    try:
        # A run starts a process by itself after this timeout; a test waits longer.
        with patch.object(forks, "_SECONDS", SECONDS):
            yield Serving(process=process, first=name, second=f"{name}.tf")
    finally:
        process.stdin.close()
        process.wait(SECONDS)


@dataclass(kw_only=True)
class Asked:
    folder: str
    loaded: str = LOADED
    arguments: tuple = ()
    environment: dict = field(default_factory=dict)

    def __post_init__(self):
        self._read, self._write = os.pipe()
        self.output, self._output = os.pipe()
        number = forks.high(self._read)
        self.wanted = Request(
            command=[sys.executable, "-m", PROGRAM, str(number), *self.arguments],
            loaded=self.loaded,
            folder=str(self.folder),
            environment={**os.environ, **self.environment},
            own_session=True,
            descriptors=(number,),
        )
        self._read = number

    @contextmanager
    def descriptors(self):
        """Yield the output descriptor; afterwards, close those that only the process needs."""
        try:
            yield self._output
        finally:
            os.close(self._output)
            os.close(self._read)

    def fork(self, address):
        with self.descriptors() as output:
            return forks.fork(address, self.wanted, output)

    def says(self):
        with os.fdopen(self.output) as lines:
            return json.loads(lines.readline())

    def end(self, code):
        os.write(self._write, bytes([code]))
        os.close(self._write)


def has_ended(descriptor):
    return bool(select.select([descriptor], [], [], SECONDS)[0])

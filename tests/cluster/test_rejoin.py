"""Tasks that come back at another address, under the name that they had."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cluster.pods import CHIEF, pods, why_not
from trainer import storage
from trainer.checkpoints.index import newest_checkpoint
from trainer.cluster import signals
from trainer.events import AttemptBegin, Progress
from trainer.strategies.turns import TURN
from trainer.topology import Cluster, Task

pytestmark = pytest.mark.cluster

NAME = "pod.fleet.test"
# gRPC's own interval between two resolutions is 30 s, and an attempt to connect at most 20 s.
CEILING = 25
MOUNTED = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
EVERY = 500
CONFIG = {
    "training": {"steps": 10**7, "checkpoint_every": EVERY, "validate_every": 0},
    "cluster": {"parameter_servers": 1, "workers": 2},
}
ROLES = {"ps": 1, "worker": 2, "chief": 1}
PS, WORKER = Task(role="ps", index=0), Task(role="worker", index=1)


class Relay:
    """Listens at one address, and passes connections on to a port of 127.0.0.1."""

    def __init__(self, address: str, port: int, target: int) -> None:
        self._target = target
        self._sockets = [socket.create_server((address, port))]
        self.port = self._sockets[0].getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Close it and all connections, as the end of a process does."""
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                caller, _ = self._sockets[0].accept()
                self._sockets.append(caller)
                try:
                    called = socket.create_connection(("127.0.0.1", self._target))
                except OSError:
                    # Not there yet: the caller tries again.
                    caller.close()
                    continue
                self._sockets.append(called)
                for pair in ((caller, called), (called, caller)):
                    threading.Thread(
                        target=_pass_on, args=(*pair, self._passing()), daemon=True
                    ).start()

    def _passing(self) -> Callable[[], bool]:
        """Return what says whether data of a connection that begins now is passed on."""
        return lambda: True


def _pass_on(source: socket.socket, target: socket.socket, is_passed: Callable[[], bool]) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            if is_passed():
                target.sendall(data)


def _can_mount() -> bool:
    """Say whether a process may have a file of hosts of its own."""
    if sys.platform != "linux" or not shutil.which("unshare"):
        return False
    tried = subprocess.run(
        [*MOUNTED, "mount --bind /etc/hosts /etc/hosts"], capture_output=True, check=False
    )
    return tried.returncode == 0


def _said(
    process: subprocess.Popen[str], log: Path, ceiling: float | None = None
) -> dict[str, int]:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], ceiling)
    line = process.stdout.readline() if ready else ""
    assert line, log.read_text(encoding="utf-8")[-3000:]
    found: dict[str, int] = json.loads(line)
    return found


@pytest.fixture
def server(tmp_path, port):
    """Return the port of a TensorFlow server."""
    alone = Cluster(addresses={"worker": (f"127.0.0.1:{port}",)})
    settings = {
        **os.environ,
        **signals.parent_environment(),
        "TF_CONFIG": alone.tf_config(Task(role="worker", index=0)),
    }
    with (tmp_path / "server.txt").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.server"], env=settings, stdout=log, stderr=log
        )
    yield port
    process.kill()
    process.wait()


@pytest.mark.slow
@pytest.mark.skipif(not _can_mount(), reason="this user may not mount a file of hosts")
def test_a_channel_finds_a_task_at_its_new_address(server, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text(f"127.0.0.2 {NAME}\n", encoding="utf-8")
    relays = [Relay("127.0.0.2", 0, server)]
    asks = f"{sys.executable} -m tests.cluster.asks grpc://{NAME}:{relays[0].port}"
    log = tmp_path / "log.txt"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [*MOUNTED, f"mount --bind '{hosts}' /etc/hosts && exec {asks}"],
            env={**os.environ, **signals.parent_environment(), "GRPC_FAIL_FAST": "use_caller"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        assert _said(process, log)["devices"] > 0
        relays[0].close()
        relays.append(Relay("127.0.0.3", relays[0].port, server))
        hosts.write_text(f"127.0.0.3 {NAME}\n", encoding="utf-8")
        assert process.stdin is not None
        process.stdin.write("again\n")
        process.stdin.flush()
        assert _said(process, log, CEILING)["devices"] > 0
    finally:
        process.kill()
        process.communicate()
        for each in relays:
            each.close()


def _local_steps(event: object) -> int:
    found = event.metrics.get("workers", {}) if isinstance(event, Progress) else {}
    return int(found.get(str(WORKER), {}).get("local_steps", 0))


@pytest.fixture
def running(dataset, tmp_path):
    """Return a run whose tasks are pods, which has a checkpoint."""
    if why := why_not():
        pytest.skip(why)
    with pods(tmp_path, dataset, CONFIG, ROLES) as run:
        run.wait_for(lambda e: isinstance(e, Progress) and e.global_step > EVERY + 50)
        yield run


def _end(run) -> int:
    """Stop the run as a launcher does; return the step of its last checkpoint."""
    run.pods[CHIEF].process.send_signal(signal.SIGTERM)
    assert run.pods[CHIEF].process.wait() == 130, run.log(CHIEF)
    uri, step = newest_checkpoint(run.checkpoints)
    counted = storage.verify(uri).fields["metrics"]["workers"]
    run.attempt_steps = sum(each["local_steps"] for each in counted.values())
    return step


@pytest.mark.slow
def test_a_worker_that_comes_back_at_another_address_trains_again(running):
    before = running.pods[WORKER].address
    gone = running.lose(WORKER)
    # All that it had begun before is over.
    _, other = running.wait_for(lambda e: isinstance(e, Progress), after=gone)
    _, other = running.wait_for(
        lambda e: isinstance(e, Progress) and e.global_step > other.global_step + 10 * TURN,
        after=gone,
    )
    running.wait_for(lambda e: _local_steps(e) > _local_steps(other), after=gone)
    assert running.pods[WORKER].address != before
    step = _end(running)
    assert len([e for _, e in running.seen if isinstance(e, AttemptBegin)]) == 1
    # What was applied of a turn that was under way has no worker.
    assert 0 <= step - running.attempt_steps <= TURN


@pytest.mark.long
def test_after_a_server_has_come_back_at_another_address_an_attempt_begins(running):
    before = running.pods[PS].address
    gone = running.lose(PS)
    _, attempt = running.wait_for(lambda e: isinstance(e, AttemptBegin), after=gone)
    assert attempt.global_step % EVERY == 0
    running.wait_for(lambda e: isinstance(e, Progress), after=gone + 1)
    assert running.pods[PS].address != before
    assert _end(running) == attempt.global_step + running.attempt_steps

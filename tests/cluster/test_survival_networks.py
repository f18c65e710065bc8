"""Tests that a cluster survives tasks with new addresses, and cut connections."""

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from flotilla.trainer import storage
from flotilla.trainer.checkpoints.index import newest_checkpoint
from flotilla.trainer.cluster import liveness
from flotilla.trainer.config.topology import Cluster, Task
from flotilla.trainer.events import AttemptBegin, Progress
from flotilla.trainer.runtime import signals
from flotilla.trainer.runtime.errors import BEGIN_AGAIN
from flotilla.trainer.strategies.async_parameter_server import TURN
from tests.cluster.launched import sections
from tests.cluster.pods import CHIEF, pods, why_not

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

NAME = "pod.fleet.test"
# Maximum time until a reconnection, in seconds. Without Flotilla's settings, gRPC resolves a name
# again only after 30 s, and each of its connection attempts takes up to 20 s.
CEILING = 25
MOUNTED = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
REJOIN_EVERY = 500
CONFIG = sections(10**7, REJOIN_EVERY)
ROLES = {"ps": 1, "worker": 2, "chief": 1}
PS, WORKER = Task(role="ps", index=0), Task(role="worker", index=1)


class Relay:
    """A relay from an address to a port of 127.0.0.1."""

    def __init__(self, address: str, port: int, target: int) -> None:
        self._target = target
        self._sockets = [socket.create_server((address, port))]
        self.port = self._sockets[0].getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Close the relay and all connections, as the kernel does when a process ends."""
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
                    # The address does not exist yet; the caller will try again.
                    caller.close()
                    continue
                self._sockets.append(called)
                for pair in ((caller, called), (called, caller)):
                    threading.Thread(
                        target=_pass_on, args=(*pair, self._passing()), daemon=True
                    ).start()

    def _passing(self) -> Callable[[], bool]:
        """Return a function that tells whether the data of a new connection is relayed."""
        return lambda: True


def _pass_on(source: socket.socket, target: socket.socket, is_passed: Callable[[], bool]) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            if is_passed():
                target.sendall(data)


def _can_mount() -> bool:
    """Return whether a process may mount its own hosts file."""
    if sys.platform != "linux" or not shutil.which("unshare"):
        return False
    tried = subprocess.run(
        [*MOUNTED, "mount --bind /etc/hosts /etc/hosts"], capture_output=True, check=False
    )
    return tried.returncode == 0


@contextmanager
def asking(
    command: list[str], log: Path, **variables: str
) -> Iterator[Callable[[float | None], None]]:
    """Run `tests.cluster.asks` up to its first answer; yield a function that asks again."""
    own = {**signals.parent_environment(), "GRPC_FAIL_FAST": "use_caller", **variables}
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command,
            env={**os.environ, **own},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )

    def require_answer(ceiling: float | None = None) -> None:
        ready, _, _ = select.select([process.stdout], [], [], ceiling)
        line = process.stdout.readline() if ready else ""
        assert line, log.read_text(encoding="utf-8")[-3000:]
        assert json.loads(line)["devices"] > 0

    def ask_again(ceiling: float | None) -> None:
        process.stdin.write("again\n")
        process.stdin.flush()
        require_answer(ceiling)

    try:
        require_answer()
        yield ask_again
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def server(tmp_path, port):
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


@pytest.mark.skipif(not _can_mount(), reason="this user may not mount a file of hosts")
def test_a_channel_finds_a_task_at_its_new_address(server, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text(f"127.0.0.2 {NAME}\n", encoding="utf-8")
    relays = [Relay("127.0.0.2", 0, server)]
    asks = f"{sys.executable} -m tests.cluster.asks grpc://{NAME}:{relays[0].port}"
    command = [*MOUNTED, f"mount --bind '{hosts}' /etc/hosts && exec {asks}"]
    try:
        with asking(command, tmp_path / "log.txt") as ask_again:
            relays[0].close()
            relays.append(Relay("127.0.0.3", relays[0].port, server))
            hosts.write_text(f"127.0.0.3 {NAME}\n", encoding="utf-8")
            ask_again(CEILING)
    finally:
        for each in relays:
            each.close()


def _local_steps(event: object) -> int:
    found = event.metrics.get("workers", {}) if isinstance(event, Progress) else {}
    return int(found.get(str(WORKER), {}).get("local_steps", 0))


@pytest.fixture
def running_of_rejoin(dataset, tmp_path):
    """Yield a run whose tasks are pods and which has a checkpoint."""
    if why := why_not():
        pytest.skip(why)
    with pods(tmp_path, dataset, CONFIG, ROLES) as run:
        run.wait_for(lambda e: isinstance(e, Progress) and e.global_step > REJOIN_EVERY + 50)
        yield run


def _end(run) -> int:
    """Stop the run as a launcher does; return the step of its last checkpoint."""
    run.pods[CHIEF].process.send_signal(signal.SIGTERM)
    assert run.pods[CHIEF].process.wait() == 130, run.log(CHIEF)
    uri, step = newest_checkpoint(run.checkpoints)
    counted = storage.verify(uri).fields["metrics"]["workers"]
    run.attempt_steps = sum(each["local_steps"] for each in counted.values())
    return step


def test_a_worker_that_comes_back_at_another_address_trains_again(running_of_rejoin):
    before = running_of_rejoin.pods[WORKER].address
    gone = running_of_rejoin.lose(WORKER)
    # Wait until all updates that the worker sent before the loss have ended.
    _, other = running_of_rejoin.wait_for(lambda e: isinstance(e, Progress), after=gone)
    _, other = running_of_rejoin.wait_for(
        lambda e: isinstance(e, Progress) and e.global_step > other.global_step + 10 * TURN,
        after=gone,
    )
    running_of_rejoin.wait_for(lambda e: _local_steps(e) > _local_steps(other), after=gone)
    assert running_of_rejoin.pods[WORKER].address != before
    step = _end(running_of_rejoin)
    assert len([e for _, e in running_of_rejoin.seen if isinstance(e, AttemptBegin)]) == 1
    # The updates of an unfinished turn are not counted for any worker.
    assert 0 <= step - running_of_rejoin.attempt_steps <= TURN


@pytest.mark.long
def test_after_a_server_has_come_back_at_another_address_an_attempt_begins(running_of_rejoin):
    before = running_of_rejoin.pods[PS].address
    gone = running_of_rejoin.lose(PS)
    _, attempt = running_of_rejoin.wait_for(lambda e: isinstance(e, AttemptBegin), after=gone)
    assert attempt.global_step % REJOIN_EVERY == 0
    running_of_rejoin.wait_for(lambda e: isinstance(e, Progress), after=gone + 1)
    assert running_of_rejoin.pods[PS].address != before
    assert _end(running_of_rejoin) == attempt.global_step + running_of_rejoin.attempt_steps


CUT_OFF_EVERY, STALL = 500, 10
TIME, TIMEOUT = "grpc.keepalive_time_ms", "grpc.http2.ping_timeout_ms"
# Maximum time until a call ends, in seconds. A call that hangs would last until the test times out.
CUT_OFF_CEILING = 120


def options(seconds: int) -> str:
    """Return Flotilla's channel options, with a keepalive ping after `seconds`."""
    ours = {**liveness.CHANNEL_OPTIONS, TIME: 1000 * seconds, TIMEOUT: 1000 * seconds}
    assert ours.keys() == liveness.CHANNEL_OPTIONS.keys()
    return ",".join(f"{name}={value}" for name, value in ours.items())


class Swallowing(Relay):
    """A relay to a port that can drop all data of its current connections."""

    def __init__(self, target: int) -> None:
        self._lost = threading.Event()
        super().__init__("127.0.0.1", 0, target)

    def lose(self) -> None:
        """Drop all data of the current connections; later connections work."""
        self._lost.set()
        self._lost = threading.Event()

    def _passing(self) -> Callable[[], bool]:
        lost = self._lost
        return lambda: not lost.is_set()


@pytest.fixture
def relay(server):
    made = Swallowing(server)
    yield made
    made.close()


def test_a_call_over_a_connection_that_is_cut_off_ends_and_the_next_one_is_answered(
    relay, tmp_path
):
    command = [sys.executable, "-m", "tests.cluster.asks", f"grpc://127.0.0.1:{relay.port}"]
    # gRPC also pings to probe the bandwidth. The probe is disabled, because it would end the call
    # only if it happened to be in progress.
    channels = {liveness.CHANNELS: f"{options(1)},grpc.http2.bdp_probe=0"}
    with asking(command, tmp_path / "log.txt", **channels) as ask_again:
        relay.lose()
        ask_again(CUT_OFF_CEILING)


def settings_of_cut_off(strategy: str) -> dict[str, object]:
    return sections(10**7, CUT_OFF_EVERY, {"strategy": strategy, "stall_timeout": STALL})


@pytest.fixture
def may_cut():
    if why := why_not():
        pytest.skip(why)


def reached(step):
    return lambda event: isinstance(event, Progress) and event.global_step > step


@pytest.mark.usefixtures("may_cut")
@pytest.mark.long
# gRPC alone would close the connection only after 330 s.
@pytest.mark.timeout(300)
def test_asynchronous_training_goes_on_without_a_machine_that_is_cut_off(dataset, tmp_path):
    # With Flotilla's timeout, the kernel closes the connection after 120 s. The probe of the
    # bandwidth would close it earlier if it happened to be in progress.
    own = {liveness.CHANNELS: "grpc.keepalive_timeout_ms=20000,grpc.http2.bdp_probe=0"}
    with pods(
        tmp_path, dataset, settings_of_cut_off("async_parameter_server"), ROLES, environment=own
    ) as run:
        run.wait_for(reached(CUT_OFF_EVERY + 50))
        run.cut_off(WORKER)
        _, at = run.seen[-1]
        # Keep the connection cut until a boundary has been reached, where all workers are idle.
        run.wait_for(reached(at.global_step + 3 * CUT_OFF_EVERY))
        assert len([e for _, e in run.seen if isinstance(e, AttemptBegin)]) == 1


@pytest.mark.usefixtures("may_cut")
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_token_that_never_arrives_ends_the_attempt_and_no_more(dataset, tmp_path):
    # Only packets from this worker to the server are lost. Other tasks still reach the worker.
    with pods(tmp_path, dataset, settings_of_cut_off("sync_parameter_server"), ROLES) as run:
        run.wait_for(reached(CUT_OFF_EVERY + 50))
        connect = run.cut_off(WORKER, PS)
        while not run.lost:
            assert run.pods[CHIEF].process.wait() == BEGIN_AGAIN, run.log(CHIEF)
        connect()
        _, attempt = run.wait_for(lambda e: isinstance(e, AttemptBegin), after=run.lost[0])
        assert attempt.global_step % CUT_OFF_EVERY == 0
        run.wait_for(reached(attempt.global_step + CUT_OFF_EVERY), after=run.lost[0])
    assert "no progress for" in run.log(CHIEF)

"""Machines and connections that are cut off: nothing is closed, and no call ends by itself."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from tests.cluster.pods import CHIEF, pods, why_not
from tests.cluster.test_rejoin import Relay, server
from trainer.cluster import rejoin, signals
from trainer.errors import BEGIN_AGAIN
from trainer.events import AttemptBegin, Progress
from trainer.topology import Task

__all__ = ["server"]
pytestmark = pytest.mark.cluster

EVERY, STALL = 500, 10
PS, WORKER = Task(role="ps", index=0), Task(role="worker", index=1)
TIME, TIMEOUT = "grpc.keepalive_time_ms", "grpc.http2.ping_timeout_ms"
# A call that nothing ends would be waited for until a test's own limit.
CEILING = 120


def options(seconds: int) -> str:
    """Return our options for channels, which ask for a sign after so many seconds."""
    ours = {**rejoin.OPTIONS, TIME: 1000 * seconds, TIMEOUT: 1000 * seconds}
    assert ours.keys() == rejoin.OPTIONS.keys()
    return ",".join(f"{name}={value}" for name, value in ours.items())


class Swallowing(Relay):
    """Passes connections on to a port, until all that comes from those that are there is lost."""

    def __init__(self, target: int) -> None:
        self._lost = threading.Event()
        super().__init__("127.0.0.1", 0, target)

    def lose(self) -> None:
        """Pass nothing on that comes from the connections so far; later ones are as ever."""
        self._lost.set()
        self._lost = threading.Event()

    def _passing(self) -> Callable[[], bool]:
        lost = self._lost
        return lambda: not lost.is_set()


@pytest.fixture
def relay(server):
    """Return a relay to a server of TensorFlow."""
    made = Swallowing(server)
    yield made
    made.close()


@pytest.mark.slow
def test_a_call_over_a_connection_that_is_cut_off_ends_and_the_next_one_is_answered(
    relay, tmp_path
):
    with (tmp_path / "log.txt").open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.asks", f"grpc://127.0.0.1:{relay.port}"],
            env={
                **os.environ,
                **signals.parent_environment(),
                "GRPC_FAIL_FAST": "use_caller",
                # Without gRPC's measure of a connection, which is such a question too: it would end
                # the call where one is under way, on which nobody can rely.
                rejoin.VARIABLE: f"{options(1)},grpc.http2.bdp_probe=0",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        assert json.loads(process.stdout.readline())["devices"] > 0
        relay.lose()
        process.stdin.write("again\n")
        process.stdin.flush()
        assert select.select([process.stdout], [], [], CEILING)[0], "the call does not end"
        assert json.loads(process.stdout.readline())["devices"] > 0
    finally:
        process.kill()
        process.communicate()


def settings(strategy: str) -> dict[str, object]:
    training = {
        "strategy": strategy,
        "steps": 10**7,
        "checkpoint_every": EVERY,
        "validate_every": 0,
        "stall_timeout": STALL,
    }
    return {"training": training, "cluster": {"parameter_servers": 1, "workers": 2}}


ROLES = {"ps": 1, "worker": 2, "chief": 1}


@pytest.fixture
def may_cut():
    if why := why_not():
        pytest.skip(why)


def reached(step):
    return lambda event: isinstance(event, Progress) and event.global_step > step


@pytest.mark.usefixtures("may_cut")
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_asynchronous_training_goes_on_without_a_machine_that_is_cut_off(dataset, tmp_path):
    # Short stretches: an idle channel that asks this often would be closed.
    own = {rejoin.VARIABLE: options(15)}
    with pods(tmp_path, dataset, settings("async_parameter_server"), ROLES, environment=own) as run:
        run.wait_for(reached(EVERY + 50))
        run.cut_off(WORKER)
        _, at = run.seen[-1]
        # Over a boundary, at which all workers rest.
        run.wait_for(reached(at.global_step + 3 * EVERY))
        assert len([e for _, e in run.seen if isinstance(e, AttemptBegin)]) == 1


@pytest.mark.usefixtures("may_cut")
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_token_that_never_arrives_ends_the_attempt_and_no_more(dataset, tmp_path):
    # Of a worker that all others reach: only what it sends to the server is lost.
    with pods(tmp_path, dataset, settings("sync_parameter_server"), ROLES) as run:
        run.wait_for(reached(EVERY + 50))
        connect = run.cut_off(WORKER, PS)
        while not run.lost:
            # The end of the chief, which is started again.
            assert run.pods[CHIEF].process.wait() == BEGIN_AGAIN, run.log(CHIEF)
        connect()
        _, attempt = run.wait_for(lambda e: isinstance(e, AttemptBegin), after=run.lost[0])
        assert attempt.global_step % EVERY == 0
        run.wait_for(reached(attempt.global_step + EVERY), after=run.lost[0])
    assert "no progress for" in run.log(CHIEF)

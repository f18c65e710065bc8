"""Tests heartbeats, probes of peers, and the options of gRPC channels."""

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack

import pytest

from flotilla.trainer.cluster import liveness
from flotilla.trainer.cluster.liveness import (
    CHANNEL_OPTIONS,
    CHANNELS,
    KEEPALIVE,
    Peers,
    enable_keepalive,
    find_tasks_soon,
    probe_peers,
)
from flotilla.trainer.config.topology import Cluster, Task

BEAT = (
    "from flotilla.trainer.cluster import liveness; import signal; liveness.begin(); signal.pause()"
)


@pytest.fixture
def pipe():
    read, write = os.pipe()
    yield read, write
    for each in (read, write):
        try:
            os.close(each)
        except OSError:
            assert each == write


def test_a_task_that_ended_is_not_stalled(pipe):
    read, write = pipe
    os.write(write, b"...")
    os.close(write)
    assert not liveness.wait_until_silent(read, 60)


def test_a_task_that_sent_one_heartbeat_and_no_more_is_stalled(pipe):
    read, write = pipe
    os.write(write, b".")
    assert liveness.wait_until_silent(read, 0.01)


def test_the_first_heartbeat_may_take_longer(pipe, monkeypatch):
    monkeypatch.setattr(liveness, "STARTING_SECONDS", 0.01)
    read, _ = pipe
    assert liveness.wait_until_silent(read, 0.001)
    monkeypatch.setattr(liveness, "STARTING_SECONDS", 60.0)
    os.close(pipe[1])
    assert not liveness.wait_until_silent(read, 0.001)


def test_a_process_sends_heartbeats_until_it_is_stopped(pipe, monkeypatch):
    monkeypatch.setattr(liveness, "STARTING_SECONDS", 1.0)
    read, write = pipe
    settings = {**os.environ, **liveness.heartbeat_environment(write, 0.1)}
    with subprocess.Popen([sys.executable, "-c", BEAT], env=settings, pass_fds=(write,)) as process:
        os.close(write)
        assert os.read(read, 1) == b"."
        assert os.read(read, 1) == b"."
        process.send_signal(signal.SIGSTOP)
        assert liveness.wait_until_silent(read, 1)
        process.kill()
        process.wait()
        assert not liveness.wait_until_silent(read, 60)


def test_no_heartbeats_without_a_reader(monkeypatch):
    monkeypatch.delenv(liveness.VARIABLE, raising=False)
    liveness.begin()


def test_a_reader_that_is_gone_ends_the_heartbeats(pipe):
    read, write = pipe
    assert liveness._beat(write)
    os.close(read)
    assert not liveness._beat(write)
    os.dup2(write, read)


THIS = Task(role="chief", index=0)


@pytest.fixture
def listening():
    """Return a function that returns a listening socket and its address."""
    with ExitStack() as opened:

        def listen():
            server = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
            return server, f"127.0.0.1:{server.getsockname()[1]}"

        yield listen


def test_a_task_that_listens_and_sends_nothing_is_silent(listening):
    _, stopped = listening()
    living, answers = listening()
    closed, gone = listening()
    closed.close()

    def answer():
        peer, _ = living.accept()
        with peer:
            assert peer.recv(24).startswith(b"PRI * HTTP/2.0")
            peer.sendall(b"\0\0\0\4\0\0\0\0\0")

    thread = threading.Thread(target=answer)
    thread.start()
    workers = (answers, stopped, gone)
    cluster = Cluster(addresses={"chief": ("127.0.0.1:1",), "ps": (stopped,), "worker": workers})
    # This timeout is long enough for the thread above on a busy machine.
    found = probe_peers(cluster, THIS, timeout=3)
    thread.join()
    assert [str(task) for task in found.silent] == ["ps-0", "worker-1"]
    assert [str(task) for task in found.gone] == ["worker-2"]


@pytest.mark.parametrize(
    ("number", "found"),
    [
        (errno.EHOSTUNREACH, "silent"),
        (errno.ENETUNREACH, "silent"),
        (errno.ETIMEDOUT, "silent"),
        (errno.ECONNREFUSED, "gone"),
    ],
)
def test_a_machine_that_cannot_be_reached_has_not_ended_its_task(monkeypatch, number, found):
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(socket, "create_connection", refuse)
    cluster = Cluster(addresses={"chief": ("127.0.0.1:1",), "ps": ("127.0.0.1:2",)})
    assert probe_peers(cluster, THIS) == Peers(**{found: (Task(role="ps", index=0),)})
    # A single task has no peers.
    assert probe_peers(Cluster(addresses={"chief": ("127.0.0.1:1",)}), THIS) == Peers()


def test_a_task_that_ends_during_the_probe_is_gone(listening):
    server, address = listening()

    def hang_up():
        server.accept()[0].close()

    thread = threading.Thread(target=hang_up)
    thread.start()
    cluster = Cluster(addresses={"chief": ("127.0.0.1:1",), "ps": (address,)})
    assert probe_peers(cluster, THIS, timeout=30) == Peers(gone=(Task(role="ps", index=0),))
    thread.join()


RESOLVE, CONNECT = "grpc.dns_min_time_between_resolutions_ms", "grpc.min_reconnect_backoff_ms"
AGAIN = "grpc.initial_reconnect_backoff_ms=100"
ALIVE = (
    "grpc.keepalive_time_ms=310000,grpc.http2.ping_timeout_ms=20000,"
    "grpc.keepalive_timeout_ms=120000,grpc.http2.max_pings_without_data=0,"
    "grpc.enable_http_proxy=0"
)
OURS = f"{RESOLVE}=1000,{AGAIN},{CONNECT}=5000,{ALIVE}"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", OURS),
        ("grpc.max_receive_message_length=-1", f"grpc.max_receive_message_length=-1,{OURS}"),
        ("grpc.a=1,", f"grpc.a=1,{OURS}"),
        # The name of this other option begins with the name of ours.
        (f"{RESOLVE}_more=7", f"{RESOLVE}_more=7,{OURS}"),
        (f"{RESOLVE}=30000", f"{RESOLVE}=30000,{AGAIN},{CONNECT}=5000,{ALIVE}"),
        (f"{CONNECT}=1, {RESOLVE}=2", f"{CONNECT}=1, {RESOLVE}=2,{AGAIN},{ALIVE}"),
        (f"{OURS},a=1", f"{OURS},a=1"),
    ],
)
def test_tasks_are_found_soon_unless_the_user_has_said_otherwise(monkeypatch, before, after):
    monkeypatch.setenv(CHANNELS, before)
    if not before:
        monkeypatch.delenv(CHANNELS)
    find_tasks_soon()
    assert os.environ[CHANNELS] == after
    # A task may be run twice in a process.
    find_tasks_soon()
    assert os.environ[CHANNELS] == after


def test_no_server_takes_the_questions_for_too_many():
    # A gRPC server closes a channel that sends pings more often while a call receives no data.
    assert CHANNEL_OPTIONS["grpc.keepalive_time_ms"] > 300_000


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's options differ by system")
def test_the_kernel_probes_connections_to_the_ports_of_tasks_and_no_others(listening):
    connections = []
    with ExitStack() as opened:
        for _ in range(2):
            server, _ = listening()
            client = opened.enter_context(socket.create_connection(server.getsockname()))
            connections.append(client)
            accepted, _ = server.accept()
            opened.enter_context(accepted)
        opened.enter_context(socket.socket(socket.AF_UNIX))
        ours, other = connections
        enable_keepalive({ours.getpeername()[1]})
        probed = {
            name: ours.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in KEEPALIVE
        }
        assert probed == KEEPALIVE
        is_probed = [
            each.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            for each in (ours, other, accepted)
        ]
        assert is_probed == [1, 0, 0]
        # The connection still works after its duplicate is closed.
        ours.sendall(b".")


def test_probes_end_when_grpc_would_close_a_connection_with_unacknowledged_data():
    idle, interval, count = KEEPALIVE.values()
    assert 1000 * (idle + interval * count) == CHANNEL_OPTIONS["grpc.keepalive_timeout_ms"]

"""Tests that the shutdown port limits unknown clients and keeps the connections of its servers."""

import socket
from contextlib import ExitStack

import pytest

from flotilla.components.kubernetes.pods.shutdown import SPARE, ShutdownServer
from flotilla.trainer.cluster.local import free_port

SERVERS = 2
LIMIT = SERVERS + SPARE
FEW_SECONDS = 30


@pytest.fixture
def leader():
    port = free_port()
    server = ShutdownServer(SERVERS, port)
    yield port, server
    # Close the connections explicitly, because the server's thread runs until the process exits.
    for connection in list(server._connections):
        connection.close()


@pytest.fixture
def connect(leader):
    port, _ = leader
    with ExitStack() as stack:
        yield lambda host: stack.enter_context(
            socket.create_connection(("127.0.0.1", port), FEW_SECONDS, (host, 0))
        )


def is_closed(client):
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_stranger_has_few_connections_and_takes_none_from_a_server(leader, connect):
    _, server = leader
    servers = [connect(f"127.0.0.{10 + index}") for index in range(SERVERS)]
    strangers = [connect("127.0.0.99") for _ in range(5 * LIMIT)]
    # At the limit, each new connection from an unknown client replaces that client's oldest
    # connection.
    assert all(map(is_closed, strangers[: -(LIMIT - SERVERS)]))
    late = connect("127.0.0.12")
    assert is_closed(strangers[-(LIMIT - SERVERS)])
    assert len(server._connections) <= LIMIT
    server.announce()
    assert [each.recv(1) for each in [*servers, late]] == [b"e"] * (SERVERS + 1)


def test_a_peer_that_has_left_or_that_says_something_makes_room(leader, connect):
    _, server = leader
    talker, leaver = connect("127.0.0.50"), connect("127.0.0.51")
    talker.send(b"GET / HTTP/1.1\r\n")
    leaver.close()
    servers = [connect("127.0.0.10") for _ in range(LIMIT)]
    assert is_closed(talker)
    server.announce()
    assert [each.recv(1) for each in servers] == [b"e"] * LIMIT

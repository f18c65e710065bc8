"""Tests ports that only loopback reaches; the server shares its port as TensorFlow's servers do."""

import errno
import socket
import sys
from types import SimpleNamespace

import pytest

from flotilla.trainer import events
from flotilla.trainer.cluster import local, loopback
from flotilla.trainer.config.topology import Cluster
from flotilla.trainer.events.progress import format_event
from flotilla.trainer.runtime.errors import UserError
from tests.cluster.strangers import other_addresses, reached

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a way")


@pytest.fixture(autouse=True)
def closed(monkeypatch):
    """Return the sockets that drop connections, and close them at the end of the test."""
    sockets = []
    monkeypatch.setattr(loopback, "_closed", sockets)
    monkeypatch.setenv("TF_GRPC_REUSE_PORT", "0")
    yield sockets
    for each in sockets:
        # Only a shutdown wakes a thread that waits for a connection.
        each.shutdown(socket.SHUT_RDWR)
        each.close()


def serve(address):
    loopback.close_to_others(address)
    server = loopback._bound(int(address.rpartition(":")[2]))
    server.listen()
    return server


def is_closed(client):
    """Return whether the peer closes a connection without sending data."""
    try:
        client.sendall(b"PRI * HTTP/2.0")
        return client.recv(1) == b""
    except ConnectionError:
        return True


@linux
@pytest.mark.parametrize("family", ["IPv6", "IPv4"])
def test_a_server_on_loopback_is_reached_over_loopback_alone(monkeypatch, family):
    others = other_addresses()
    loopbacks = ["127.0.0.1", "127.7.7.7", "::1"]
    if family == "IPv4":
        # Simulate a machine without IPv6.
        monkeypatch.setattr(loopback, "_has_ipv6", lambda: False)
    if not loopback._has_ipv6():
        loopbacks.remove("::1")
    port = local.free_port()
    with serve(f"127.0.0.1:{port}") as server:
        for _ in range(10):
            assert reached(loopbacks, [port]) == [(each, port) for each in loopbacks]
        assert reached(others, [port]) == []
        assert server.getsockname()[1] == port


@linux
@pytest.mark.parametrize("family", ["IPv6", "IPv4"])
def test_before_the_server_listens_a_connection_is_closed_and_not_lost(monkeypatch, family):
    """If the packet were dropped, each waiting task would resend it only after a second."""
    if family == "IPv4":
        monkeypatch.setattr(loopback, "_has_ipv6", lambda: False)
    port = local.free_port()
    loopback.close_to_others(f"127.0.0.1:{port}")
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", port), 5.0) as early:
            assert is_closed(early)
    assert reached(other_addresses(), [port]) == []
    with loopback._bound(port) as server:
        server.listen()
        with socket.create_connection(("127.0.0.1", port), 5.0) as later:
            accepted, address = server.accept()
            accepted.close()
            assert address[1] == later.getsockname()[1]


@linux
def test_too_many_open_files_for_a_while_end_nothing(monkeypatch):
    failures = iter([OSError(errno.EMFILE, "Too many open files")] * 2)
    held = SimpleNamespace(accepted=[])

    def accept():
        if failure := next(failures, None):
            raise failure
        if held.accepted:
            raise OSError(errno.EINVAL, "Invalid argument")
        held.accepted.append(SimpleNamespace(close=lambda: held.accepted.append("closed")))
        return held.accepted[0], None

    monkeypatch.setattr(loopback, "_PAUSE_SECONDS", 0.0)
    held.accept = accept
    loopback._close_each(held)
    assert held.accepted[1:] == ["closed"]


@linux
def test_a_connection_over_loopback_from_another_address_is_dropped():
    """A router that forwards 127.0.0.0/8 would deliver such packets."""
    port = local.free_port()
    source = next((each for each in other_addresses() if "." in each), "")
    if not source:
        pytest.skip("this machine has no IPv4 address but loopback")
    with serve(f"127.0.0.1:{port}"), pytest.raises(TimeoutError):
        socket.create_connection(("127.0.0.1", port), 0.2, (source, 0))


def test_a_server_that_others_have_to_reach_is_left_open(closed):
    port = local.free_port()
    with serve(f"10.0.0.1:{port}"):
        others = [each for each in other_addresses() if "." in each]
        assert reached(others, [port]) == [(each, port) for each in others]
    assert not closed


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:1", True), ("127.1.2.3:1", True), ("[::1]:1", True), ("localhost:1", True),
        ("10.0.0.1:1", False), ("[::]:1", False), ("0.0.0.0:1", False), ("ps-0.ns.svc:1", False),
    ],
)  # fmt: skip
def test_which_addresses_are_on_loopback(address, expected):
    assert loopback.is_loopback(address) is expected


@linux
def test_a_port_that_is_taken_is_one_line():
    with socket.create_server(("", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(UserError, match=f"cannot serve on {address}: Address already in use"):
            loopback.close_to_others(address)


@linux
def test_a_system_that_takes_the_filter_and_ignores_it_is_found_out(monkeypatch):
    assert loopback.can_close()
    monkeypatch.setattr(loopback, "_TRIAL_SECONDS", 0.05)
    monkeypatch.setattr(loopback, "_SERVER_IF_LOOPBACK", [(6, 0, 0, 0)])
    assert not loopback.can_close()


@pytest.mark.parametrize("lacks", ["platform", "filter"])
def test_a_system_without_a_way_serves_with_a_warning(monkeypatch, caplog, closed, lacks):
    if lacks == "platform":
        monkeypatch.setattr(loopback.sys, "platform", "darwin")
    else:
        monkeypatch.setattr(loopback, "_ATTACH_REUSEPORT_FILTER", 9999)
    port = local.free_port()
    with serve(f"127.0.0.1:{port}"):
        assert reached(["127.0.0.1"], [port])
    assert [record.message for record in caplog.records] == [loopback.WARNING]
    assert not closed


@pytest.mark.parametrize(
    ("addresses", "can_close", "warned"),
    [
        ({"chief": ("127.0.0.1:1",), "ps": ("127.0.0.1:2",)}, False, True),
        ({"chief": ("127.0.0.1:1",), "ps": ("127.0.0.1:2",)}, True, False),
        # A single task starts no server.
        ({"chief": ("127.0.0.1:1",)}, False, False),
        ({"chief": ("10.0.0.1:1",), "ps": ("10.0.0.2:2",)}, False, False),
    ],
)
def test_a_run_warns_once_where_its_ports_stay_open(monkeypatch, addresses, can_close, warned):
    monkeypatch.setattr(loopback, "can_close", lambda: can_close)
    heard = []
    with events.listen(heard.append):
        local._report_open_ports(Cluster(addresses=addresses), dict.fromkeys(addresses, 1))
    assert [format_event(each) for each in heard] == [f"warning: {loopback.WARNING}"] * warned

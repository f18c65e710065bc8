"""Connections to this machine at an address other than loopback."""

import ipaddress
import select
import socket
import time
from collections.abc import Iterable
from contextlib import ExitStack

import psutil
import pytest

# Maximum time to wait for a connection, in seconds. A connection within one machine is made or
# dropped almost at once, but later if the machine is busy.
SECONDS = 2.0


def other_addresses() -> list[str]:
    """Return this machine's addresses other than loopback; skip the test if there are none."""
    found = [
        each.address
        for addresses in psutil.net_if_addrs().values()
        for each in addresses
        if each.family in {socket.AF_INET, socket.AF_INET6}
        and not ipaddress.ip_address(each.address.partition("%")[0]).is_loopback
    ]
    if not found:
        pytest.skip("this machine has no address but loopback: nobody can reach it over another")
    return found


def open_ports(process: psutil.Process) -> list[int]:
    found = process.net_connections("tcp")
    return sorted({each.laddr.port for each in found if each.status == psutil.CONN_LISTEN})


def reached(addresses: Iterable[str], ports: Iterable[int]) -> list[tuple[str, int]]:
    ports = list(ports)
    with ExitStack() as stack:
        tried = {}
        for address in addresses:
            for port in ports:
                (family, kind, _, _, place), *_ = socket.getaddrinfo(
                    address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
                )
                client = stack.enter_context(socket.socket(family, kind))
                client.setblocking(False)
                client.connect_ex(place)
                tried[client] = (address, port)
        waiting, until = list(tried), time.monotonic() + SECONDS
        while waiting and (left := until - time.monotonic()) > 0:
            _, ready, _ = select.select([], waiting, [], left)
            waiting = [each for each in waiting if each not in ready]
        made = [each for each in tried if not each.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)]
        return [tried[each] for each in made if _is_connected(each)]


def _is_connected(client: socket.socket) -> bool:
    try:
        client.getpeername()
    except OSError:
        return False
    return True

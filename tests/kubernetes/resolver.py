"""Resolves pod names in the Python processes of a pod, as the cluster's DNS does.

If the pod has its own address, sockets listen on that address instead of on all addresses.
"""

import os
import socket
from typing import Any

VARIABLE, ADDRESS = "FLOTILLA_TEST_RESOLVER", "FLOTILLA_TEST_ADDRESS"
SITE = "from tests.kubernetes.resolver import install\ninstall()\n"
UNKNOWN = "?"
_SUFFIXES = (".svc", ".svc.cluster.local")


def endpoint_of(host: str, port: int, resolver: str) -> tuple[str, int] | None:
    """Return the address and port of a name, or None if it is outside the cluster.

    Raises `gaierror` if the name does not resolve.
    """
    at, _, its_port = resolver.rpartition(":")
    with socket.create_connection((at, int(its_port))) as peer:
        peer.sendall(f"RESOLVE {host}:{port} HTTP/1.1\r\n\r\n".encode())
        found = peer.makefile().read()
    if not found:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    if found == UNKNOWN:
        return None
    address, mapped = found.split()
    return address, int(mapped)


def address_of(host: str, resolver: str) -> str:
    """Return the address of a name; raise `gaierror` if it does not resolve."""
    found = endpoint_of(host, 0, resolver)
    return found[0] if found else host


def install() -> None:
    """If a resolver is configured, make this process's sockets resolve pod names."""
    resolver, own = os.environ.get(VARIABLE, ""), os.environ.get(ADDRESS, "")
    original, bind = socket.getaddrinfo, socket.socket.bind

    def getaddrinfo(host: Any, port: Any, *args: Any, **named: Any) -> Any:
        if isinstance(host, str) and _may_be_ours(host):
            number = int(port) if str(port).isdecimal() else 0
            found = endpoint_of(host, number, resolver)
            if found:
                host, port = found[0], found[1] or port
        return original(host, port, *args, **named)

    def bind_own(its: socket.socket, address: Any) -> None:
        if its.family == socket.AF_INET and address[0] in ("", "0.0.0.0") and address[1]:
            address = (own, address[1])
        bind(its, address)

    if resolver:
        socket.getaddrinfo = getaddrinfo
    if own:
        socket.socket.bind = bind_own  # type: ignore[method-assign,assignment]


def _may_be_ours(host: str) -> bool:
    is_number = host.replace(".", "").isdecimal()
    return host.endswith(_SUFFIXES) or (host.count(".") == 1 and not is_number)

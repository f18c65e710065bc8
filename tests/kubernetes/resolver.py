"""Resolves the names of pods in a pod's Python, as the cluster's DNS does.

The kubelet has each of its processes call `install` before anything else.
"""

from __future__ import annotations

import os
import socket
from typing import Any

VARIABLE = "FLOTILLA_TEST_RESOLVER"
SITE = "from tests.kubernetes.resolver import install\ninstall()\n"
_SUFFIX = ".svc"


def address_of(host: str, resolver: str) -> str:
    """Return the address of a name; raises `gaierror` for one that does not resolve."""
    at, _, port = resolver.rpartition(":")
    with socket.create_connection((at, int(port))) as peer:
        peer.sendall(f"RESOLVE {host} HTTP/1.1\r\n\r\n".encode())
        found = peer.makefile().read()
    if not found:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    return found


def install() -> None:
    """Have the sockets of this process resolve the names of pods, where there is a resolver."""
    resolver = os.environ.get(VARIABLE, "")
    original = socket.getaddrinfo

    def getaddrinfo(host: Any, *args: Any, **named: Any) -> Any:
        if isinstance(host, str) and host.endswith(_SUFFIX):
            host = address_of(host, resolver)
        return original(host, *args, **named)

    if resolver:
        socket.getaddrinfo = getaddrinfo

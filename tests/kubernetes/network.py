"""Simulates the DNS names of pods, and connections between pods, which outlast the names.

Every pod of a TFJob has a headless Service of the same name: `POD.NAMESPACE.svc` resolves while the
Service exists and the pod runs, provided that neither is being deleted. The pods of a JobSet share
one Service: `HOSTNAME.SERVICE` (and `HOSTNAME.SERVICE.NAMESPACE.svc`) resolves while the Service
exists and selects a running pod. If the Service publishes pods that are not ready, this includes
pods that are being deleted. If two pods have the same hostname because the old one is terminating,
a caller gets the old pod's address; a real DNS server returns both.

All pods are processes on this machine. Each pod of a TFJob has its own port. Each pod of a JobSet
has its own loopback address, which its replacement does not inherit. Because TensorFlow's servers
listen on all addresses, they use ports that only the network knows.

TensorFlow connects through a proxy (`grpc_proxy`, HTTP's CONNECT), which resolves the name when a
connection is opened. Python's sockets also resolve names through the proxy
(`tests.kubernetes.resolver`). These tests therefore do not show how long gRPC caches an address. An
open connection stays open until one of its ends closes it.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from flotilla.trainer.cluster.liveness import CHANNELS
from tests.kubernetes.resolver import UNKNOWN, VARIABLE
from tests.kubernetes.store import RefusedError, Store, Tree, selected

CHUNK = 1 << 18
DOMAIN = "svc"
LOOPBACK = "127.0.0.1"


def host_of(pod: str, namespace: str) -> str:
    return f"{pod}.{namespace}.{DOMAIN}"


class Network:
    """Resolves pod names and relays connections; names in `refused` do not resolve."""

    def __init__(self, store: Store) -> None:
        self.refused: list[str] = []
        self.ports: dict[str, dict[int, int]] = {}
        self._subdomains: set[str] = set()
        self._store = store
        self._server = socket.create_server((LOOPBACK, 0), backlog=256)

    def __enter__(self) -> Network:
        _in_background(self._accept)
        return self

    def __exit__(self, *_error: object) -> None:
        # `shutdown` wakes the accepting thread; `close` alone does not.
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment variables that connect a pod's processes to the network."""
        address = f"{LOOPBACK}:{self._server.getsockname()[1]}"
        # Tasks ignore proxies for their gRPC channels unless this option is set.
        options = {CHANNELS: "grpc.enable_http_proxy=1"}
        return {"grpc_proxy": f"http://{address}", VARIABLE: address, **options}

    def resolves(self, host: str) -> bool:
        return host in (LOOPBACK, "localhost") or bool(self.endpoints(host, 0))

    def endpoints(self, host: str, port: int) -> list[tuple[str, int]]:
        """Return the current addresses and ports of a name; the oldest pod is first."""
        parts = host.removesuffix(".cluster.local").split(".")
        with self._store.changed:
            self._remember()
            if len(parts) == 3 and parts[2] == DOMAIN:
                return [(LOOPBACK, port)] if self._has_own_service(parts[0], parts[1]) else []
            if len(parts) != 2 and parts[3:] != [DOMAIN]:
                return []
            found = self._served(parts[0], parts[1], parts[2] if parts[2:] else "")
            return [
                (pod["status"]["podIP"], self.ports.get(_uid(pod), {}).get(port, port))
                for pod in found
            ]

    def _remember(self) -> None:
        """Record the cluster's domains; they remain known even without pods."""
        for kind in ("pods", "services"):
            for tree in self._store.all(kind):
                subdomain = tree["spec"].get("subdomain")
                self._subdomains.add(tree["metadata"]["name"] if kind == "services" else subdomain)

    def _has_own_service(self, pod: str, namespace: str) -> bool:
        with suppress(RefusedError):
            self._store.get("services", namespace, pod)
            found = self._store.get("pods", namespace, pod)
            is_ending = bool(found["metadata"].get("deletionTimestamp"))
            return found["status"].get("phase") == "Running" and not is_ending
        return False

    def _served(self, hostname: str, service: str, namespace: str) -> list[Tree]:
        found = []
        for each in self._store.all("services", namespace, fields=f"metadata.name={service}"):
            spec = each["spec"]
            labels = ",".join(f"{key}={value}" for key, value in spec.get("selector", {}).items())
            for pod in self._store.all("pods", each["metadata"]["namespace"]):
                is_named = pod["spec"].get("hostname") == hostname
                is_here = is_named and pod["spec"].get("subdomain") == service
                is_ending = bool(pod["metadata"].get("deletionTimestamp"))
                is_published = spec.get("publishNotReadyAddresses") or not is_ending
                if (
                    is_here
                    and labels
                    and spec.get("clusterIP") == "None"
                    and selected(pod, labels, "")
                    and is_published
                    and pod["status"].get("phase") == "Running"
                ):
                    found.append(pod)
        return found

    def _answer_of(self, host: str, port: int) -> str:
        """Return the address of a name; empty if it has none, `UNKNOWN` if outside the cluster."""
        found = self.endpoints(host, port)
        if found:
            return "{} {}".format(*found[0])
        is_ours = host.partition(".")[2] in self._subdomains or f".{DOMAIN}" in host
        return "" if is_ours else UNKNOWN

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._server.accept()
            except OSError:
                return
            _in_background(self._answer, caller)

    def _answer(self, caller: socket.socket) -> None:
        """Relay a `CONNECT HOST:PORT`; reply to `RESOLVE HOST` with an address or nothing."""
        with suppress(OSError), caller:
            method, target = _request(caller)
            host, _, port = target.rpartition(":")
            if method == "RESOLVE":
                caller.sendall(self._answer_of(host, int(port)).encode())
                return
            called = self._connect(host, int(port))
            if called is None:
                caller.sendall(b"HTTP/1.1 502 Bad Gateway\r\n\r\n")
                return
            with called:
                caller.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                back = _in_background(_pass_on, called, caller)
                _pass_on(caller, called)
                back.join()

    def _connect(self, host: str, port: int) -> socket.socket | None:
        is_local = host in (LOOPBACK, "localhost")
        found = [(LOOPBACK, port)] if is_local else self.endpoints(host, port)
        if not found:
            with self._store.changed:
                self.refused.append(host)
                self._store.changed.notify_all()
        for endpoint in found:
            with suppress(OSError):
                return socket.create_connection(endpoint)
        return None


def _request(caller: socket.socket) -> tuple[str, str]:
    """Read only the head of a request, not its body; return its method and target."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = caller.recv(1)
        if not byte:
            raise OSError("the caller has gone")
        head += byte
    method, target, *_ = head.decode().split()
    return method, target


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := source.recv(CHUNK):
            target.sendall(data)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def _uid(pod: Tree) -> str:
    return str(pod["metadata"]["uid"])


def _in_background(function: Callable[..., None], *args: object) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread

"""Gives each pod that has a hostname, such as a pod of a JobSet, its own loopback address.

TensorFlow's server listens on all addresses, so each pod also gets a free port. Connections to the
port in the manifest are relayed to the free port.
"""

import itertools
import random
import re
import socket
from collections.abc import Callable
from contextlib import ExitStack

from tests.kubernetes.store import Tree

_TFJOB = "training.kubeflow.org/job-name"


class Addresses:
    def __init__(self, ports: dict[str, dict[int, int]]) -> None:
        """Record each pod's free ports in `ports`, by UID and by the port in the manifest."""
        self._ports = ports
        # Returns the port of a TFJob's pod by name, because all pods of TFJobs share the machine's
        # address.
        self.of_tfjobs: Callable[[str], int] = {}.__getitem__
        self._held = ExitStack()
        self._found: dict[str, str] = {}
        # Use a random block, because other tests on this machine use loopback addresses too.
        self._net = f"127.{random.randint(16, 250)}.{random.randint(0, 255)}"
        self._next = itertools.count(1)

    def of(self, pod: Tree) -> str:
        """Return the address of a pod, or an empty string if it uses the machine's own address."""
        if not pod["spec"].get("hostname"):
            return ""
        uid = pod["metadata"]["uid"]
        if uid not in self._found:
            high, low = divmod(next(self._next), 254)
            net, _, third = self._net.rpartition(".")
            self._found[uid] = f"{net}.{(int(third) + high) % 256}.{low + 1}"
        return self._found[uid]

    def mapped(self, pod: Tree, name: str, text: str) -> str:
        """Return a variable's value; in TF_CONFIG, free ports replace the manifest's ports."""
        spec = pod["spec"]
        if name == "TF_CONFIG" and _TFJOB in pod["metadata"].get("labels", {}):
            return re.sub(
                r'"([a-z0-9-]+)(\.[a-z0-9-]+\.svc):2222"',
                lambda found: f'"{found[1]}{found[2]}:{self.of_tfjobs(found[1])}"',
                text,
            )
        if name != "TF_CONFIG" or not spec.get("hostname"):
            return text
        host = re.escape(f"{spec['hostname']}.{spec.get('subdomain', '')}")
        return re.sub(rf'"({host}[^:"]*):(\d+)"', lambda found: self._listen(pod, found), text)

    def _listen(self, pod: Tree, found: re.Match[str]) -> str:
        ports = self._ports.setdefault(pod["metadata"]["uid"], {})
        asked = int(found[2])
        if asked not in ports:
            # The socket reserves the port but does not listen, so the pod can listen on it.
            holder = self._held.enter_context(socket.socket())
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("127.0.0.1", 0))
            ports[asked] = holder.getsockname()[1]
        return f'"{found[1]}:{ports[asked]}"'

    def close(self) -> None:
        self._held.close()

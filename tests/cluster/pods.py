"""A cluster whose tasks are pods: each has a network namespace, and a new address per restart.

    with pods(tmp_path, dataset, config, {"ps": 1, "worker": 2, "chief": 1}) as cluster:
        cluster.lose(Task(role="worker", index=0))

Names are resolved as in Kubernetes: every pod asks a DNS server, which answers with the address of
the newest pod of that name, even if that pod is lost. The address of a lost pod disappears: nothing
answers there, not even with a refusal. Root and Linux are required.
"""

import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from flotilla.trainer import events, storage
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.topology import Cluster, Task
from flotilla.trainer.events import Event
from flotilla.trainer.runtime import signals
from flotilla.trainer.runtime.errors import BEGIN_AGAIN

DOMAIN, PORT = "fleet.test", 2222
# An address block for benchmarks (RFC 2544), which real networks do not use.
NETWORK, ROUTER = "198.18.{}.{}", "198.18.0.1"
PREFIX = f"fl{os.getpid()}"
# Time until a new pod starts, in seconds, as measured on Kubernetes.
BACK_SECONDS = 1.0
CLOSING_SECONDS = 0.3
# Time until a chief that lost its cluster restarts, in seconds, as in
# `flotilla.components.kubernetes`.
PAUSE_SECONDS = 2.0
CHIEF = Task(role="chief", index=0)
_QUERY_A, _NO_SUCH_NAME = 1, 3
Kind = TypeVar("Kind", bound=Event)


def why_not() -> str:
    """Return why network namespaces cannot be used on this machine; empty if they can."""
    if sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("ip"):
        return "network namespaces need Linux, root and iproute2"
    name = f"{PREFIX}try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return made.stderr.strip()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class NameServer:
    def __init__(self, address: str) -> None:
        self.names: dict[str, str] = {}
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            self._socket.bind((address, 53))
        except OSError:
            self._socket.close()
            raise
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                query, sender = self._socket.recvfrom(512)
                if query:
                    self._socket.sendto(self._answer(query), sender)

    def _answer(self, query: bytes) -> bytes:
        """Return a response with an address, with no address, or with "no such name" (RFC 1035)."""
        labels, at = [], 12
        while length := query[at]:
            labels.append(query[at + 1 : at + 1 + length].decode().lower())
            at += length + 1
        kind = struct.unpack_from(">H", query, at + 1)[0]
        found = self.names.get(".".join(labels))
        records = [found] if found and kind == _QUERY_A else []
        code = 0 if found else _NO_SUCH_NAME
        head = query[:2] + struct.pack(">5H", 0x8580 | code, 1, len(records), 0, 0)
        body = [struct.pack(">HHHIH", 0xC00C, 1, 1, 0, 4) + socket.inet_aton(a) for a in records]
        return head + query[12 : at + 5] + b"".join(body)


@dataclass
class Pod:
    """A network namespace with its address and process."""

    namespace: str
    address: str
    process: subprocess.Popen[bytes]

    def link(self, end: str) -> str:
        return self.namespace.replace(f"{PREFIX}n", f"{PREFIX}{end}")


@dataclass
class Pods:
    """The tasks of one run."""

    folder: Path
    dataset: str
    cluster: Cluster
    server: NameServer
    environment: Mapping[str, str]
    pods: dict[Task, Pod] = field(default_factory=dict)
    seen: list[tuple[float, Event]] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)
    _made: int = 1
    _ended: bool = False
    _is_over: bool = False
    _starting: threading.Lock = field(default_factory=threading.Lock)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def checkpoints(self) -> str:
        return storage.uri_of(self.folder / "checkpoints")

    def start(self, task: Task) -> None:
        """Start a task's pod at an unused address."""
        with self._starting:
            if not self._is_over:
                self._start(task)

    def _start(self, task: Task) -> None:
        self._made += 1
        address = NETWORK.format(self._made // 250, self._made % 250 + 2)
        namespace = f"{PREFIX}n{self._made}"
        _ip("netns", "add", namespace)
        outer, inner = f"{PREFIX}v{self._made}", f"{PREFIX}w{self._made}"
        _ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", namespace)
        _ip("link", "set", outer, "master", PREFIX, "up")
        for words in (f"addr add {address}/15 dev {inner}", f"link set {inner} up"):
            _ip("-n", namespace, *words.split())
        _ip("-n", namespace, "link", "set", "lo", "up")
        settings = Path("/etc/netns") / namespace
        settings.mkdir(parents=True)
        (settings / "resolv.conf").write_text(f"nameserver {ROUTER}\n", encoding="utf-8")
        self.pods[task] = Pod(namespace, address, self._process(task, namespace))
        self.server.names[self.cluster.address(task).rpartition(":")[0]] = address

    def lose(self, task: Task) -> float:
        """Remove a task's pod and start a new one later; return the time of the removal."""
        pod = self.pods.pop(task)
        pod.process.kill()
        pod.process.wait()
        gone = time.monotonic()
        # Give the kernel time to close the connections, because a kubelet also stops containers
        # before it removes their network. Peers then notice the loss at once.
        time.sleep(CLOSING_SECONDS)
        _remove(pod)
        _later(BACK_SECONDS, lambda: self.start(task))
        return gone

    def cut_off(self, task: Task, other: Task | None = None) -> Callable[[], None]:
        """Cut off a pod from all others or from `other`; return a function that reconnects it."""
        pod = self.pods[task]
        if other:
            lost = ("route", "add", "blackhole", self.pods[other].address)
            back = ("route", "del", "blackhole", self.pods[other].address)
        else:
            link = ("link", "set", pod.link("w"))
            lost, back = (*link, "down"), (*link, "up")
        _ip("-n", pod.namespace, *lost)
        return partial(_ip, "-n", pod.namespace, *back)

    def wait_for(self, wanted: Callable[[Event], bool], after: float = 0.0) -> tuple[float, Event]:
        """Wait for an event after `after` that `wanted` accepts; return its time and the event."""

        def found() -> tuple[float, Event] | None:
            return next((each for each in self.seen if each[0] > after and wanted(each[1])), None)

        with self._changed:
            self._changed.wait_for(lambda: found() or self._ended)
            if event := found():
                return event
        raise AssertionError(self.log(CHIEF)[-3000:])

    def end(self) -> None:
        with self._starting:
            self._is_over = True
        for pod in self.pods.values():
            _remove(pod)

    def log(self, task: Task) -> str:
        return (self.folder / f"{task}.log").read_text(encoding="utf-8")

    def supervise(self) -> int:
        """Restart the chief whenever it has lost its cluster; return its final exit code."""
        while True:
            pod = self.pods.get(CHIEF)
            code = pod.process.wait() if pod else None
            if self.pods.get(CHIEF) is not pod or pod is None:
                time.sleep(0.1)
                continue
            if code != BEGIN_AGAIN:
                with self._changed:
                    self._ended = True
                    self._changed.notify_all()
                return code or 0
            self.lost.append(time.monotonic())
            time.sleep(PAUSE_SECONDS)
            pod.process = self._process(CHIEF, pod.namespace)

    def read_events(self, pipe: Path) -> None:
        # Also open the pipe for writing, so that it is not at its end between two chiefs.
        with os.fdopen(os.open(pipe, os.O_RDWR), encoding="utf-8") as lines:
            for line in lines:
                if event := events.parse(line):
                    with self._changed:
                        self.seen.append((time.monotonic(), event))
                        self._changed.notify_all()

    def _process(self, task: Task, namespace: str) -> subprocess.Popen[bytes]:
        settings = {
            **os.environ,
            **signals.parent_environment(),
            "GRPC_FAIL_FAST": "use_caller",
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "TF_CONFIG": self.cluster.tf_config(task),
            **({} if task == CHIEF else {"TF_USE_LEGACY_KERAS": "1"}),
            **self.environment,
        }
        uris = ["--dataset", self.dataset, "--checkpoints", self.checkpoints]
        workdir = ["--workdir", str(self.folder / str(task))]
        stage = ["--config", str(self.folder / "config.json"), *workdir]
        inside = ["ip", "netns", "exec", namespace, sys.executable]
        with (self.folder / f"{task}.log").open("ab") as log:
            return subprocess.Popen(
                [*inside, "-m", "flotilla.trainer", "task", *stage, *uris],
                env=settings,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )


def _later(seconds: float, act: Callable[[], object]) -> None:
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()


def _remove(pod: Pod) -> None:
    pod.process.kill()
    pod.process.wait()
    # Delete the link explicitly, because the kernel removes namespaces slowly and link names are
    # reused.
    _ip("link", "del", pod.link("v"))
    _ip("netns", "del", pod.namespace)
    shutil.rmtree(Path("/etc/netns") / pod.namespace, ignore_errors=True)


@contextmanager
def pods(
    folder: Path,
    dataset: str,
    config: Mapping[str, Any],
    roles: Mapping[str, int],
    *,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Pods]:
    """Start a pod for each task, with more environment variables; remove the pods at the end."""
    addresses = {
        role: tuple(f"run-{role}-{index}.{DOMAIN}:{PORT}" for index in range(count))
        for role, count in roles.items()
    }
    pipe = folder / "events"
    os.mkfifo(pipe)
    (folder / "config.json").write_text(parse_config(config).model_dump_json(), encoding="utf-8")
    with ExitStack() as stack:
        # The bridge has a fixed MAC address. Otherwise its address would change whenever a pod is
        # added or removed, and the pods would lose it.
        _ip("link", "add", PREFIX, "address", "02:00:00:00:00:01", "type", "bridge")
        stack.callback(_ip, "link", "del", PREFIX)
        _ip("addr", "add", f"{ROUTER}/15", "dev", PREFIX)
        _ip("link", "set", PREFIX, "up")
        server = NameServer(ROUTER)
        stack.callback(server.close)
        variables = {**(environment or {}), events.VARIABLE: str(pipe)}
        found = Pods(folder, dataset, Cluster(addresses=addresses), server, variables)
        stack.callback(found.end)
        threading.Thread(target=found.read_events, args=(pipe,), daemon=True).start()
        for role, count in roles.items():
            for index in range(count):
                found.start(Task(role=role, index=index))
        threading.Thread(target=found.supervise, daemon=True).start()
        yield found

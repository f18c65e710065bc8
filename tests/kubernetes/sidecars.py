"""The init containers of a pod, as the kubelet runs them, including native sidecars.

A native sidecar is an init container with `restartPolicy: Always`; the sources are KEP-753 and
`pkg/kubelet/kuberuntime`. Init containers start in order. Each one starts when the previous one has
ended or, if that is a sidecar, when its startup probe has succeeded. A sidecar that ends is
restarted, whatever its exit code. After the pod's last container has ended, the sidecars get
SIGTERM in reverse order, and SIGKILL at the end of the pod's grace period; their exit codes are
ignored.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tests.kubernetes.logs import Logs

Begin = Callable[[], "subprocess.Popen[bytes]"]
# Reports the name, restart count and state of an init container.
Report = Callable[[str, int, Mapping[str, Any]], None]
PROBE_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True)
class InitContainer:
    name: str
    begin: Begin
    probe: Callable[[], bool] | None
    is_sidecar: bool


class InitContainers:
    """The init containers of one pod; `start` returns when the other containers may start."""

    def __init__(self, uid: str, found: list[InitContainer], logs: Logs, report: Report) -> None:
        self._uid, self._found, self._logs, self._report = uid, found, logs, report
        self._ending = threading.Event()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._threads: dict[str, threading.Thread] = {}
        self._lock = threading.Lock()
        self.crash_seconds = 10.0

    def start(self) -> bool:
        """Start all containers in order; return False if the pod ends before all have started."""
        for each in self._found:
            if not self._begin(each):
                return False
            target = self._keep if each.is_sidecar else self._wait
            thread = threading.Thread(target=target, args=(each,), daemon=True)
            self._threads[each.name] = thread
            thread.start()
            if not each.is_sidecar:
                thread.join()
            while each.is_sidecar and each.probe and not each.probe():
                if self._ending.wait(PROBE_SECONDS):
                    return False
        return not self._ending.is_set()

    def stop(self, seconds: float) -> None:
        """Stop the sidecars in reverse order, within the rest of the pod's grace period."""
        with self._lock:
            self._ending.set()
        for each in reversed(self._found):
            if each.name in self._threads:
                self._signal(each.name, signal.SIGTERM)
                self._threads[each.name].join(seconds)
                self._signal(each.name, signal.SIGKILL)
                self._threads[each.name].join()

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        self._signal(name, number)

    def _begin(self, each: InitContainer) -> bool:
        with self._lock:
            if self._ending.is_set():
                return False
            self._processes[each.name] = each.begin()
            return True

    def _keep(self, each: InitContainer) -> None:
        """Restart a sidecar whenever it ends; the first restart has no delay."""
        restarts = 0
        while True:
            code = self._wait(each, restarts)
            self._report(each.name, restarts, {"terminated": {"exitCode": code}})
            pause = self.crash_seconds * 2 ** (restarts - 1) if restarts else 0.0
            if self._ending.wait(pause) or not self._begin(each):
                return
            restarts += 1

    def _wait(self, each: InitContainer, restarts: int = 0) -> int:
        process = self._processes[each.name]
        self._report(each.name, restarts, {"running": {}})
        key = log_of(self._uid, each.name)
        assert process.stdout
        with process.stdout:
            for line in process.stdout:
                self._logs.write(key, restarts, line.decode(errors="replace").rstrip("\n"))
        code = process.wait()
        self._logs.end(key, restarts)
        return code if code >= 0 else 128 - code

    def _signal(self, name: str, number: int) -> None:
        process = self._processes[name]
        # Once a process has been reaped, its PID may belong to another process.
        if process.returncode is None:
            with suppress(ProcessLookupError):
                (os.killpg if number == signal.SIGKILL else os.kill)(process.pid, number)


def log_of(uid: str, container: str) -> str:
    return f"{uid}/{container}"

"""Runs the containers of every pod as local processes, for tests that train models.

Volumes and images are described in `tests.kubernetes.containers`, init containers in
`tests.kubernetes.sidecars`. Memory and nodes are not simulated.
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from tests.kubernetes.containers import Command, Node
from tests.kubernetes.job_controller import ENDED, is_tracked
from tests.kubernetes.logs import Logs
from tests.kubernetes.pods import (
    ended,
    evicted,
    finished,
    initializing,
    restarted,
    running,
    waiting,
)
from tests.kubernetes.resolver import ADDRESS
from tests.kubernetes.sidecars import InitContainer, InitContainers
from tests.kubernetes.store import RefusedError, Store, Tree
from tests.ports import held_port

RESYNC_SECONDS = 0.2
# Default grace period of a pod, in seconds.
GRACE_SECONDS = 30
MESSAGE_BYTES = 4096
LONGEST_CRASH = 300.0


class Kubelet:
    """A single node for all pods; when the `with` block ends, it kills them."""

    def __init__(
        self,
        store: Store,
        logs: Logs,
        folder: Path,
        environment: Mapping[str, str],
        secrets: Mapping[str, Mapping[str, str]],
    ) -> None:
        self.crash_seconds = 10.0
        self._store = store
        self._logs = logs
        self.node = Node(folder, environment, secrets)
        self._ports: dict[str, str] = {}
        self._holders = ExitStack()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._commands: dict[str, Command] = {}
        self._inits: dict[str, InitContainers] = {}
        self._begun: set[str] = set()
        self._killers: dict[str, threading.Timer] = {}
        self._followers: list[threading.Thread] = []
        self._evicted: dict[str, str] = {}
        self._reasons: dict[str, str] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        store.graceful.add("pods")

    def __enter__(self) -> Kubelet:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        with self._store.changed:
            self._stopping = True
            self._store.changed.notify_all()
        self._thread.join()
        for timer in self._killers.values():
            timer.cancel()
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for inits in self._inits.values():
            inits.stop(0.0)
        for follower in self._followers:
            follower.join()
        self._holders.close()
        self.node.addresses.close()

    def kill(
        self, namespace: str, name: str, number: int = signal.SIGKILL, reason: str = ""
    ) -> None:
        """Send a signal to a container's process group; a reason such as OOMKilled is reported."""
        uid = self._store.get("pods", namespace, name)["metadata"]["uid"]
        self._reasons[uid] = reason
        os.killpg(self._processes[uid].pid, number)

    def kill_task(self, namespace: str, name: str, number: int = signal.SIGKILL) -> None:
        """Send a signal only to the direct children of a pod's first process."""
        uid = self._store.get("pods", namespace, name)["metadata"]["uid"]
        first = self._processes[uid].pid
        for pid in Path(f"/proc/{first}/task/{first}/children").read_text("ascii").split():
            os.kill(int(pid), number)

    def kill_sidecar(self, namespace: str, name: str, number: int = signal.SIGKILL) -> None:
        pod = self._store.get("pods", namespace, name)
        for each in pod["spec"]["initContainers"]:
            self._inits[pod["metadata"]["uid"]].kill(each["name"], number)

    def alive(self) -> list[str]:
        """Return the commands of the pods whose first process is still running."""
        return [str(each.args) for each in self._processes.values() if each.poll() is None]

    def evict(self, namespace: str, name: str, message: str) -> None:
        """Evict a pod as if its node were short of a resource."""
        uid = self._store.get("pods", namespace, name)["metadata"]["uid"]
        self._evicted[uid] = message
        os.killpg(self._processes[uid].pid, signal.SIGKILL)

    def _run(self) -> None:
        while not self._stopping:
            with self._store.changed:
                pods = self._store.all("pods")
                for pod in pods:
                    self._reconcile(pod)
                # A forced deletion removes a pod from the API before its processes have ended.
                for uid in self._processes.keys() - {pod["metadata"]["uid"] for pod in pods}:
                    self._kill(self._processes[uid])
                self._store.changed.wait(RESYNC_SECONDS)

    def _reconcile(self, pod: Tree) -> None:
        uid = pod["metadata"]["uid"]
        is_terminating = bool(pod["metadata"].get("deletionTimestamp"))
        process = self._processes.get(uid)
        if is_terminating and process is None:
            if uid in self._inits:
                threading.Thread(target=self._inits[uid].stop, args=(0.0,), daemon=True).start()
            self._store.remove("pods", pod["metadata"]["namespace"], pod["metadata"]["name"])
        elif is_terminating and process and uid not in self._killers:
            self._terminate(pod, process)
        elif uid not in self._begun and pod["status"]["phase"] == "Pending":
            self._begun.add(uid)
            self._start(pod)

    def _start(self, pod: Tree) -> None:
        uid = pod["metadata"]["uid"]
        address = self.node.addresses.of(pod)
        # In a real cluster, every pod has its own address; here, all pods of a TFJob share one.
        more = {ADDRESS: address} if address else {"FLOTILLA_GUARD_PORT": self._guard_port(pod)}
        found = [
            self._init_container(pod, each, more) for each in pod["spec"].get("initContainers", [])
        ]
        if found:
            report = functools.partial(self._report, pod)
            self._inits[uid] = InitContainers(uid, found, self._logs, report)
            self._inits[uid].crash_seconds = self.crash_seconds
        begin = functools.partial(self._run_pod, pod, more, address)
        follower = threading.Thread(target=begin)
        self._followers.append(follower)
        if not found:
            # Start a pod without init containers at once, before the store changes again.
            self._begin(pod, more, address)
        follower.start()

    def _init_container(self, pod: Tree, tree: Tree, more: Mapping[str, str]) -> InitContainer:
        probe = tree.get("startupProbe", {}).get("exec", {}).get("command")
        asks = self.node.command(pod, tree, more, probe).succeeds if probe else None
        return InitContainer(
            name=tree["name"],
            begin=self.node.command(pod, tree, more).begin,
            probe=asks,
            is_sidecar=tree.get("restartPolicy") == "Always",
        )

    def _report(self, pod: Tree, name: str, restarts: int, state: Mapping[str, Any]) -> None:
        with self._store.changed, suppress(RefusedError):
            found = self._store.get("pods", *_key(pod))
            if found["metadata"]["uid"] == pod["metadata"]["uid"]:
                initializing(self._store, found, name, restarts, dict(state))

    def _begin(self, pod: Tree, more: Mapping[str, str], address: str) -> None:
        command = self.node.command(pod, pod["spec"]["containers"][0], more)
        self._commands[pod["metadata"]["uid"]] = command
        self._processes[pod["metadata"]["uid"]] = command.begin()
        running(self._store, self._store.get("pods", *_key(pod)), address)

    def _run_pod(self, pod: Tree, more: Mapping[str, str], address: str) -> None:
        uid = pod["metadata"]["uid"]
        inits = self._inits.get(uid)
        if inits:
            is_started = inits.start()
            with self._store.changed:
                if not is_started or not self._stays(pod):
                    return
                self._begin(pod, more, address)
        command = self._commands[uid]
        self._follow(pod, command.begin, command.message)

    def _follow(
        self, pod: Tree, begin: Callable[[], subprocess.Popen[bytes]], message: Path
    ) -> None:
        uid = pod["metadata"]["uid"]
        for restarts in itertools.count():
            code = self._wait(uid, restarts)
            with self._store.changed:
                if not code or not self._begins_again(pod, restarts):
                    break
                self._processes[uid] = begin()
                restarted(self._store, self._store.get("pods", *_key(pod)), code)
        lines = [text for _, text in self._logs.of(uid, restarts).lines]
        text = message.read_text(encoding="utf-8") if message.is_file() else "\n".join(lines)
        self._end_sidecars(pod, code, text)
        with self._store.changed, suppress(RefusedError):
            found = self._store.get("pods", *_key(pod))
            # After a forced deletion, a new pod may have the same name.
            if found["metadata"]["uid"] != uid:
                return
            finished(self._store, found, code, text[-MESSAGE_BYTES:], self._reasons.get(uid, ""))
            if uid in self._evicted:
                evicted(self._store, self._store.get("pods", *_key(pod)), self._evicted[uid])
            if self._store.get("pods", *_key(pod))["metadata"].get("deletionTimestamp"):
                self._store.remove("pods", *_key(pod))

    def _end_sidecars(self, pod: Tree, code: int, text: str) -> None:
        """Stop the sidecars after the pod's main container ends, before the pod's phase changes."""
        uid = pod["metadata"]["uid"]
        if uid not in self._inits:
            return
        grace = 0.0
        with self._store.changed, suppress(RefusedError):
            found = self._store.get("pods", *_key(pod))
            if found["metadata"]["uid"] == uid:
                grace = float(pod["spec"].get("terminationGracePeriodSeconds", GRACE_SECONDS))
                reason = self._reasons.get(uid, "")
                ended(self._store, found, code, text[-MESSAGE_BYTES:], reason)
        self._inits[uid].stop(0.0 if self._stopping else grace)

    def _wait(self, uid: str, restarts: int) -> int:
        """Copy a container's output to its log until it ends, and return its exit code."""
        process = self._processes[uid]
        assert process.stdout
        with process.stdout:
            for line in process.stdout:
                self._logs.write(uid, restarts, line.decode(errors="replace").rstrip("\n"))
        code = process.wait()
        # When a container's first process has ended, kill its other processes.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        self._logs.end(uid, restarts)
        return code if code >= 0 else 128 - code

    def _begins_again(self, pod: Tree, restarts: int) -> bool:
        """Return whether a container of a Job's pod restarts, after waiting for the back-off."""
        if pod["spec"].get("restartPolicy") != "OnFailure" or not is_tracked(pod):
            return False
        delay = min(LONGEST_CRASH, self.crash_seconds * 2 ** (restarts - 1)) if restarts else 0.0
        if delay and self._stays(pod):
            words = f"back-off {delay:g}s restarting failed container=tensorflow"
            found = self._store.get("pods", *_key(pod))
            waiting(self._store, found, "CrashLoopBackOff", words)
            self._store.changed.wait_for(lambda: not self._stays(pod), timeout=delay)
        return self._stays(pod)

    def _stays(self, pod: Tree) -> bool:
        uid = pod["metadata"]["uid"]
        with suppress(RefusedError):
            meta = self._store.get("pods", *_key(pod))["metadata"]
            is_going = self._stopping or uid in self._evicted or "deletionTimestamp" in meta
            return bool(meta["uid"] == uid) and not is_going
        return False

    def _terminate(self, pod: Tree, process: subprocess.Popen[bytes] | None) -> None:
        assert process
        uid = pod["metadata"]["uid"]
        if process.poll() is not None:
            # Remove the pod only after the exit of its process has been reported with its message.
            if pod["status"]["phase"] in ENDED:
                self._store.remove("pods", *_key(pod))
            return
        process.send_signal(signal.SIGTERM)
        grace = pod["metadata"]["deletionGracePeriodSeconds"]
        self._killers[uid] = threading.Timer(grace, self._kill, (process,))
        self._killers[uid].daemon = True
        self._killers[uid].start()

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        # Once a process has been reaped, its PID may belong to another process.
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def _guard_port(self, pod: Tree) -> str:
        owner = pod["metadata"]["ownerReferences"][0]["uid"]
        if owner not in self._ports:
            self._ports[owner] = str(self._holders.enter_context(held_port()))
        return self._ports[owner]


def _key(pod: Tree) -> tuple[str, str]:
    return pod["metadata"]["namespace"], pod["metadata"]["name"]

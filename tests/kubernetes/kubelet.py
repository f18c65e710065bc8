"""Runs the command of every pod as a local process, for tests that train.

Each pod has a folder with its mounts; the mount paths are replaced in its command, its working
folder and its variables. Memory, nodes and images are ignored.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from tests.kubernetes.addresses import Addresses
from tests.kubernetes.downward import field_of
from tests.kubernetes.job_controller import is_tracked
from tests.kubernetes.logs import Logs
from tests.kubernetes.pods import evicted, finished, restarted, running, waiting
from tests.kubernetes.resolver import ADDRESS, SITE
from tests.kubernetes.store import RefusedError, Store, Tree
from tests.ports import held_port

ROOT = Path(__file__).parents[2]
RESYNC_SECONDS = 0.2
MESSAGE_BYTES = 4096
LONGEST_CRASH = 300.0


class Kubelet:
    """One node for all pods; as a context manager it kills them at the end of the block."""

    def __init__(
        self,
        store: Store,
        logs: Logs,
        folder: Path,
        environment: Mapping[str, str],
        secrets: Mapping[str, Mapping[str, str]],
    ) -> None:
        self.addresses = Addresses({})
        self.crash_seconds = 10.0
        self._store = store
        self._logs = logs
        self._folder = folder
        self._environment = environment
        self._secrets = secrets
        self._ports: dict[str, str] = {}
        self._holders = ExitStack()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._killers: dict[str, threading.Timer] = {}
        self._followers: list[threading.Thread] = []
        self._evicted: dict[str, str] = {}
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
        for follower in self._followers:
            follower.join()
        self._holders.close()
        self.addresses.close()

    def kill(self, namespace: str, name: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to all processes of a pod, as the kernel does when it is out of memory."""
        uid = self._store.get("pods", namespace, name)["metadata"]["uid"]
        os.killpg(self._processes[uid].pid, number)

    def kill_task(self, namespace: str, name: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to the direct children of a pod's first process only."""
        uid = self._store.get("pods", namespace, name)["metadata"]["uid"]
        first = self._processes[uid].pid
        for pid in Path(f"/proc/{first}/task/{first}/children").read_text("ascii").split():
            os.kill(int(pid), number)

    def alive(self) -> list[str]:
        """Return the commands of the pods whose first process has not ended."""
        return [str(each.args) for each in self._processes.values() if each.poll() is None]

    def evict(self, namespace: str, name: str, message: str) -> None:
        """Kill a pod because the node is short of a resource."""
        uid = self._store.get("pods", namespace, name)["metadata"]["uid"]
        self._evicted[uid] = message
        os.killpg(self._processes[uid].pid, signal.SIGKILL)

    def _run(self) -> None:
        while not self._stopping:
            with self._store.changed:
                pods = self._store.all("pods")
                for pod in pods:
                    self._reconcile(pod)
                # A forced deletion removes a pod from the API before its node does.
                for uid in self._processes.keys() - {pod["metadata"]["uid"] for pod in pods}:
                    self._kill(self._processes[uid])
                self._store.changed.wait(RESYNC_SECONDS)

    def _reconcile(self, pod: Tree) -> None:
        uid = pod["metadata"]["uid"]
        is_terminating = bool(pod["metadata"].get("deletionTimestamp"))
        process = self._processes.get(uid)
        if is_terminating and process is None:
            self._store.remove("pods", pod["metadata"]["namespace"], pod["metadata"]["name"])
        elif is_terminating and uid not in self._killers:
            self._terminate(pod, process)
        elif process is None and pod["status"]["phase"] == "Pending":
            self._start(pod)

    def _start(self, pod: Tree) -> None:
        uid = pod["metadata"]["uid"]
        container = pod["spec"]["containers"][0]
        folder = self._folder / f"{pod['metadata']['name']}-{uid[:8]}"
        folder.mkdir(parents=True)
        mounts = {}
        for mount in container.get("volumeMounts", []):
            (folder / mount["name"]).mkdir()
            mounts[mount["mountPath"]] = str(folder / mount["name"])
        variables = self._variables(pod, container)
        words = [*container["command"], *container.get("args", [])]
        command = [expanded(word, variables) for word in words]
        address = self.addresses.of(pod)
        environment = {
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "PYTHONPATH": f"{self._site()}:{ROOT}",
            "FLOTILLA_PARENT": str(os.getpid()),
            # On a cluster every pod has its own address; here the pods of a TFJob share one.
            **({ADDRESS: address} if address else {"FLOTILLA_GUARD_PORT": self._guard_port(pod)}),
            **self._environment,
            # Only these contain paths of the pod's file system.
            **{k: _mounted(v, mounts) for k, v in variables.items()},
        }
        words = [_mounted(word, mounts) for word in command]
        place = _mounted(container.get("workingDir", str(folder)), mounts)
        begin = functools.partial(_begin, words, place, environment)
        self._processes[uid] = begin()
        message = Path(_mounted(container.get("terminationMessagePath", "/none"), mounts))
        running(self._store, pod, address)
        follower = threading.Thread(target=self._follow, args=(pod, begin, message))
        self._followers.append(follower)
        follower.start()

    def _follow(
        self, pod: Tree, begin: Callable[[], subprocess.Popen[bytes]], message: Path
    ) -> None:
        """Follow the container of a pod and its restarts to the end."""
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
        with self._store.changed, suppress(RefusedError):
            found = self._store.get("pods", *_key(pod))
            # After a forced deletion another pod may have the name.
            if found["metadata"]["uid"] != uid:
                return
            finished(self._store, found, code, text[-MESSAGE_BYTES:])
            if uid in self._evicted:
                evicted(self._store, self._store.get("pods", *_key(pod)), self._evicted[uid])
            if self._store.get("pods", *_key(pod))["metadata"].get("deletionTimestamp"):
                self._store.remove("pods", *_key(pod))

    def _wait(self, uid: str, restarts: int) -> int:
        """Write the log of a container until it ends, and return its exit code."""
        process = self._processes[uid]
        assert process.stdout
        with process.stdout:
            for line in process.stdout:
                self._logs.write(uid, restarts, line.decode(errors="replace").rstrip("\n"))
        code = process.wait()
        # No process of a container outlives its first one.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        self._logs.end(uid, restarts)
        return code if code >= 0 else 128 - code

    def _begins_again(self, pod: Tree, restarts: int) -> bool:
        """Return whether a container of a Job's pod restarts, after the back-off."""
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
        """Return whether a pod exists and is not being deleted."""
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
            self._store.remove("pods", *_key(pod))
            return
        process.send_signal(signal.SIGTERM)
        grace = pod["metadata"]["deletionGracePeriodSeconds"]
        self._killers[uid] = threading.Timer(grace, self._kill, (process,))
        self._killers[uid].daemon = True
        self._killers[uid].start()

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        # Once it has been reaped, another process may have its PID.
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def _site(self) -> Path:
        """Return a folder that installs the name resolver in every Python process of a pod."""
        folder = self._folder / "site"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "sitecustomize.py").write_text(SITE, encoding="utf-8")
        return folder

    def _guard_port(self, pod: Tree) -> str:
        owner = pod["metadata"]["ownerReferences"][0]["uid"]
        if owner not in self._ports:
            self._ports[owner] = str(self._holders.enter_context(held_port()))
        return self._ports[owner]

    def _variables(self, pod: Tree, container: Tree) -> dict[str, str]:
        values: dict[str, str] = {}
        for source in container.get("envFrom", []):
            values |= self._secrets.get(source.get("secretRef", {}).get("name", ""), {})
        for each in container.get("env", []):
            if "value" in each:
                text = expanded(each["value"], values)
                values[each["name"]] = self.addresses.mapped(pod, each["name"], text)
                continue
            if "fieldRef" in each["valueFrom"]:
                values[each["name"]] = field_of(pod, each["valueFrom"]["fieldRef"]["fieldPath"])
                continue
            reference = each["valueFrom"]["secretKeyRef"]
            found = self._secrets.get(reference["name"], {}).get(reference["key"])
            if found is not None:
                values[each["name"]] = found
        return values


def _begin(command: list[str], folder: str, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def expanded(text: str, values: Mapping[str, str]) -> str:
    """Replace `$(NAME)` where NAME is known, and `$$` by `$`, as Kubernetes does."""

    def by(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return values.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_]*)\)", by, text)


def _mounted(text: str, mounts: Mapping[str, str]) -> str:
    for path, place in mounts.items():
        if text == path or text.startswith(f"{path}/"):
            return place + text[len(path) :]
    return text


def _key(pod: Tree) -> tuple[str, str]:
    return pod["metadata"]["namespace"], pod["metadata"]["name"]

"""Runs the containers of a pod as local processes, with their mounts, variables and images.

Each pod has a folder with its volumes. Mount paths are replaced in the command, working directory
and environment variables of its containers. An image is a folder whose `bin/python3` cannot import
Flotilla; for an unknown image, Flotilla's own is used.
"""

from __future__ import annotations

import inspect
import itertools
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kubernetes import resolver
from tests.kubernetes.store import Tree
from tests.ports import held_port

ROOT = Path(__file__).parents[2]
PROBE_SECONDS = 30
_USUAL_PATH = "/usr/bin:/bin"
_TFJOB = "training.kubeflow.org/job-name"
_MAPPING = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")


@dataclass(frozen=True, kw_only=True)
class Command:
    words: list[str]
    folder: str
    environment: dict[str, str]
    message: Path

    def begin(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.words,
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def succeeds(self) -> bool:
        """Run the process until it ends, as a probe does; return whether its exit code was 0."""
        with suppress(OSError, subprocess.TimeoutExpired):
            ended = subprocess.run(
                self.words,
                cwd=self.folder,
                env=self.environment,
                capture_output=True,
                timeout=PROBE_SECONDS,
                check=False,
            )
            return ended.returncode == 0
        return False


class Addresses:
    """Gives each pod that has a hostname, such as a pod of a JobSet, its own loopback address.

    TensorFlow's server listens on all addresses, so each pod also gets a free port. Connections to
    the port in the manifest are relayed to the free port.
    """

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
            ports[asked] = self._held.enter_context(held_port())
        return f'"{found[1]}:{ports[asked]}"'

    def close(self) -> None:
        self._held.close()


class Node:
    """State that the containers of all pods on this machine share."""

    def __init__(
        self, folder: Path, environment: Mapping[str, str], secrets: Mapping[str, Mapping[str, str]]
    ) -> None:
        self.addresses = Addresses({})
        self.images: dict[str, Path] = {}
        self._folder, self._environment, self._secrets = folder, environment, secrets

    def command(
        self, pod: Tree, container: Tree, more: Mapping[str, str], words: list[str] | None = None
    ) -> Command:
        """Return the main process of a container, or another process in it, such as a probe."""
        folder = self._folder / f"{pod['metadata']['name']}-{pod['metadata']['uid'][:8]}"
        image = self.images.get(container.get("image", ""))
        mounts = {}
        for mount in container.get("volumeMounts", []):
            volume = folder / mount["name"]
            # Containers of the same pod share its volumes.
            volume.mkdir(parents=True, exist_ok=True)
            mounts[mount["mountPath"]] = str(volume)
        folder.mkdir(parents=True, exist_ok=True)
        variables = self._variables(pod, container)
        words = words or [*container["command"], *container.get("args", [])]
        named = container.get("workingDir", "")
        place = mounted(named, mounts) if named else str(image or folder)
        message = container.get("terminationMessagePath", "/none")
        return Command(
            words=[mounted(expanded(word, variables), mounts) for word in words],
            folder=place,
            environment={
                **self._paths(image),
                "FLOTILLA_PARENT": str(os.getpid()),
                **more,
                **self._environment,
                # Only values from the manifest contain paths in the pod's file system.
                **{name: mounted(value, mounts) for name, value in variables.items()},
            },
            message=Path(mounted(message, mounts)),
        )

    def _paths(self, image: Path | None) -> dict[str, str]:
        site = self._folder / ("site-of-images" if image else "site")
        if not site.is_dir():
            # `sitecustomize` installs the name resolver in every Python process of a pod.
            text = f"{inspect.getsource(resolver)}\n\ninstall()\n" if image else resolver.SITE
            site.mkdir(parents=True)
            (site / "sitecustomize.py").write_text(text, encoding="utf-8")
        if image:
            return {"PATH": f"{image / 'bin'}:{_USUAL_PATH}", "PYTHONPATH": str(site)}
        path = f"{Path(sys.executable).parent}:{_USUAL_PATH}"
        return {"PATH": path, "PYTHONPATH": f"{site}:{ROOT}"}

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


def expanded(text: str, values: Mapping[str, str]) -> str:
    """Replace `$(NAME)` if NAME is known, and `$$` with `$`, as Kubernetes does."""

    def by(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return values.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_]*)\)", by, text)


def mounted(text: str, mounts: Mapping[str, str]) -> str:
    """Replace a mount path at the beginning of a text with the local path."""
    for path, place in mounts.items():
        if text == path or text.startswith(f"{path}/"):
            return place + text[len(path) :]
    return text


def field_of(pod: Tree, path: str) -> str:
    """Return the value of a `fieldRef`; empty if the pod lacks the label or annotation."""
    found = _MAPPING.fullmatch(path)
    if found:
        return str((pod["metadata"].get(found[1]) or {}).get(found[2], ""))
    node: Any = pod
    for key in path.split("."):
        node = (node or {}).get(key)
    return "" if node is None else str(node)

"""The cluster as data: its tasks with their addresses, and the tasks that each strategy needs.

`TF_CONFIG` is TensorFlow's format (https://www.tensorflow.org/guide/distributed_training, "Setting
up the TF_CONFIG environment variable"). Flags such as `--ps_hosts` come from TensorFlow's published
examples.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flotilla.trainer.runtime.errors import ConfigError, UserError, nearest

ROLES = ("chief", "ps", "worker", "evaluator")
_ADDRESS = re.compile(r"(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True, kw_only=True)
class Task:
    """One process of the cluster."""

    role: str
    index: int

    def __str__(self) -> str:
        """Return `role-index`, the name of the task's folder and the suffix of its pod's name."""
        return f"{self.role}-{self.index}"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The addresses (`host:port`) of all training tasks by role, without the evaluator."""

    addresses: Mapping[str, tuple[str, ...]]

    def count(self, role: str) -> int:
        """Return the number of tasks of this role."""
        return len(self.addresses.get(role, ()))

    def address(self, task: Task) -> str:
        """Return `host:port` of a task."""
        return self.addresses[task.role][task.index]

    def tf_config(self, task: Task) -> str:
        """Return the TF_CONFIG of one task as JSON."""
        this = {"type": task.role, "index": task.index}
        return json.dumps({"cluster": self.spec(), "task": this})

    def spec(self) -> dict[str, list[str]]:
        """Return the argument of `tf.train.ClusterSpec`."""
        return {role: list(hosts) for role, hosts in self.addresses.items()}


def from_tf_config(text: str) -> tuple[Cluster, Task]:
    """Parse TF_CONFIG into the cluster and this process's task. Raises `ConfigError`.

    The cluster excludes the evaluator, because TensorFlow would wait for it forever.
    """
    if not text.strip():
        raise ConfigError(
            "TF_CONFIG is not set; start the task with the launcher or the TFJob operator, or give "
            "--job_name and the hosts of each role"
        )
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"TF_CONFIG is not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError("TF_CONFIG must be an object with 'cluster' and 'task'")
    return _read("TF_CONFIG", tree)


def from_flags(hosts: Mapping[str, str], job_name: str, task_index: int) -> tuple[Cluster, Task]:
    """Parse the flags of TensorFlow's published examples into the cluster and this task.

    `hosts` has a string `host:port,host:port` for each role. Raises `ConfigError`.
    """
    named = {role: text.split(",") for role, text in hosts.items() if text}
    task = {"type": job_name, "index": task_index}
    return _read("the flags", {"cluster": named, "task": task})


def _read(source: str, tree: Mapping[str, Any]) -> tuple[Cluster, Task]:
    addresses = _addresses(source, tree.get("cluster"))
    task = _task(source, tree.get("task"))
    if task.role != "evaluator" and task.index >= len(addresses.get(task.role, ())):
        raise ConfigError(f"{source}: task {task} is not in the cluster")
    training = {role: hosts for role, hosts in addresses.items() if role != "evaluator"}
    return Cluster(addresses=training), task


def check_port(cluster: Cluster, task: Task) -> None:
    """Raise a `UserError` if another process listens on the port of `task`."""
    address = cluster.address(task)
    port = int(address.rpartition(":")[2])
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise UserError(
                f"{task} cannot serve on {address}: {error.strerror}; "
                "end the process that uses the port, or give the task another port"
            ) from None


def _addresses(source: str, tree: Any) -> dict[str, tuple[str, ...]]:
    if not isinstance(tree, dict) or not tree:
        raise ConfigError(f"{source}: 'cluster' must map roles to lists of host:port")
    seen: set[str] = set()
    addresses: dict[str, tuple[str, ...]] = {}
    for role, hosts in tree.items():
        if role not in ROLES:
            raise ConfigError(f"{source}: there is no role {role!r}{_hint(role)}")
        if not isinstance(hosts, list):
            raise ConfigError(f"{source}: the tasks of {role!r} must be a list of host:port")
        for host in hosts:
            match = _ADDRESS.fullmatch(host) if isinstance(host, str) else None
            if not match or not 0 < int(match["port"]) < 2**16:
                raise ConfigError(f"{source}: {host!r} of {role!r} is not host:port")
            if host in seen:
                raise ConfigError(f"{source}: {host} is in the cluster twice")
            seen.add(host)
        addresses[role] = tuple(hosts)
    return addresses


def _task(source: str, tree: Any) -> Task:
    if not isinstance(tree, dict):
        raise ConfigError(f"{source}: 'task' must be an object with 'type' and 'index'")
    role, index = tree.get("type"), tree.get("index", 0)
    if role not in ROLES:
        raise ConfigError(f"{source}: there is no task type {role!r}{_hint(str(role))}")
    if isinstance(index, str) and re.fullmatch(r"[0-9]{1,5}", index):
        index = int(index)
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        raise ConfigError(f"{source}: task index {index!r} is not a whole number of at least 0")
    return Task(role=role, index=index)


def _hint(role: str) -> str:
    return nearest(role, ROLES) or f" (one of {', '.join(ROLES)})"


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The capabilities of a strategy. A user's class inherits those of its base class.

    Attributes:
        spares_workers: a lost worker does not stop training or cause a new attempt.
        mixes_steps: training is asynchronous. Variables may contain values of different global
            steps, and an update may apply a gradient that was computed at an earlier step.
        keeps_values: the next attempt may continue with the variables on the servers.
        aggregates: a step applies the first gradients that arrive (`replicas_to_aggregate`).
        copies: each worker has a copy of all variables.
        own_steps: a model may define its own `train_step`.
    """

    spares_workers: bool = False
    mixes_steps: bool = False
    keeps_values: bool = False
    aggregates: bool = False
    copies: bool = False
    own_steps: bool = False


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The roles of a strategy, its class, and its capabilities.

    Attributes:
        implementation: the class as `package.module:Class`.
        chief: whether there is a chief. Otherwise worker 0 publishes.
        servers: whether variables are on parameter servers.
        workers: whether there are workers. Otherwise the chief trains alone.
        counts: the number of tasks of each role, if the topology fixes it.
    """

    implementation: str
    capabilities: Capabilities = Capabilities()
    chief: bool = True
    servers: bool = True
    workers: bool = True
    counts: Mapping[str, int] = field(default_factory=dict)

    def tasks(self, *, servers: int, workers: int) -> dict[str, int]:
        """Return the number of tasks to start for each role, the chief last."""
        used = {
            "ps": servers * self.servers,
            "worker": workers * self.workers,
            "chief": int(self.chief),
        }
        used |= self.counts
        return {role: count for role, count in used.items() if count}

    def leads(self, task: Task) -> bool:
        """Return whether a task runs the outer loop.

        The chief runs it. Without a chief, worker 0 runs it if there are servers. Otherwise every
        worker does.
        """
        if self.chief or task.role != "worker":
            return task.role == "chief"
        return not self.servers or task.index == 0


TOPOLOGIES = {
    "single": Topology(
        implementation="flotilla.trainer.strategies.mirrored:Single",
        servers=False, workers=False, capabilities=Capabilities(own_steps=True)),
    "async_parameter_server": Topology(
        implementation="flotilla.trainer.strategies.async_parameter_server:AsyncParameterServer",
        capabilities=Capabilities(spares_workers=True, mixes_steps=True, keeps_values=True)),
    "sync_parameter_server": Topology(
        implementation="flotilla.trainer.strategies.sync_parameter_server:SyncParameterServer",
        capabilities=Capabilities(spares_workers=True, keeps_values=True, aggregates=True)),
    "in_graph": Topology(
        implementation="flotilla.trainer.strategies.parameter_server:InGraph",
        capabilities=Capabilities(keeps_values=True)),
    "multi_worker_mirrored": Topology(
        implementation="flotilla.trainer.strategies.mirrored:MultiWorkerMirrored",
        chief=False, servers=False, capabilities=Capabilities(copies=True, own_steps=True)),
}  # fmt: skip
#: Capabilities assumed before a user's class is imported: it may be asynchronous, and may continue
#: after losing a worker.
OWN = Capabilities(spares_workers=True, mixes_steps=True, keeps_values=True)


def find_topology(strategy: str) -> Topology:
    """Return the topology of a strategy. A user's class has a chief, servers and workers."""
    return TOPOLOGIES.get(strategy) or Topology(implementation=strategy, capabilities=OWN)


def leader(cluster: Cluster) -> Task:
    """Return the task that publishes: the chief, or worker 0 if there is no chief."""
    return Task(role="chief" if cluster.count("chief") else "worker", index=0)

"""Which tasks a strategy needs, and which of them leads. Free of TensorFlow.

Topology is data: launchers start what stands here, and roles that a strategy does not use are
never started.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.cluster import Cluster, Task


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The roles of a strategy.

    Attributes:
        chief: whether one task leads and only leads; otherwise every worker runs the outer loop
            and worker 0 publishes.
        servers: whether variables stand on parameter servers.
        workers: whether there are workers; otherwise the chief trains by itself.
    """

    chief: bool = True
    servers: bool = True
    workers: bool = True

    def tasks(self, *, servers: int, workers: int) -> dict[str, int]:
        """Return how many tasks of each role are to be started, the chief last."""
        used = {
            "ps": servers * self.servers,
            "worker": workers * self.workers,
            "chief": int(self.chief),
        }
        return {role: count for role, count in used.items() if count}

    def leads(self, task: Task) -> bool:
        """Say whether a task runs the outer loop."""
        return task.role == "chief" or (not self.chief and task.role == "worker")


_SERVED = Topology()
TOPOLOGIES = {
    "single": Topology(servers=False, workers=False),
    "async_parameter_server": _SERVED,
    "sync_parameter_server": _SERVED,
    "in_graph": _SERVED,
    "multi_worker_mirrored": Topology(chief=False, servers=False),
}


def topology_of(strategy: str) -> Topology:
    """Return the topology of a strategy; the user's own classes get chief, servers and workers."""
    return TOPOLOGIES.get(strategy, _SERVED)


def leader(cluster: Cluster) -> Task:
    """Return the task that publishes: the chief, or worker 0 where there is none."""
    return Task(role="chief" if cluster.count("chief") else "worker", index=0)

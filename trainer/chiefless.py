"""A cluster without a chief: worker 0 leads, and serves as a worker in a child process.

Published examples run parameter servers and workers only. The coordinator and a worker's server
cannot share a process, so worker 0 starts itself a second time for the one of the two.
"""

from __future__ import annotations

import os
import subprocess
import threading

from trainer import heartbeat, parent
from trainer.cluster import Cluster, Task
from trainer.local_ports import free_port

CHIEF = Task(role="chief", index=0)
FIRST_WORKER = Task(role="worker", index=0)


def with_chief(cluster: Cluster) -> Cluster:
    """Return the cluster with a chief on a free port of worker 0's host."""
    host, _, _ = cluster.address(FIRST_WORKER).rpartition(":")
    return Cluster(addresses={"chief": (f"{host}:{free_port()}",), **cluster.addresses})


def serve_beside(cluster: Cluster, command: list[str], restarts: int) -> None:
    """Serve as worker 0 in a child process with the command line of a task.

    It ends with this process, and is started again up to `restarts` times when it dies before.
    """
    # Signs of life are for whoever started this process.
    inherited = {name: value for name, value in os.environ.items() if name != heartbeat.VARIABLE}
    settings = {
        **inherited,
        **parent.environment(),
        "TF_CONFIG": cluster.tf_config(FIRST_WORKER),
        "TF_USE_LEGACY_KERAS": "1",
    }

    # Before this process changes into its folder: the user's own modules may stand here.
    here = os.getcwd()

    def keep() -> None:
        for _ in range(restarts + 1):
            subprocess.run(command, cwd=here, env=settings, stdin=subprocess.DEVNULL, check=False)

    threading.Thread(target=keep, name="worker-0", daemon=True).start()

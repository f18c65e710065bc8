"""A cluster without a chief: worker 0 leads, and serves as a worker in a child process.

Published examples run parameter servers and workers only. The coordinator and a worker's server
cannot share a process, so worker 0 starts itself a second time for the one of the two.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading

from trainer import parent
from trainer.cluster import Cluster, Task
from trainer.local_ports import free_port

CHIEF = Task(role="chief", index=0)
FIRST_WORKER = Task(role="worker", index=0)


def with_chief(cluster: Cluster) -> Cluster:
    """Return the cluster with a chief on a free port of worker 0's host."""
    host, _, _ = cluster.address(FIRST_WORKER).rpartition(":")
    return Cluster(addresses={"chief": (f"{host}:{free_port()}",), **cluster.addresses})


def serve_beside(cluster: Cluster, restarts: int) -> None:
    """Serve as worker 0 in a child process that gets the command line of this one.

    It ends with this process, and is started again up to `restarts` times when it dies before.
    """
    command = [sys.executable, "-m", "trainer", *sys.argv[1:]]
    settings = {
        **os.environ,
        **parent.environment(),
        "TF_CONFIG": cluster.tf_config(FIRST_WORKER),
        "TF_USE_LEGACY_KERAS": "1",
    }

    def keep() -> None:
        for _ in range(restarts + 1):
            subprocess.run(command, env=settings, stdin=subprocess.DEVNULL, check=False)

    threading.Thread(target=keep, name="worker-0", daemon=True).start()

"""The `cluster` section: the training tasks, and where they run."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator

from flotilla.trainer.config.base import MOST, Section, key
from flotilla.trainer.config.kubernetes import KubernetesConfig

# The lowest port that does not require root, and the ports that the tasks of a pod use.
LOWEST_PORT, TASK_PORTS = 1024, (2222, 2223)
Launcher = Literal["local", "tfjob", "jobset", "auto"]


def server_number(name: str) -> int:
    """Return the index in a parameter server's name such as "ps:0", or -1 for any other string."""
    role, _, index = name.partition(":")
    # `isdigit` accepts digits of other scripts, some of which `int` rejects.
    return int(index) if role == "ps" and index.isascii() and index.isdigit() else -1


class ClusterConfig(Section):
    """The training tasks of the cluster, and where they run."""

    launcher: Launcher = key(
        "local",
        "how tasks are started: as local processes, a TFJob or a JobSet; auto: a TFJob or JobSet, "
        "whichever the cluster supports, or as local processes if there is no cluster",
    )
    parameter_servers: int = key(1, "number of parameter servers", ge=1, le=1000)
    workers: int = key(
        2, "number of workers; at most data.shards if data.partition is disjoint", ge=1, le=10_000
    )
    evaluator: bool = key(False, "evaluate each checkpoint in a separate task")
    gpus_per_worker: int = key(
        0, "number of GPUs for each worker, or for the chief if there are no workers", ge=0, le=1000
    )
    gpu_memory_mb: int = key(
        0, "memory to reserve on each GPU, in megabytes; 0: allocate on demand", ge=0, le=MOST
    )
    gpu_memory_fraction: float = key(
        0.0, "share of each GPU's memory to reserve; 0: allocate on demand", ge=0, lt=1
    )
    communication: Literal["auto", "ring", "nccl"] = key(
        "auto", "how the workers of multi_worker_mirrored exchange gradients; nccl needs GPUs"
    )
    placement: dict[str, str] = key(
        {}, 'parameter server of the variables that a glob matches: {"hidden_0/*": "ps:0"}'
    )
    existing_servers: bool = key(
        False, "connect to the running servers in TF_CONFIG, instead of starting servers"
    )
    in_process: bool = key(
        False, "run parameter servers and workers as threads of the chief, for debugging"
    )
    max_restarts: int = key(
        3,
        "maximum number of restarts, counted over all tasks except the evaluator; on Kubernetes, "
        "each new checkpoint resets the count of lost pods",
        ge=0,
        le=MOST,
    )
    recovery: Literal["auto", "partial", "full"] = key(
        "auto",
        "which variables to restore from the last checkpoint after a parameter server dies; "
        "partial: the lost ones; full: all; auto: partial if training is asynchronous, else full",
    )
    metrics_port: int = key(
        0,
        "port on which the leading task (the chief or worker 0) serves Prometheus metrics; 0: none",
        ge=0,
        lt=2**16,
    )
    kubernetes: KubernetesConfig = key(
        KubernetesConfig(), "settings of the Kubernetes job and its pods"
    )

    @field_validator("metrics_port")
    @classmethod
    def _free(cls, value: int) -> int:
        if 0 < value < LOWEST_PORT or value in TASK_PORTS:
            raise ValueError(
                f"{value} is not available in a pod; choose a port from {LOWEST_PORT} up, "
                f"except {' and '.join(map(str, TASK_PORTS))}, which the tasks use"
            )
        return value

    @field_validator("placement")
    @classmethod
    def _check_placement(cls, value: dict[str, str]) -> dict[str, str]:
        for glob, server in value.items():
            if server_number(server) < 0:
                raise ValueError(f"{glob!r} is placed on {server!r}; write the server as ps:0")
        return value

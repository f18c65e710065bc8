"""The cluster section of the configuration: what runs where."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trainer.kubernetes_config import KubernetesConfig
from trainer.section import MOST, Section


class ClusterConfig(Section):
    """What runs where."""

    launcher: Literal["local", "tfjob"] = Field(
        "local", description="who starts the tasks: on one machine, or as a TFJob on Kubernetes"
    )
    parameter_servers: int = Field(1, ge=1, le=1000, description="parameter servers")
    workers: int = Field(2, ge=1, le=10_000, description="workers; up to data.shards")
    evaluator: bool = Field(False, description="evaluate each checkpoint while training goes on")
    gpus_per_worker: int = Field(0, ge=0, le=1000, description="GPUs of one worker")
    gpu_memory_mb: int = Field(
        0, ge=0, le=MOST, description="fixed share of each GPU; 0: grow on demand"
    )
    communication: Literal["auto", "ring", "nccl"] = Field(
        "auto", description="how mirrored workers exchange gradients; nccl needs GPUs"
    )
    placement: dict[str, str] = Field(
        {}, description='parameter server by variable glob, {"hidden_0/*": "ps:0"}'
    )
    existing_servers: bool = Field(False, description="join servers that run, by TF_CONFIG")
    in_process: bool = Field(False, description="run the servers as threads, for a debugger")
    max_restarts: int = Field(
        3, ge=0, le=MOST, description="restarts of all tasks together, but the evaluator"
    )
    kubernetes: KubernetesConfig = Field(
        KubernetesConfig(), description="settings of the TFJob and its pods"
    )

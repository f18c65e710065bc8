"""The first step: check the run parameters and pass one JSON text on."""

from typing import NamedTuple

from kfp import dsl

from components.image import IMAGE


# One parameter for each leaf of the configuration; a test holds them against the config model.
# fmt: off
@dsl.component(base_image=IMAGE, install_kfp_package=False)
def resolve_config(
    name: str, data_dataset: str, data_version: str, data_manual_dir: str, data_shards: int,
    data_validation: float, data_partition: str, data_seed: int, model_name: str, model_args: str,
    training_strategy: str, training_steps: int, training_batch_size: int,
    training_optimizer_name: str, training_optimizer_learning_rate: float,
    training_optimizer_args: str, training_schedule_name: str, training_schedule_warmup_steps: int,
    training_schedule_args: str, training_pull_every: int, training_replicas_to_aggregate: int,
    training_checkpoint_every: int, training_checkpoint_seconds: float, training_keep: int,
    training_validate_every: int, training_patience: int, training_stall_timeout: float,
    training_mixed_precision: bool, training_jit_compile: bool, training_warm_start: str,
    training_seed: int, cluster_launcher: str, cluster_parameter_servers: int,
    cluster_workers: int, cluster_evaluator: bool, cluster_gpus_per_worker: int,
    cluster_gpu_memory_mb: int, cluster_communication: str, cluster_placement: str,
    cluster_existing_servers: bool, cluster_in_process: bool, cluster_max_restarts: int,
    cluster_kubernetes: str,
    evaluation_batch_size: int, evaluation_slices: str, gate_min: str, gate_max: str,
    gate_champion: str, gate_min_gain: float, gate_significance: float,
    export_formats: str, registry_max_megabytes: float, registry_max_milliseconds: float,
    storage_root: str, kfp_run_id: str, place: dsl.Output[dsl.Artifact]
) -> NamedTuple(
    "Resolved",
    [("config", str), ("data", str), ("root", str), ("run_id", str), ("seal", str)],
):
    """Check the run parameters; give the configuration, its data section and where to store."""
    from components import steps

    return steps.resolve_config(locals())

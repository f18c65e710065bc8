"""The first step: check the run parameters and pass one JSON text on."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from kfp import dsl

from components import contract, descriptor, in_use, locations, pinned_inputs, table
from components.image import component
from components.pod_parameters import check_parameters
from components.records import step_record
from components.records.record import StepOutput, tried
from trainer import storage
from trainer.cluster import fitting
from trainer.code import delivery, references
from trainer.config.data import DataConfig
from trainer.config.run_parameters import from_parameters


# One parameter for each leaf of the configuration, and those of the pods that fail the driver of a
# step where they are wrong. A test holds them against the config model and `step_parameters`.
# fmt: off
@contract.marked
@component
def resolve_config(
    name: str, data_dataset: str, data_source: str, data_format: str, data_builder_args: str,
    data_version: str, data_spans: str, data_manual_dir: str,
    data_inputs: str, data_label: str, data_weight: str, data_group: str, data_drop: str,
    data_types: str, data_map: str, data_shapes: str, data_buckets: str, data_image: str,
    data_bad_rows: float, data_splits: str, data_shards: int, data_validation: float,
    data_partition: str, data_disk: str, data_vocabulary: int, data_runner: str,
    data_schema_file: str, data_gate: str, data_seed: int,
    task_name: str, task_loss: str, task_metrics: str, task_outputs: str, task_args: str,
    model_name: str, model_args: str,
    training_strategy: str, training_steps: int, training_batch_size: int,
    training_accumulate: int, training_optimizer_name: str, training_optimizer_learning_rate: float,
    training_optimizer_args: str, training_optimizer_dense_updates: bool,
    training_schedule_name: str, training_schedule_warmup_steps: int,
    training_schedule_args: str, training_pull_every: int,
    training_replicas_to_aggregate: int,
    training_checkpoint_every: int, training_checkpoint_seconds: float,
    training_checkpoint_parts_mb: int, training_keep: int,
    training_validate_every: int, training_patience: int, training_stall_timeout: float,
    training_mixed_precision: str, training_jit_compile: bool, training_warm_start: str,
    training_ema: float, training_freeze: str, training_hand_on: str, training_class_weights: str,
    training_when_unchanged: str, training_profile: str, training_seed: int,
    cluster_launcher: str, cluster_parameter_servers: int, cluster_workers: int,
    cluster_evaluator: bool, cluster_gpus_per_worker: int,
    cluster_gpu_memory_mb: int, cluster_communication: str, cluster_placement: str,
    cluster_existing_servers: bool, cluster_in_process: bool, cluster_max_restarts: int,
    cluster_recovery: str, cluster_snapshot_seconds: float, cluster_metrics_port: int,
    cluster_kubernetes: str,
    evaluation_batch_size: int, evaluation_slices: str, gate_min: str, gate_max: str,
    gate_champion_metric: str, gate_champion_margin: str, gate_champion_confidence: float,
    gate_champion_better: str,
    export_formats: str, registry_max_megabytes: float, registry_max_milliseconds: float,
    registry_hub: str, storage_root: str, code: str, kfp_run_id: str,
    configuration: dsl.Output[dsl.Artifact],
    step_cpu: str = "1", step_memory: str = "4Gi", step_gpus: str = "0",
    step_node_selector: dict = {},  # type: ignore[type-arg] # noqa: B006
    step_tolerations: list = [],  # type: ignore[type-arg] # noqa: B006
) -> NamedTuple(
    "Resolved",
    [
        ("config", str), ("data", str), ("root", str), ("run_id", str), ("seal", str),
        ("data_code", str), ("Output", str),
    ],
):
    """Check the run parameters; return the configuration, its data section and where to store."""
    from components.resolve_config import run_step

    return run_step(locals())
# fmt: on


class Resolved(NamedTuple):
    """What the first step passes on.

    `data_code` is the bundle that the data section needs, empty where it names nothing of the
    user's: of the code KFP's cache knows nothing else.

    `Output` is the word, `new` or `unchanged`: KFP's local runner knows no other name in a
    condition.
    """

    config: str
    data: str
    root: str
    run_id: str
    seal: str
    data_code: str
    Output: str


def run_step(values: Mapping[str, Any]) -> Resolved:
    """Check all run parameters; the data section alone is what preparing data depends on.

    Args:
        values: the run parameters, KFP's run id, an artifact `configuration` whose URI shows the
            pipeline root, and the parameters of the pods that are checked. This call is the same in
            every version, so that each can refuse.
    """
    call = dict(values)
    # A pipeline of another version may pass other values, and its refusal is recorded all the same.
    output = next((each.uri for each in values.values() if hasattr(each, "uri")), "")
    kfp_run_id = values.get("kfp_run_id", "")
    at = locations.run_at_first(values.get("storage_root", ""), output, kfp_run_id)

    def work(record: StepOutput) -> Resolved:
        contract.check()
        check_parameters(values)
        artifact, config = values["configuration"], from_parameters(values)
        root = locations.root_of(config.storage.root, artifact.uri, kfp_run_id)
        locations.check_shared(root)
        locations.check_source(config.data)
        run_id = locations.run_id_of(kfp_run_id)
        code = _entered(config.code, root, run_id)
        config = pinned_inputs.with_listing(config, root)
        earlier = pinned_inputs.finished_by(config, root, run_id)
        config = pinned_inputs.with_champion(config, root)
        step_record.publish_config(at, config.model_dump_json(indent=2))
        # A local run has no KFP cache, and preparing finds the version itself.
        data = config.data if locations.is_local_run() else pinned_inputs.with_version(config.data)
        if not (earlier or locations.is_local_run()):
            # Here it comes before the pods of any other step; on this machine the chief finds it.
            fitting.require(config.model_copy(update={"data": data}))
        record.metrics = {"name": config.name, "data_version": data.version, **code}
        if earlier:
            reason = f"files and configuration are those of {earlier}, which has finished"
            record.metrics |= {"decision": table.UNCHANGED, "reasons": [reason]}
        descriptor.write(artifact, config.model_dump(mode="json"))
        artifact.metadata.update({"name": config.name, "root": root, "run_id": run_id})
        return Resolved(
            config=config.model_dump_json(),
            data=data.model_dump_json(),
            root=root,
            run_id=run_id,
            seal=_seal(data, root, locations.pipeline_root_in(artifact.uri, kfp_run_id)) or run_id,
            data_code=config.code if config.data.is_own else "",
            Output=table.UNCHANGED if earlier else table.NEW,
        )

    return tried("resolve_config", at, work, call=call)


def _entered(code: str, root: str, run_id: str) -> dict[str, str]:
    """Put the bundle of a run on the path, and note that the run needs it; nothing without one."""
    if not code:
        return {}
    delivery.enter(code)
    references.of_run(root, run_id, code)
    return {"code": code}


def _seal(data: DataConfig, root: str, pipeline_root: str) -> str:
    if locations.is_local_run():
        return ""
    from trainer.data import key

    datasets = key.seal(data, root)
    for line in datasets.splitlines():
        # KFP may take it from its cache, and then nothing else says that it is used.
        if not in_use.use(storage.join(root, "datasets", line.partition(" ")[0])):
            return ""
    # From the cache comes the artifact of an earlier run, too. KFP copies it into the pods of the
    # next steps, and has keys and endpoint for the pipeline root of this run alone.
    return "\n".join(filter(None, (datasets, pipeline_root))) if datasets else ""

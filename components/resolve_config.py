"""The first step: check the run parameters and pass one JSON text on."""

import json
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from kfp import dsl

from components import contract, descriptor, in_use, table
from components.image import component
from components.pod_parameters import check_parameters
from components.records import run_store, step_record
from components.records.record import Step, run
from trainer import events, storage
from trainer.cluster import fitting
from trainer.code import bundle
from trainer.config.data import SINCE_CHAMPION, DataConfig
from trainer.config.model import CHAMPION, initial_weights
from trainer.config.run_parameters import from_parameters
from trainer.config.schema import AUTO, OF_TWO_CLASSES, Config, OutputConfig
from trainer.data import listing
from trainer.errors import ConfigError
from trainer.masking import printable
from trainer.promotion import trained
from trainer.promotion.registry import champion_checkpoint, champion_positive
from trainer.storage import patterns

# Under which the digest of the listing is pinned.
_FILES = "listing of data.source"
_log = logging.getLogger(__name__)


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
    task_name: str, task_loss: str, task_metrics: str, task_outputs: str, task_positive: str,
    task_main_metric: str, task_args: str,
    model_name: str, model_args: str,
    training_strategy: str, training_steps: int, training_batch_size: int,
    training_accumulate: int, training_optimizer_name: str, training_optimizer_learning_rate: float,
    training_optimizer_args: str, training_optimizer_dense_updates: bool,
    training_schedule_name: str, training_schedule_warmup_steps: int,
    training_schedule_args: str, training_pull_every: int, training_replicas_to_aggregate: int,
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
    cluster_recovery: str, cluster_metrics_port: int, cluster_kubernetes: str,
    evaluation_batch_size: int, evaluation_slices: str, evaluation_baseline: str,
    gate_min: str, gate_max: str, gate_constant: str,
    gate_champion_metric: str, gate_champion_margin: str, gate_champion_confidence: float,
    gate_champion_class_margin: str, gate_champion_better: str,
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
    """Run this step: the one call that is the same in every version, so that each can refuse."""
    return run(work, values)


def work(step: Step) -> Resolved:
    """Check all run parameters, and record the refusal; return what the data section depends on."""
    contract.check()
    values = {name: each for name, each in vars(step).items() if name != "output"}
    check_parameters(values)
    artifact, config = step.configuration, from_parameters(values)
    root = run_store.root_of(config.storage.root, artifact.uri, step.kfp_run_id)
    _check_shared(root)
    _check_source(config.data)
    run_id = run_store.run_id_of(step.kfp_run_id)
    code = _entered(config.code, root, run_id)
    config = with_listing(config, root)
    earlier = finished_by(config, root, run_id)
    config = with_positive(with_champion(config, root), root)
    step_record.publish_config(run_store.run_at(root, run_id), config.model_dump_json(indent=2))
    # A local run has no KFP cache, and preparing finds the version itself.
    data = config.data if run_store.is_local_run() else with_version(config.data)
    if not (earlier or run_store.is_local_run()):
        # Here it comes before the pods of any other step; on this machine the chief finds it.
        fitting.require(config.model_copy(update={"data": data}))
    step.output.metrics = {"name": config.name, "data_version": data.version, **code}
    if earlier:
        reason = f"files and configuration are those of {earlier}, which has finished"
        step.output.metrics |= {"decision": table.UNCHANGED, "reasons": [reason]}
    descriptor.write(artifact, config.model_dump(mode="json"))
    artifact.metadata.update({"name": config.name, "root": root, "run_id": run_id})
    return Resolved(
        # KFP writes its parameters into the log as they are.
        config=printable(config.model_dump_json()),
        data=printable(data.model_dump_json()),
        root=root,
        run_id=run_id,
        seal=_seal(data, root, run_store.pipeline_root_in(artifact.uri, step.kfp_run_id)) or run_id,
        data_code=config.code if config.data.is_own else "",
        Output=table.UNCHANGED if earlier else table.NEW,
    )


def _check_shared(root: str) -> None:
    """Raise a `ConfigError` where this is a pod, and `root` a folder that no other pod sees."""
    if os.environ.get("KFP_POD_NAME") and storage.local_path(root):
        raise ConfigError(
            f"storage.root: {root} is a folder of this pod, which no other step sees: set it to "
            "gs://, s3:// or minio://BUCKET/FOLDER, or leave it empty"
        )


def _check_source(data: DataConfig) -> None:
    """Raise a `ConfigError` where this is a pod and the source a path, which is not there."""
    if data.source and os.environ.get("KFP_POD_NAME") and patterns.is_local(data.source):
        raise ConfigError(
            f"data.source: {data.source} is a path, and there are no files of yours in this pod: "
            "put them into gs://, s3:// or minio://BUCKET/FOLDER"
        )


def with_champion(config: Config, root: str) -> Config:
    """Return the configuration with the champion's checkpoint, if any, in its warm start."""
    training, name = config.training, config.name
    weights = initial_weights(training.warm_start)
    if weights.source != CHAMPION:
        return config
    uri = run_store.pin_once(f"champion of {name}", lambda: champion_checkpoint(root, name))
    if not uri:
        reason = f"{name} has no champion yet below {root}"
        events.emit(events.FromScratch(reason=reason))
    value = replace(weights, source=uri).value() if uri else ""
    return config.model_copy(update={"training": training.model_copy(update={"warm_start": value})})


def with_positive(config: Config, root: str) -> Config:
    """Return the configuration with the champion's positive classes where it names none.

    Of two classes of about the same size the rarer one changes from run to run, and with it what an
    answer means.
    """
    task = config.task
    if task.name not in (AUTO, *OF_TWO_CLASSES, "multi_output"):
        return config
    pinned = run_store.pin_once(
        f"positive classes of the champion of {config.name}",
        lambda: json.dumps(champion_positive(root, config.name)),
    )
    found: dict[str, str] = json.loads(pinned)
    if task.outputs or len(config.data.label) > 1:
        outputs = dict(task.outputs)
        for label in filter(None, found):
            said = outputs.get(label, OutputConfig())
            outputs[label] = said.model_copy(update={"positive": said.positive or found[label]})
        task = task.model_copy(update={"outputs": outputs})
    elif "" in found and not task.positive:
        events.emit(events.DataNote(text=f"task.positive is {found['']!r}, as of the champion"))
        task = task.model_copy(update={"positive": found[""]})
    return config.model_copy(update={"task": task})


def with_version(data: DataConfig) -> DataConfig:
    """Return the data section with its newest version, which KFP's cache compares."""
    if data.version or data.source:
        return data
    from trainer.data import prepare

    with tempfile.TemporaryDirectory(prefix="flotilla-") as scratch:
        newest = prepare.newest_version(data, Path(scratch))
    events.emit(events.NewestVersion(dataset=data.name, version=newest))
    return data.model_copy(update={"version": newest})


def with_listing(config: Config, root: str) -> Config:
    """Return the configuration with the digest of the chosen files as its `data.version`.

    The listing is kept below `root`, where preparing finds it: a file that comes meanwhile belongs
    to the next run. Raises `UserError`.
    """
    data = config.data
    if not data.source or data.version:
        return config
    version = run_store.pin_once(_FILES, lambda: _listed(config, root))
    return config.model_copy(update={"data": data.model_copy(update={"version": version})})


def _listed(config: Config, root: str) -> str:
    data, before = config.data, trained.TrainedData(spans={})
    if data.spans == SINCE_CHAMPION:
        before = trained.of_champion(root, config.name)
    found = listing.list_source(data)
    taken = listing.chosen(found, data.spans, before.spans)
    spans = ", ".join(taken.spans)
    if before.version and found.spans and not spans:
        # What its files were is known, also where some are gone.
        _log.info("data.source: the champion was trained on all %d spans", len(found.spans))
        return before.version
    listing.publish(taken, root)
    events.emit(events.NewestVersion(dataset=data.source, version=taken.digest))
    _log.info(
        "data.source: %d files%s, listing %s",
        len(taken.files), f" of the spans {spans}" if spans else "", taken.digest,
    )  # fmt: skip
    return taken.digest


def finished_by(config: Config, root: str, run_id: str) -> str:
    """Return the earlier run on files that has finished with the same work; empty for none."""
    if not config.data.source:
        return ""
    trained.begin(config, root, run_id)
    if config.training.when_unchanged == "train":
        return ""
    return run_store.pin_once("run that has finished", lambda: trained.finished(config, root))


def _entered(code: str, root: str, run_id: str) -> dict[str, str]:
    """Put the bundle of a run on the path, and note that the run needs it; nothing without one."""
    if not code:
        return {}
    bundle.enter(code)
    bundle.note_run(root, run_id, code)
    return {"code": code}


def _seal(data: DataConfig, root: str, pipeline_root: str) -> str:
    if run_store.is_local_run():
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

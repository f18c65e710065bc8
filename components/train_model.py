"""Launches the training cluster, watches it, and returns the selected checkpoint."""

from functools import partial
from typing import Any

from kfp import dsl

from flotilla.components import descriptor, launchers
from flotilla.components.image import PodDefaults, component
from flotilla.components.records import gather_report
from flotilla.components.records.record import Step
from flotilla.components.records.run_store import folder_of_run
from flotilla.components.table import TRAINED
from flotilla.trainer import storage
from flotilla.trainer.checkpoints.index import (
    SelectedCheckpoint,
    require_first_weights,
    select_checkpoint,
    select_program_checkpoint,
)
from flotilla.trainer.cluster import fitting
from flotilla.trainer.cluster.launcher import Job
from flotilla.trainer.code import load_bundle
from flotilla.trainer.config.main_metric import BY_LOSS, VALIDATION_LOSS
from flotilla.trainer.config.program import EVALUATE
from flotilla.trainer.config.schema import Config
from flotilla.trainer.promotion import training_data as trained

_ENDS = "the program has finished training, and program.after_training=stop skips the evaluation"


@component
def train_model(
    config: str,
    root: str,
    run_id: str,
    dataset: str,
    image: str,
    store_secret: str,
    checkpoint: dsl.Output[dsl.Model],
    mlpipeline_ui_metadata: dsl.Output[dsl.Artifact],
    dataset_descriptor: dsl.Input[dsl.Dataset] = None,
) -> str:
    """Train on the dataset at URI `dataset`; return the URI of the selected checkpoint.

    The URI is empty if the run ends with training (`program.after_training: stop`).
    """
    from flotilla.components.records.record import run
    from flotilla.components.train_model import work

    return run(work, locals())


def work(step: Step) -> str:
    """Run the only stage of the step."""
    return step.stage("train_model", train)


def train(step: Step) -> str:
    """Train and select a checkpoint. Return its URI, or "" if the run ends with training."""
    descriptor.check(step.dataset_descriptor, step.dataset)
    settings = load_bundle(step.config)
    from flotilla.trainer.data.shard_feed import plan_streaming
    from flotilla.trainer.features.dataset_spec import DatasetSpec, require_slices

    manifest = storage.read_manifest(step.dataset)
    spec = DatasetSpec.from_manifest(manifest)
    # Refuse a `data.disk` that is too small before the pods of a cluster start.
    plan_streaming(settings, manifest, settings.cluster.workers)
    # Check the slices now, because otherwise an error would appear only after training.
    require_slices(settings, spec.features, spec.targets)
    if settings.cluster.launcher != "local" and not settings.program.command:
        # Try the model before the pods start. With the launcher `local`, the chief does so.
        fitting.require(settings, step.dataset)
    step.output.held = gather_report.count_resources(settings.model_dump())
    checkpoints = storage.join(step.root, step.run_id, "checkpoints")
    require_first_weights(settings.training.warm_start, checkpoints)
    logs = storage.join(checkpoints, "logs")
    descriptor.write_viewers(step.mlpipeline_ui_metadata, logs)
    pods = PodDefaults(image=step.image, store_secret=step.store_secret)
    job = partial(Job, config=settings, dataset=step.dataset, checkpoints=checkpoints)
    with folder_of_run() as folder:
        launchers.launch(job(workdir=folder / "cluster"), pods)
    ends = bool(settings.program.command) and settings.program.after_training != EVALUATE
    found = _select(settings, checkpoints, needs_model=not ends)
    metrics = _metrics(found) if found else {}
    metrics |= {"decision": TRAINED, "reasons": [_ENDS]} if ends else {}
    uri = found.uri if found else ""
    step.output.done(uri, metrics, found.best.by if found and found.best else None)
    if uri:
        descriptor.describe(step.checkpoint, uri, {"tensorboard": logs, **metrics})
    else:
        descriptor.write(step.checkpoint, {"decision": TRAINED})
    if ends:
        trained.end(step.root, step.run_id, TRAINED)
    return "" if ends else uri


def _select(config: Config, checkpoints: str, *, needs_model: bool) -> SelectedCheckpoint | None:
    """Return the selected checkpoint, or None if a program wrote none and none is needed."""
    if not config.program.command:
        return select_checkpoint(checkpoints, config.training.hand_on, config.task.main_metric)
    return select_program_checkpoint(checkpoints, needs_model=needs_model)


def _metrics(found: SelectedCheckpoint) -> dict[str, Any]:
    by = found.best.by if found.best else BY_LOSS
    metrics = {
        "global_step": found.trained,
        "handed_on_step": found.global_step,
        **{name: value for name, value in found.validation.items() if name == by.column},
        "handed_on_as": found.why,
        **found.fields["metrics"],
        # Add the validation metrics, because those of a separate evaluator are not in the manifest.
        **found.validation,
    }
    begun = {name: found.fields.get(name) for name in ("warmed_from", "warm_start")}
    metrics |= {name: value for name, value in begun.items() if value}
    if best := found.best:
        names = dict.fromkeys((VALIDATION_LOSS, by.column))
        metrics["best_global_step"] = best.global_step
        metrics |= {f"best_{name}": best.validation[name] for name in names}
    return metrics

"""Launches the training cluster, watches it, and returns the selected checkpoint."""

from functools import partial
from typing import Any

from kfp import dsl

from flotilla.components import descriptor, launchers
from flotilla.components.image import PodDefaults, component
from flotilla.components.records import gather_report
from flotilla.components.records.record import Step
from flotilla.components.records.run_store import folder_of_run
from flotilla.trainer import storage
from flotilla.trainer.checkpoints.decisions import SelectedCheckpoint, select_checkpoint
from flotilla.trainer.checkpoints.index import require_first_weights
from flotilla.trainer.cluster import fitting
from flotilla.trainer.cluster.launcher import Job
from flotilla.trainer.code.bundle import load_bundle
from flotilla.trainer.config.main_metric import BY_LOSS, VALIDATION_LOSS

PROGRAM_CHOICE = "it alone has the program's model"


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
    """Train on the dataset at URI `dataset`; return the URI of the selected checkpoint."""
    from flotilla.components.records.record import run
    from flotilla.components.train_model import work

    return run(work, locals())


def work(step: Step) -> str:
    """Run the only stage of the step."""
    return step.stage("train_model", train)


def train(step: Step) -> str:
    """Train; `mlpipeline_ui_metadata` is the file with which the UI shows TensorBoard."""
    descriptor.check(step.dataset_descriptor, step.dataset)
    settings = load_bundle(step.config)
    from flotilla.trainer.data.shards.shard_store import plan_streaming
    from flotilla.trainer.features.dataset_spec import DatasetSpec, require_slices

    manifest = storage.read_manifest(step.dataset)
    spec = DatasetSpec.from_manifest(manifest)
    # The check runs before a cluster is requested.
    plan_streaming(settings, manifest, settings.cluster.workers)
    # The module is loaded now, since it would otherwise be loaded only after training.
    require_slices(settings, spec.features, spec.targets)
    if settings.cluster.launcher != "local":
        # In a pod, this runs before the pods of the cluster start; on this machine, the chief does
        # it.
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
    choice = PROGRAM_CHOICE if settings.program.command else settings.training.hand_on
    found = select_checkpoint(checkpoints, choice, settings.task.main_metric)
    metrics = _metrics(found)
    step.output.done(found.uri, metrics, found.best.by if found.best else None)
    descriptor.describe(step.checkpoint, found.uri, {"tensorboard": logs, **metrics})
    return found.uri


def _metrics(found: SelectedCheckpoint) -> dict[str, Any]:
    """Return the state that training reached, and the metrics of the selected checkpoint."""
    by = found.best.by if found.best else BY_LOSS
    metrics = {
        "global_step": found.trained,
        "handed_on_step": found.global_step,
        **{name: value for name, value in found.validation.items() if name == by.column},
        "handed_on_as": found.why,
        **found.fields["metrics"],
        # The manifest does not have the metrics of an evaluator.
        **found.validation,
    }
    begun = {name: found.fields.get(name) for name in ("warmed_from", "warm_start")}
    metrics |= {name: value for name, value in begun.items() if value}
    if best := found.best:
        names = dict.fromkeys((VALIDATION_LOSS, by.column))
        metrics["best_global_step"] = best.global_step
        metrics |= {f"best_{name}": best.validation[name] for name in names}
    return metrics

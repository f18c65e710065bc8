"""Launch the training cluster, watch it, and return the checkpoint that is handed on."""

from typing import Any

from kfp import dsl

from components import descriptor, launchers, ui
from components.image import PodDefaults, component
from components.locations import folder_of_run, run_at
from components.records import gather_report
from components.records.record import StepOutput, tried
from trainer import storage
from trainer.checkpoints.index import HandedOn, handed_on, require_first_weights
from trainer.cluster import fitting
from trainer.cluster.launcher import Job
from trainer.code.delivery import configured


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
    """Train on the dataset at URI `dataset`; return the URI of the checkpoint to hand on."""
    from components.train_model import run_step

    return run_step(
        config,
        root,
        run_id,
        dataset,
        image,
        store_secret,
        checkpoint,
        mlpipeline_ui_metadata,
        dataset_descriptor,
    )


def run_step(
    config: str,
    root: str,
    run_id: str,
    dataset: str,
    image: str,
    store_secret: str,
    checkpoint: Any,
    viewers: Any,
    dataset_descriptor: Any = None,
) -> str:
    """Train; `checkpoint` is a KFP Model, and `viewers` a file by which the UI shows TensorBoard.

    The pods of a TFJob get the image and the secret of the run where its settings name none.
    """

    def work(record: StepOutput) -> str:
        descriptor.check(dataset_descriptor, dataset)
        settings = configured(config)
        from trainer.data.shards.shard_store import streaming_of
        from trainer.data.spec import DatasetSpec, require_slices

        manifest = storage.read_manifest(dataset)
        spec = DatasetSpec.from_manifest(manifest)
        # Before a cluster is asked for.
        streaming_of(settings, manifest, settings.cluster.workers)
        # Of all that is looked at only once the model is trained.
        require_slices(settings, spec.features, spec.targets)
        if settings.cluster.launcher != "local":
            # Here it comes before the pods of the cluster; on this machine the chief finds it.
            fitting.require(settings, dataset)
        record.held = gather_report.held_by(settings.model_dump())
        job = Job(
            config=settings,
            dataset=dataset,
            checkpoints=storage.join(root, run_id, "checkpoints"),
            workdir=folder_of_run() / "cluster",
        )
        require_first_weights(settings.training.warm_start, job.checkpoints)
        ui.write_viewers(viewers, logs := storage.join(job.checkpoints, "logs"))
        launchers.launch(job, PodDefaults(image=image, store_secret=store_secret))
        found = handed_on(job.checkpoints, settings.training.hand_on)
        metrics = _metrics(found)
        record.done(found.uri, metrics)
        descriptor.describe(checkpoint, found.uri, {"tensorboard": logs, **metrics})
        return found.uri

    at = run_at(root, run_id)
    return tried("train_model", at, work, inputs={"dataset": dataset}, call=locals())


def _metrics(found: HandedOn) -> dict[str, Any]:
    """Return what training has reached, and the metrics of the checkpoint that is handed on."""
    metrics = {
        "global_step": found.trained,
        "handed_on_step": found.global_step,
        "handed_on_as": found.why,
        **found.fields["metrics"],
    }
    begun = {name: found.fields.get(name) for name in ("warmed_from", "warm_start")}
    metrics |= {name: value for name, value in begun.items() if value}
    if best := found.best:
        metrics |= {"best_global_step": best.global_step, "best_validation_loss": best.loss}
    return metrics

"""The evaluator, which measures each new checkpoint of a run without delaying training."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import keras
import tensorflow as tf

from flotilla.trainer import events, storage
from flotilla.trainer.checkpoints import index
from flotilla.trainer.checkpoints.checkpoints import restore_model
from flotilla.trainer.checkpoints.history import LogFiles, Validations
from flotilla.trainer.checkpoints.index import KIND
from flotilla.trainer.cluster.launcher import Job
from flotilla.trainer.cluster.process import OVER
from flotilla.trainer.data.read import evaluation_batches, stage_shards
from flotilla.trainer.evaluation import evaluate
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.models.registry import report_bad_input
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.tasks import registry as tasks
from flotilla.trainer.telemetry.tensorboard import TensorBoardLog

# Interval between polls, in seconds. A store does not notify readers of new checkpoints.
POLL_SECONDS = 1.0
log = logging.getLogger(__name__)
Measure = Callable[[str, Path], dict[str, float]]


def watch(job: Job) -> None:
    """Measure each checkpoint on the validation split, until training is over.

    Training is over when the newest checkpoint has reached the last step, or the launcher has
    created `OVER`. Raises `UserError`.
    """
    measure = _measure(job)
    done, passed = Validations(job.checkpoints), set[str]()
    logs = storage.join(job.checkpoints, "logs")
    # Write the files of TensorBoard to their final folder if it is local.
    files = LogFiles(storage.local_path(logs) or job.workdir / "scratch" / "logs", logs)
    board = TensorBoardLog(files.folder, job.run_id)
    pause = threading.Event()
    while True:
        # Read the flag before the listing, so that no published checkpoint is missed.
        is_over = (job.workdir / OVER).exists()
        newest = 0
        for uri, manifest in storage.list_published(job.checkpoints, KIND):
            newest = max(newest, int(manifest.fields["global_step"]))
            name = f"{uri} {manifest.created}"
            if done.has(manifest) or name in passed:
                continue
            metrics = evaluate_checkpoint(measure, uri, job.workdir / "scratch")
            if metrics:
                row = done.add(manifest, metrics)
                step, created = row["global_step"], manifest.created
                events.emit(events.Validation(global_step=step, created=created, metrics=metrics))
                board.add_validation(step, metrics)
                if not storage.local_path(job.checkpoints):
                    files.upload()
            else:
                passed.add(name)
        if is_over or newest >= job.config.training.steps:
            return
        pause.wait(POLL_SECONDS)


def evaluate_checkpoint(measure: Measure, uri: str, scratch: Path) -> dict[str, float]:
    """Return the metrics of a checkpoint, or an empty mapping if it must be skipped."""
    try:
        metrics = measure(uri, scratch)
    except UserError as error:
        # Skip a checkpoint that is damaged, or was deleted after it was listed. Raise other errors,
        # because they would recur with every checkpoint.
        if not isinstance(error, storage.Corrupt) and storage.is_published(uri):
            raise
        log.warning("skipped %s: %s", uri, error)
        return {}
    if all(map(math.isfinite, metrics.values())):
        return metrics
    log.warning("skipped %s, because its metrics are not all finite: %s", uri, metrics)
    return {}


def _measure(job: Job) -> Measure:
    learnt = index.learnt_of_run(job.checkpoints, job.config.training, job.dataset)
    spec = DatasetSpec.from_manifest(storage.read_manifest(job.dataset), learnt)
    spec = tasks.set_positive(job.config.task, spec)
    files = stage_shards(job.dataset, job.workdir / "validation", "validation")
    if precision := job.config.training.mixed_precision:
        keras.mixed_precision.set_global_policy(f"mixed_{precision}")
    objective = tasks.make_objective(job.config, spec)
    model = evaluate.build_model(job.config, spec, objective)
    graph = tf.function(partial(objective.totals, model))
    batches = evaluation_batches(spec, files, batch_size=job.config.evaluation.batch_size)

    def measure(uri: str, scratch: Path) -> dict[str, float]:
        restore_model(uri, model, scratch)
        with report_bad_input():
            return objective.means(graph(batches).numpy())

    return measure

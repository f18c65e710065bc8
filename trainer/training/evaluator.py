"""The evaluator: measures each new checkpoint of a run while training goes on.

It reads what is published and writes `validation.jsonl` beside it, and nothing else: training never
waits for it, and it may die at any time.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from pathlib import Path

import keras

from trainer import events, storage
from trainer.checkpoints.checkpoints import restore_model
from trainer.checkpoints.history import Validations
from trainer.checkpoints.index import KIND
from trainer.cluster.launcher import Job
from trainer.cluster.process import OVER
from trainer.config.schema import Config
from trainer.data.read import evaluation_batches, stage_shards
from trainer.data.spec import DatasetSpec
from trainer.errors import UserError
from trainer.evaluation import evaluate
from trainer.models import registry
from trainer.models.registry import refused_input
from trainer.models.spec import InputSpec

# How often a run is looked at for a new checkpoint: a store has no way to tell of one.
LOOK_SECONDS = 1.0
log = logging.getLogger(__name__)
Measure = Callable[[str, Path], dict[str, float]]


def watch(job: Job) -> None:
    """Measure each checkpoint of `job` on the validation split, until training is over.

    That is when the newest one has all steps, or when the launcher says so (`OVER`).

    Raises:
        UserError: the dataset or a checkpoint cannot be read for a reason of this machine.
    """
    measure = _measure(job)
    done, passed = Validations(job.checkpoints), set[str]()
    pause = threading.Event()
    while True:
        # Looked at before the checkpoints, after which none is published any more.
        is_over = (job.workdir / OVER).exists()
        newest = 0
        for uri, manifest in storage.published(job.checkpoints, KIND):
            newest = max(newest, int(manifest.fields["global_step"]))
            name = f"{uri} {manifest.created}"
            if done.has(manifest) or name in passed:
                continue
            figures = _figures(measure, uri, job.workdir / "scratch")
            if figures:
                events.emit("validation", **done.add(manifest, figures))
            else:
                passed.add(name)
        if is_over or newest >= job.config.training.steps:
            return
        pause.wait(LOOK_SECONDS)


def _figures(measure: Measure, uri: str, scratch: Path) -> dict[str, float]:
    """Return what is measured of a checkpoint; nothing of one that has to be passed over."""
    try:
        figures = measure(uri, scratch)
    except UserError as error:
        # Damaged, or outdated and gone since it was listed. What is wrong with a checkpoint that is
        # there and whole is wrong with all of them.
        if not isinstance(error, storage.Corrupt) and storage.is_published(uri):
            raise
        log.warning("passed over %s: %s", uri, error)
        return {}
    if all(map(math.isfinite, figures.values())):
        return figures
    log.warning("passed over %s: its validation gives %s", uri, figures)
    return {}


def _measure(job: Job) -> Measure:
    spec = DatasetSpec.from_manifest(storage.read_manifest(job.dataset))
    files = stage_shards(job.dataset, job.workdir / "validation", "validation")
    model = _model(job.config, spec)
    measured = evaluate.measurer(model)
    batches = evaluation_batches(spec, files, batch_size=job.config.evaluation.batch_size)

    def measure(uri: str, scratch: Path) -> dict[str, float]:
        restore_model(uri, model, scratch)
        with refused_input():
            return measured(batches)

    return measure


def _model(config: Config, spec: DatasetSpec) -> keras.Model:
    if config.training.mixed_precision:
        keras.mixed_precision.set_global_policy("mixed_bfloat16")
    inputs = InputSpec.of(spec.features, spec.inputs, spec.num_classes)
    return registry.build(config.model, inputs, config.training.seed)

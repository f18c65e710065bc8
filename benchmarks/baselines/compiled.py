"""Trains the model of a configuration with Keras's `compile`, `fit` and losses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

from flotilla.trainer import storage
from flotilla.trainer.config.schema import Config
from flotilla.trainer.data.read import stage_shards, training_batches
from flotilla.trainer.evaluation import evaluate
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.optimizers.optimizers import build_optimizer
from flotilla.trainer.tasks import registry as tasks
from flotilla.trainer.tasks.base import Task

_BINARY = keras.losses.BinaryCrossentropy(from_logits=True)
LOSSES = {
    "regression": keras.losses.MeanSquaredError(),
    "classification": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    "sequence_to_label": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    "sequence_labelling": keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, ignore_class=-1
    ),
    "binary_classification": _BINARY,
    "multilabel_classification": _BINARY,
    "ranking": _BINARY,
}


def fitted(config: Config, dataset: str, work: Path) -> keras.Model:
    """Return the model of a configuration, trained by `fit` on a published dataset."""
    manifest = storage.read_manifest(dataset)
    spec = tasks.set_positive(config.task, DatasetSpec.from_manifest(manifest))
    objective = tasks.make_objective(config, spec)
    model = evaluate.build_model(config, spec, objective)
    parts, weights = objective.task.parts, dict(objective.task.loss_weights)
    losses = {name: LOSSES[part.name] for name, part in parts.items()}
    model.compile(
        optimizer=build_optimizer(config.training),
        loss=losses if weights else losses[""],
        loss_weights=weights or None,
    )
    files = [str(path) for path in stage_shards(dataset, work / "train", "train")]
    size, seed = config.training.batch_size, config.training.seed
    batches = training_batches(spec, files, batch_size=size, seed=seed).map(
        lambda inputs, labels: (inputs, _in_units_of_outputs(parts, labels))
    )
    steps = config.training.steps
    model.fit(batches, epochs=1, steps_per_epoch=steps, shuffle=False, verbose=0)
    return model


def _in_units_of_outputs(parts: Mapping[str, Task], labels: Any) -> Any:
    if isinstance(labels, Mapping):
        return {name: part.loss_labels(labels[name]) for name, part in parts.items()}
    return parts[""].loss_labels(labels)

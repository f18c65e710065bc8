"""Which statistics a model is built with: those that its weights were trained with.

An embedding has a row for each number of a vocabulary: weights mean nothing with other data's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from trainer import storage
from trainer.checkpoints.index import list_checkpoints
from trainer.config.model import KERAS, initial_weights
from trainer.config.schema import TrainingConfig
from trainer.statistics.statistics import FILE, Learnt


def of_dataset(uri: str) -> Learnt:
    """Return what a new model is built with."""
    return Learnt(partial(_first, (uri,)))


def of_checkpoint(uri: str, dataset: str) -> Learnt:
    """Return what the model of a checkpoint is built with, or a new one for the dataset."""
    return Learnt(partial(_first, (uri, dataset)))


def of_run(checkpoints: str, training: TrainingConfig, dataset: str) -> Learnt:
    """Return what the model of a run is built with: what its weights, or the dataset, have."""
    return Learnt(lambda: _first([*_begun(checkpoints, training), dataset]))


def _begun(checkpoints: str, training: TrainingConfig) -> list[str]:
    own = [uri for uri, _ in reversed(list_checkpoints(checkpoints))]
    source = initial_weights(training.warm_start).source
    return [*own, *([source] if source and not source.endswith(KERAS) else [])]


def _first(uris: Sequence[str]) -> tuple[bytes, str]:
    """Return the statistics of the first that has some; the last, the dataset, has to."""
    *before, dataset = uris
    for uri in before:
        try:
            return storage.read_file(uri, FILE), uri
        # One that is damaged is passed over when the run goes on, too.
        except (storage.Missing, storage.NotPublished, storage.Corrupt, storage.UnknownSchema):
            continue
    return storage.read_file(dataset, FILE), dataset

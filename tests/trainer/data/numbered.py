"""A dataset whose examples are numbered consecutively in each split."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np

from flotilla.trainer.data.read import training_batches
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.features.feature_spec import FeatureSpec

EXAMPLES = (40, 41, 40, 39, 40, 41, 40)
MEASURED = (13, 11, 12)
BATCH = 5
FEATURE = {"x": FeatureSpec(shape=(), dtype="int64", stored="int")}
SPEC = DatasetSpec(
    features=FEATURE,
    inputs=("x",),
    targets=("x",),
    shards={"train": EXAMPLES, "validation": MEASURED},
    block_rows=3,
)
# Keeps a test's iterators alive until the feed is closed. Python deletes an iterator while it holds
# the GIL and waits for reads that need the feed's Python thread, which would be a deadlock.
STARTED: list[Any] = []


def start_reading(streaming, **options):
    batches = training_batches(SPEC, streaming, batch_size=BATCH, **options)
    STARTED.append(batches.as_numpy_iterator())
    return STARTED[-1]


def drawn(streaming, count, *, seed=3, buffer=20):
    batches = start_reading(streaming, seed=seed, shuffle_buffer=buffer)
    return np.concatenate([x for x, _ in islice(batches, count)])

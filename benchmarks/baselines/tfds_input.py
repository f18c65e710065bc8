"""Reads training input as the TFDS documentation recommends, but without the cache.

`as_dataset` reads and decodes single examples. The whole split is then shuffled, batched and
prefetched.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tensorflow as tf
import tensorflow_datasets as tfds

from benchmarks.baselines.mnist import VALIDATION, folder

# The examples that the published programs train on.
SPLIT = f"train[{VALIDATION}:]"


def builder(data_dir: Path) -> Any:
    """Return the TFDS builder of MNIST with `data_dir`."""
    return tfds.builder("mnist", data_dir=data_dir)


def prepare(data_dir: Path) -> None:
    """Prepare MNIST from the official files with TFDS."""
    tfds.disable_progress_bar()
    settings = tfds.download.DownloadConfig(manual_dir=folder(), try_download_gcs=False)
    builder(data_dir).download_and_prepare(download_config=settings)


def batches(source: Any, *, batch_size: int, cached: bool = False) -> tf.data.Dataset:
    """Return endless shuffled batches. `cached` keeps decoded examples in memory."""
    settings = tfds.ReadConfig(try_autocache=False)
    examples = source.as_dataset(
        split=SPLIT, as_supervised=True, shuffle_files=True, read_config=settings
    )
    held = examples.cache() if cached else examples
    mixed = held.shuffle(examples.cardinality()).repeat()
    return mixed.batch(batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)

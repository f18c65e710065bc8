"""The history's figures for TensorBoard, in `logs/` beside the checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from trainer import storage


class Board:
    """Writes scalars where TensorFlow can: into a local folder, and nowhere else yet."""

    def __init__(self, uri: str) -> None:
        """Write below the checkpoints' `uri`."""
        folder = storage.local_path(storage.join(uri, "logs"))
        self._writer = tf.summary.create_file_writer(str(folder)) if folder else None

    def add(self, row: Mapping[str, Any]) -> None:
        """Write all figures of one row of the history at its global step."""
        if self._writer is None:
            return
        with self._writer.as_default(step=int(row["global_step"])):
            for name, value in _scalars(row):
                if name != "global_step":
                    tf.summary.scalar(name, value)
        self._writer.flush()


def _scalars(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the figures of a row; one in a mapping is called `outer/inner`."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value

"""The history's figures for TensorBoard, in `logs/` beside the checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tensorflow as tf

from trainer.checkpoints import UNWRITABLE

log = logging.getLogger(__name__)


class Board:
    """Writes scalars where TensorFlow can: into a local folder."""

    def __init__(self, folder: Path | None) -> None:
        """Write into `folder`, or nowhere."""
        self._writer = None
        with self._unless_unwritable():
            self._writer = tf.summary.create_file_writer(str(folder)) if folder else None

    def add(self, row: Mapping[str, Any]) -> None:
        """Write all figures of one row of the history at its global step."""
        if self._writer is None:
            return
        with self._unless_unwritable():
            with self._writer.as_default(step=int(row["global_step"])):
                for name, value in _scalars(row):
                    if name != "global_step":
                        tf.summary.scalar(name, value)
            self._writer.flush()

    @contextmanager
    def _unless_unwritable(self) -> Iterator[None]:
        """Write no more when the disk takes no more: pictures of a run are not worth the run."""
        try:
            yield
        except UNWRITABLE as error:
            log.warning("no more figures for TensorBoard: %s", error.message.splitlines()[0])
            self._writer = None


def _scalars(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the figures of a row; one in a mapping is called `outer/inner`."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value

"""A problem with a table that grows, for `tests.cluster.lead`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tests.cluster.problems import of_ids
from trainer.config.load import parse_config
from trainer.models.embedding_table import EmbeddingTable
from trainer.strategies.strategy import Problem

BATCH = 16
TABLE = "table"


def ids_of(numbers: tf.Tensor) -> tf.Tensor:
    """Return raw ids of 64 bits, which are far apart."""
    return numbers * (2**55 + 12345) - 2**62


def problem(ids: int, capacity: int, **training: object) -> Problem:
    """Return one whose examples have so many ids, in turn."""
    config = parse_config({"training": training})

    def example(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return ids_of(number % ids), number % ids % 2

    def looked_up(given: Any) -> Any:
        return EmbeddingTable(capacity, 4, shards=3, name=TABLE)(given)

    return of_ids(config, looked_up, example, BATCH)

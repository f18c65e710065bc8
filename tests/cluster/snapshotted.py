"""A chief that takes snapshots of servers, and kills one: `python -m tests.cluster.snapshotted`.

Its SPEC is a JSON file: `config` (sections that differ from the defaults), `pids` of the servers,
and `dies`, the number of the one that is killed while it is copied. A line of JSON says what was
found.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.cluster.lead import say
from tests.cluster.problems import of_ids
from trainer.checkpoints import joined
from trainer.checkpoints.snapshots import Snapshots
from trainer.cluster import signals
from trainer.config.load import parse_config
from trainer.config.schema import Config
from trainer.models.embedding_table import EmbeddingTable
from trainer.models.sharded_embedding import ShardedEmbedding
from trainer.strategies.async_parameter_server import AsyncParameterServer
from trainer.strategies.strategy import Problem, create
from trainer.strategies.updates import touched_rows
from trainer.topology import from_tf_config

IDS, ROWS, STEPS, BATCH = 50, 400, 20, 8


def problem(config: Config, *, layers: int = 0) -> Problem:
    """Return one with a table of which batches look up some rows, one that grows, and layers."""

    def looked_up(given: Any) -> Any:
        rows = ShardedEmbedding(ROWS, 4, name="table")(given)
        grown = EmbeddingTable(2 * IDS, 4, name="grown")(given)
        found = keras.layers.Concatenate()([rows, grown])
        for _ in range(layers):
            found = keras.layers.Dense(8)(found)
        return found

    return of_ids(config, looked_up, lambda n: (n % IDS, n % 2), BATCH)


def values_of(variables: Any) -> dict[str, Any]:
    """Return the values of variables by their paths."""
    return {path: each.numpy() for path, each in variables.items()}


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return the paths of values that differ."""
    return sorted(path for path in one if not np.array_equal(one[path], other[path]))


def described() -> tuple[dict[str, Any], Config, AsyncParameterServer]:
    """Return the SPEC of this process, its configuration, and a strategy that is not built."""
    signals.end_with_parent()
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    touched_rows.SMALL = 0
    config = parse_config(spec["config"])
    strategy = create(config, *from_tf_config(os.environ["TF_CONFIG"]))
    assert isinstance(strategy, AsyncParameterServer)
    return spec, config, strategy


def main() -> None:
    """Train, copy, train, and copy again while a server dies; say what each copy has."""
    spec, config, strategy = described()
    strategy.build(problem(config))
    held = joined.held_by(strategy.variables())
    made = Snapshots(held, strategy.row_groups, strategy.io_device, 1.0)
    dies, found = spec["dies"], list[dict[str, Any]]()
    for _ in range(2):
        strategy.run(STEPS)
        moved = [int(tf.reduce_sum(tf.cast(each.marks, tf.int64))) for each in strategy.row_groups]
        made.take(strategy.global_step())
        differ = [
            differing(values_of(made.of({n}, 0.0)[n].variables), values_of(held[n])) for n in held
        ]
        found.append({"marked": moved, "differ": differ})
    before = values_of(made.of({dies}, 0.0)[dies].variables)
    strategy.run(STEPS)
    last = values_of(held[dies])
    copy = made._copies[dies]
    assign = copy._assign_rows

    def later(values: Any) -> None:
        os.kill(spec["pids"][dies], signal.SIGKILL)
        assign(values)

    copy._assign_rows = later
    try:
        made.take(strategy.global_step())
        error = ""
    except tf.errors.OpError as caught:
        error = type(caught).__name__
    (copied,) = made.of({dies}, 0.0).values()
    say(
        rows=[each.rows for each in strategy.row_groups],
        copies=found,
        error=error,
        global_step=copied.global_step,
        devices=sorted({each.device for each in copied.variables.values()}),
        changed=differing(before, last),
        differ=differing(values_of(copied.variables), last),
    )
    os._exit(0)


if __name__ == "__main__":
    main()

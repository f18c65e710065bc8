"""Trains on a table and measures network traffic: `python -m tests.cluster.lookups SPEC`.

SPEC is a JSON file with `config` (sections that differ from the defaults), `counter` (see
`benchmarks.relay`) and `trials` (pairs of a table's row count and the batch size). For each trial,
a JSON line reports the `bytes` of one step, and the `devices` and `shapes` of the variables.
"""

from typing import Any

import tensorflow as tf

from benchmarks.relay import count
from flotilla.trainer.config.schema import Config
from flotilla.trainer.embeddings.sharded_embedding import ShardedEmbedding
from flotilla.trainer.strategies.strategy import Problem
from tests.cluster.lead import begin, say
from tests.cluster.problems import of_ids

STEPS = 20
DIMENSION = 16


def problem(config: Config, rows: int, batch: int) -> Problem:
    """Return a problem whose batches read one row per example, spread over the table."""

    def example(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        # Multiplication by a prime spreads a thousand consecutive numbers over a thousand different
        # rows.
        return number * 7919 % rows, number % 2

    def looked_up(given: Any) -> Any:
        return ShardedEmbedding(rows, DIMENSION, name="table")(given)

    return of_ids(config, looked_up, example, batch)


def main() -> None:
    """Run the trials one after another on the same connection."""
    spec, strategy = begin()
    for rows, batch in spec["trials"]:
        strategy.build(problem(strategy.config, rows, batch))
        # A process can join only one cluster, so the next trial must not connect again.
        strategy.connect = lambda: None
        strategy.run(STEPS)
        before = count(spec["counter"])
        strategy.run(STEPS)
        variables = strategy.variables()
        say(
            bytes=(count(spec["counter"]) - before) / STEPS,
            devices={path: variable.device for path, variable in variables.items()},
            shapes={path: variable.shape.as_list() for path, variable in variables.items()},
        )
        strategy.close()


if __name__ == "__main__":
    main()

"""Steps a second while servers are copied into the memory of others, over those without.

Two servers hold a table of which a Zipf stream of ids looks up rows, or dense layers, with Adam.
The chief leads them as the outer loop does; stretches with and without copies alternate. Rows are
marked in both; what that costs is measured by itself, in this process.
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from benchmarks import checkpoint_parts, hot_rows
from benchmarks.comparisons import Comparison
from trainer.checkpoints.servers import size_of
from trainer.cluster import signals
from trainer.config.load import parse_config
from trainer.models.sharded_embedding import ShardedEmbedding
from trainer.strategies.strategy import Problem, create
from trainer.strategies.updates import touched_rows
from trainer.strategies.updates.batch_rows import RowsOnce
from trainer.topology import from_tf_config
from trainer.training.loop import Pace
from trainer.training.optimizers import build_optimizer
from trainer.training.recovery import ServerSnapshots

ROUNDS = int(os.environ.get("BENCH_ROUNDS", "6"))
SECONDS = float(os.environ.get("BENCH_SECONDS", "10"))
UPDATES = 300
# The first of them trace graphs, and copy all.
WARM_STEPS, WARM_SECONDS = 40, 5.0
EVERY = 1.0
# To ask whether one is due takes less.
LEAST_SECONDS = 1e-3
FEATURES, UNITS = 784, 1024


def snapshots() -> list[Comparison]:
    """Steps a second with a snapshot each second, over steps without, and an update with marks."""
    return [*(_compared(kind) for kind in ("table", "dense")), _marking()]


def _compared(kind: str) -> Comparison:
    seen = checkpoint_parts.led(kind, module=__name__)
    pairs = list(zip(seen["without"], seen["with"], strict=True))
    return Comparison(
        name=f"steps a second with a snapshot every {EVERY:g} s, over steps without: {kind}",
        rounds=tuple(
            copied["steps_per_second"] / plain["steps_per_second"] for plain, copied in pairs
        ),
        at_least=0.9,
        more=seen,
    )


def _marking() -> Comparison:
    """CPU seconds of an update of rows that marks them, over those of one that does not."""
    plain, marked = _updating(marks=False), _updating(marks=True)
    seconds: dict[str, list[float]] = {"plain": [], "marked": []}
    for _ in range(ROUNDS):
        for name, update in (("plain", plain), ("marked", marked)):
            began = time.process_time()
            for number in range(UPDATES):
                update(tf.constant(number, tf.int64))
            seconds[name].append((time.process_time() - began) / UPDATES)
    return Comparison(
        name="CPU seconds of a lazy update that marks its rows, over one that does not",
        rounds=tuple(m / p for p, m in zip(seconds["plain"], seconds["marked"], strict=True)),
        at_most=1.2,
        more={name: [round(each, 7) for each in found] for name, found in seconds.items()},
    )


def _updating(*, marks: bool) -> Any:
    training = _config(0.0).training
    model = _of_table()
    optimizer = build_optimizer(training)
    optimizer.build(model.trainable_variables)
    touched_rows.use(optimizer, model, training)
    if marks:
        touched_rows.row_groups(model, optimizer, training, pulled=False)
    shard = model.trainable_variables[0]

    def update(number: tf.Tensor) -> None:
        rows, _ = tf.unique(_rows(number)[0] // 2)
        values = tf.ones([tf.size(rows), hot_rows.DIMENSION])
        gradient = RowsOnce(values, rows, tf.constant(list(shard.shape), tf.int64))
        optimizer._backend_update_step([gradient], [shard], tf.constant(0.001))

    return tf.function(update)


def _config(every: float) -> Any:
    training = {
        "strategy": "async_parameter_server",
        "steps": 10**8,
        "checkpoint_every": 10**8,
        "validate_every": 0,
        "batch_size": hot_rows.BATCH,
        "optimizer": {"name": "adam", "learning_rate": 0.003},
    }
    sizes = {"parameter_servers": checkpoint_parts.SERVERS, "workers": 1}
    return parse_config({"training": training, "cluster": {**sizes, "snapshot_seconds": every}})


def _lead(folder: Path, kind: str) -> dict[str, Any]:
    config = _config(EVERY)
    strategy = create(config, *from_tf_config(os.environ["TF_CONFIG"]))
    strategy.build(_problem(config, kind))
    made, taken = ServerSnapshots(config, strategy), list[float]()
    pace, serving = Pace(training=config.training), checkpoint_parts.servers_of(folder)

    def go_on(seconds: float, *, copies: bool) -> dict[str, Any]:
        taken.clear()
        first, began, used = strategy.global_step(), time.monotonic(), checkpoint_parts.cpu(serving)
        step, now = first, began
        while now - began < seconds or step - first < WARM_STEPS:
            report = strategy.advance(pace.next_steps(step), 10**8)
            reached = strategy.global_step() if report.global_step is None else report.global_step
            before, now = now, time.monotonic()
            pace.steps_per_second = (reached - step) / (now - before)
            step = reached
            if copies:
                made.take_if_due(step, rests=False)
            if (spent := time.monotonic() - now) > LEAST_SECONDS:
                taken.append(spent)
        made_steps, spent = strategy.global_step() - first, time.monotonic() - began
        return {
            "steps_per_second": round(made_steps / spent, 2),
            "snapshots": len(taken),
            "seconds_of_a_snapshot": round(sum(taken) / len(taken), 4) if taken else 0.0,
            "cpu_seconds_of_a_step": round((checkpoint_parts.cpu(serving) - used) / made_steps, 6),
            "load": os.getloadavg()[0],
        }

    go_on(WARM_SECONDS, copies=True)
    found: dict[str, Any] = {"with": [], "without": []}
    for number in range(ROUNDS):
        for name in sorted(found, reverse=bool(number % 2)):
            found[name].append(go_on(SECONDS, copies=name == "with"))
    return {**found, "megabytes": size_of(strategy.variables()) // 10**6}


def _problem(config: Any, kind: str) -> Problem:
    make = {"table": (_of_table, _rows), "dense": (_of_layers, _points)}
    model, example = make[kind]
    return Problem(
        build_model=model,
        build_optimizer=partial(build_optimizer, config.training),
        loss=lambda _model, batch, found: tf.reduce_mean(tf.square(found[:, 0] - batch[1])),
        chance_loss=1e9,
        batches=lambda: tf.data.Dataset.counter().map(example).prefetch(2),
    )


def _of_table() -> keras.Model:
    given = keras.Input((), dtype="int64")
    rows = ShardedEmbedding(hot_rows.ROWS, hot_rows.DIMENSION, name="table")
    return keras.Model(given, keras.layers.Dense(2)(rows(given)))


def _rows(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    found = hot_rows.ids(tf.stack([number, tf.constant(0, tf.int64)]))
    return found, hot_rows.taste(found, 1)


def _of_layers() -> keras.Model:
    given = keras.Input((FEATURES,))
    hidden = keras.layers.Dense(UNITS, activation="relu")(given)
    hidden = keras.layers.Dense(UNITS, activation="relu")(hidden)
    return keras.Model(given, keras.layers.Dense(2)(hidden))


def _points(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    seed = tf.stack([number, tf.constant(0, tf.int64)])
    found = tf.random.stateless_normal([64, FEATURES], seed)
    return found, tf.reduce_mean(found, 1)


def main() -> None:
    """Lead a run, and print what was seen."""
    signals.end_with_parent()
    folder, kind = sys.argv[1:]
    sys.stdout.write(json.dumps(_lead(Path(folder), kind)) + "\n")
    sys.stdout.flush()
    # Workers go on.
    os._exit(0)


if __name__ == "__main__":
    main()

"""Bytes between workers and servers that look up rows of a Zipf stream, with a cache and without.

`python -m benchmarks.hot_rows SPEC` is the chief. All that the tasks send each other goes through
a relay that counts it (`benchmarks.relay`), so that the bytes are those of TCP: ids, rows and
gradients, and also the small variables, the counters and what TensorFlow adds to each message.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks.baselines.cluster import free_ports
from benchmarks.comparisons import Comparison
from benchmarks.relay import count
from trainer.cluster import signals
from trainer.config.load import parse_config
from trainer.strategies.async_parameter_server import AsyncParameterServer
from trainer.strategies.strategy import Problem, gradient_of
from trainer.strategies.updates.batch_rows import RowsOnce
from trainer.topology import Cluster, Task
from trainer.training.optimizers import build_optimizer

EXPONENT, ROWS, DIMENSION, BATCH = 1.05, 1_000_000, 16, 1024
TABLES = ("user", "item")
# Of a step: an id of 64 bits, its row and its gradient for each.
LOOKUPS = len(TABLES) * BATCH * (8 + 2 * 4 * DIMENSION)
CACHE = {"cached_rows": 200_000, "cache_staleness": 16}
STEPS, FEW_STEPS, WARM = 10_000, 400, 50
TEST_BATCHES = 100
PS, WORKERS = 2, 2
_SERVE = """
import json, sys
import tensorflow as tf
path, role, index = sys.argv[1:]
settings = tf.compat.v1.ConfigProto(
    device_count={"CPU": 1}, inter_op_parallelism_threads=16, intra_op_parallelism_threads=1
)
settings.experimental.disable_thread_spinning = True
spec = tf.train.ClusterSpec(json.load(open(path)))
server = tf.distribute.Server(spec, role, int(index), config=settings)
print("serving", flush=True)
server.join()
"""


def hot_rows() -> Comparison:
    """Bytes of a step that are saved, over a row and a gradient for each lookup."""
    with tempfile.TemporaryDirectory(prefix="flotilla-bench-") as name:
        folder = Path(name)
        directly = measured(folder / "directly", {}, steps=FEW_STEPS, directly=True)
        once = measured(folder / "once", {})
        cached = measured(folder / "cached", CACHE)
    return Comparison(
        name=f"bytes saved by a cache of hot rows, Zipf {EXPONENT}, {ROWS:,} rows a table",
        rounds=(1 - cached["bytes"] / directly["bytes"],),
        at_least=0.8,
        more={
            "saved_without_a_cache": 1 - once["bytes"] / directly["bytes"],
            "auc_lost": once["auc"] - cached["auc"],
            "bytes_of_the_lookups_alone": LOOKUPS,
            "directly": directly["bytes"],
            "once": once,
            "cached": {**CACHE, **cached},
        },
    )


def measured(
    folder: Path, training: dict[str, Any], *, steps: int = STEPS, directly: bool = False
) -> dict[str, Any]:
    """Return the bytes of a step and the AUC of a cluster below a folder."""
    counts = {"ps": PS, "worker": WORKERS, "chief": 1}
    ports = iter(free_ports(sum(counts.values())))
    real = {role: [next(ports) for _ in range(n)] for role, n in counts.items()}
    serving = [(role, index) for role in ("ps", "worker") for index in range(counts[role])]
    with ExitStack() as all_of_them:

        def start(name: str, number: int, words: list[Any]) -> subprocess.Popen[str]:
            return all_of_them.enter_context(_process(folder / name, number, words))

        relayed = [real[role][index] for role, index in serving]
        said = json.loads(_line(start("relay", 0, ["-m", "benchmarks.relay", *relayed])))
        through = dict(zip(serving, said["addresses"], strict=True))

        def seen_by(task: tuple[str, int]) -> dict[str, list[str]]:
            return {
                role: [
                    through[role, n]
                    if (role, n) in through and (role, n) != task
                    else f"127.0.0.1:{port}"
                    for n, port in enumerate(roles)
                ]
                for role, roles in real.items()
            }

        for role, index in serving:
            path = folder / f"{role}-{index}.json"
            path.write_text(json.dumps(seen_by((role, index))), encoding="utf-8")
            _line(start(f"{role}-{index}", index, ["-c", _SERVE, path, role, index]))
        spec = folder / "spec.json"
        what = {
            "cluster": seen_by(("chief", 0)),
            "counter": said["counter"],
            "training": training,
            "directly": directly,
            "steps": steps,
        }
        spec.write_text(json.dumps(what), encoding="utf-8")
        found: dict[str, Any] = json.loads(
            _line(start("chief", 0, ["-m", "benchmarks.hot_rows", spec]))
        )
    return found


@contextmanager
def _process(folder: Path, number: int, words: list[Any]) -> Iterator[subprocess.Popen[str]]:
    folder.mkdir(parents=True)
    (folder / "number.txt").write_text(str(number), encoding="utf-8")
    settings = {
        **os.environ,
        **signals.parent_environment(),
        "GRPC_FAIL_FAST": "use_caller",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path]),
    }
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *map(str, words)],
            cwd=folder,
            env=settings,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _line(process: subprocess.Popen[str]) -> str:
    if process.stdout is None or not (line := process.stdout.readline()):
        raise RuntimeError(f"a task has ended with code {process.wait()}")
    return line


def ids(seed: tf.Tensor) -> tf.Tensor:
    """Return the ids [BATCH] of a table, by Zipf's law, the popular ones spread over all ids.

    The inverse of the continuous law, each number of which is a rank.
    """
    drawn = tf.random.stateless_uniform([BATCH], seed, dtype=tf.float64)
    power = 1 - EXPONENT
    ends = [0.5**power, (ROWS + 0.5) ** power]
    rank = tf.round((ends[0] + drawn * (ends[1] - ends[0])) ** (1 / power))
    return tf.clip_by_value(tf.cast(rank, tf.int64) - 1, 0, ROWS - 1) * 7_368_787 % ROWS


def taste(numbers: tf.Tensor, salt: int) -> tf.Tensor:
    """Return what is true of an id, from -1 to 1, the same wherever it is asked."""
    mixed = tf.cast(numbers, tf.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(salt * 977)
    mixed = tf.bitwise.bitwise_xor(mixed, tf.bitwise.right_shift(mixed, np.uint64(30)))
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return tf.cast(tf.bitwise.right_shift(mixed, np.uint64(40)), tf.float32) / 2.0**23 - 1


def clicks(number: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
    """Return a batch of clicks by its number."""
    found = {
        name: ids(tf.stack([number, tf.constant(n, tf.int64)])) for n, name in enumerate(TABLES)
    }
    user, item = found.values()
    logit = 1.5 * taste(user, 1) + 2 * taste(item, 2)
    logit += tf.add_n([2.0 * taste(user, n) * taste(item, 10 + n) for n in range(3, 6)])
    chance = tf.random.stateless_uniform([BATCH], tf.stack([number, tf.constant(7, tf.int64)]))
    return found, tf.cast(chance < tf.sigmoid(logit), tf.float32)


def model() -> keras.Model:
    """Return a factorization of users and items, in tables of Keras's own."""
    keras.utils.set_random_seed(0)
    given = {name: keras.Input((), dtype="int64", name=name) for name in TABLES}
    rows = [
        keras.layers.Embedding(ROWS, DIMENSION, name=f"{name}_table")(given[name])
        for name in TABLES
    ]
    both = keras.layers.Concatenate()(rows)
    match = keras.layers.Dot(axes=1)(rows)
    logit = keras.layers.Add(name="logit")([match, keras.layers.Dense(1, name="bias")(both)])
    return keras.Model(given, logit)


class Directly(AsyncParameterServer):
    """Looks up each table by itself, and moves a row and a gradient as often as a batch has its id.

    What it learns does not count, as the parts of a gradient are not summed.
    """

    def gradient(self, problem: Problem, **_: Any) -> Any:
        """Return the function from a batch to loss and gradient."""
        gradient = gradient_of(self.model, problem.loss)

        def apart(batch: Any) -> tuple[tf.Tensor, list[Any]]:
            value, found = gradient(batch)
            return value, [
                RowsOnce(each.values, each.indices, each.dense_shape)
                if isinstance(each, tf.IndexedSlices)
                else each
                for each in found
            ]

        return apart


def lead(spec: dict[str, Any]) -> dict[str, float]:
    """Train, and return the bytes of a step and the AUC in the end."""
    training = {
        "steps": spec["steps"],
        "batch_size": BATCH,
        "optimizer": {"name": "adagrad", "learning_rate": 0.1},
        **spec["training"],
    }
    config = parse_config(
        {"training": training, "cluster": {"parameter_servers": PS, "workers": WORKERS}}
    )
    addresses = {role: tuple(each) for role, each in spec["cluster"].items()}
    kind = Directly if spec["directly"] else AsyncParameterServer
    strategy = kind(config, Cluster(addresses=addresses), Task(role="chief", index=0))

    def loss(_model: Any, batch: Any, logit: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(
            tf.nn.sigmoid_cross_entropy_with_logits(labels=batch[1], logits=logit[:, 0])
        )

    def batches() -> tf.data.Dataset:
        # No two workers train on the same.
        first = tf.strings.to_number(tf.io.read_file("number.txt"), tf.int64) * 2**32
        return tf.data.Dataset.counter().map(lambda n: clicks(first + n)).prefetch(2)

    problem = Problem(
        build_model=model,
        build_optimizer=lambda: build_optimizer(config.training),
        loss=loss,
        chance_loss=1.0,
        batches=batches,
    )
    strategy.build(problem)
    # Of the first stretch are also the messages of graphs.
    strategy.run(WARM)
    before = count(spec["counter"])
    strategy.run(spec["steps"] - WARM)
    moved = count(spec["counter"]) - before
    return {
        "bytes": moved / (spec["steps"] - WARM),
        "auc": _auc(strategy),
        "steps": strategy.global_step(),
    }


def _auc(strategy: Any) -> float:
    values = {path: each.numpy() for path, each in strategy.variables().items()}
    copy = model()
    for each in copy.variables:
        each.assign(values[f"model/{each.path}"])
    area = keras.metrics.AUC(num_thresholds=2000, from_logits=True)
    for number in range(TEST_BATCHES):
        found, label = clicks(tf.constant(-1 - number, tf.int64))
        area.update_state(label, copy(found)[:, 0])
    return float(area.result())


def main() -> None:
    """Print what `lead` returns, as JSON."""
    signals.end_with_parent()
    found = lead(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    # The threads of the coordinator wait for workers.
    os._exit(0)


if __name__ == "__main__":
    main()

"""Measures checkpoints in parts: the memory of the chief, and how long training pauses.

Two servers hold tables that are larger than the chief's memory. The chief is a separate process
that builds the model on the servers, saves and restores it, and prints its measurements.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from benchmarks.comparisons import Comparison
from flotilla.trainer import storage
from flotilla.trainer.checkpoints.checkpoints import Checkpoints, restore
from flotilla.trainer.checkpoints.index import contents
from flotilla.trainer.checkpoints.part_saver import PartServers, find_server, side_by_side
from flotilla.trainer.checkpoints.part_server import PartServer
from flotilla.trainer.checkpoints.tensor_bundle import Variables
from flotilla.trainer.cluster.local import reserve_cluster
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.topology import Cluster, Task, from_tf_config
from flotilla.trainer.embeddings.sharded_embedding import ShardedEmbedding
from flotilla.trainer.runtime import signals
from flotilla.trainer.strategies.parameter_server import NUMBER_FILE, Served
from flotilla.trainer.strategies.placement import build_placed_model, choose_places
from flotilla.trainer.strategies.strategy import create

MEGABYTES = int(os.environ.get("BENCH_MEGABYTES", "2000"))
SAVES = 3
SERVERS = 2
DIMENSION = 64
CHIEF = Task(role="chief", index=0)


def checkpoint_parts() -> Comparison:
    """Return how long a save pauses training, relative to an in-memory copy on the servers."""
    seen = _led()
    return Comparison(
        name=f"saving {MEGABYTES:,} MB in parts: pause of training, compared with a copy in memory",
        rounds=tuple(
            each / copied for each, copied in zip(seen["pauses"], seen["copies"], strict=True)
        ),
        at_most=1.2,
        more=seen,
    )


def _led() -> Any:
    with tempfile.TemporaryDirectory(prefix="flotilla-bench-") as name:
        folder = Path(name)
        with reserve_cluster({"chief": 1, "ps": SERVERS, "worker": 1}) as cluster:
            serving = [Task(role="ps", index=index) for index in range(SERVERS)]
            with _started(folder, cluster, [*serving, Task(role="worker", index=0)]):
                chief = _process(folder, cluster, CHIEF, subprocess.PIPE)
                text, _ = chief.communicate()
        if chief.returncode:
            raise RuntimeError(f"the chief has failed with {chief.returncode}")
    return json.loads(text.splitlines()[-1])


@contextmanager
def _started(folder: Path, cluster: Cluster, tasks: list[Task]) -> Iterator[None]:
    made = [_process(folder, cluster, each, subprocess.DEVNULL) for each in tasks]
    try:
        yield
    finally:
        for each in made:
            each.kill()
            each.wait()


def _process(
    folder: Path,
    cluster: Cluster,
    task: Task,
    output: int,
) -> subprocess.Popen[str]:
    own = folder / str(task)
    own.mkdir()
    # The worker reads its number from this file.
    (own / NUMBER_FILE).write_text(str(task.index), encoding="utf-8")
    settings = {
        **os.environ,
        **signals.parent_environment(),
        "GRPC_FAIL_FAST": "use_caller",
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "TF_CONFIG": cluster.tf_config(task),
    }
    command = [sys.executable, "-m", "benchmarks.checkpoint_parts", str(folder / "checkpoints")]
    return subprocess.Popen(command, cwd=own, env=settings, stdout=output, text=True)


def _serve(cluster: Cluster, task: Task) -> None:
    server = tf.distribute.Server(
        tf.train.ClusterSpec(cluster.spec()), job_name=task.role, task_index=task.index
    )
    PartServer(Path(), str(task)).start()
    server.join()


def _lead(cluster: Cluster, task: Task, folder: Path) -> dict[str, Any]:
    config = parse_config({"training": {"strategy": "async_parameter_server"}})
    strategy = create(config, cluster, task)
    if not isinstance(strategy, Served):
        raise TypeError("a strategy without servers")
    strategy.connect()
    before = peak()
    places = choose_places(_build_model, lambda _model: None, SERVERS, {})
    model = build_placed_model(_build_model, places)
    step = tf.Variable(0, dtype=tf.int64)
    variables = {f"model/{each.path}": each.value for each in model.variables}
    made = Checkpoints(storage.uri_of(folder), keep=1, scratch=Path("scratch"))
    servers = PartServers(SERVERS, strategy.io_device)
    made.enable_parts(servers, 0)
    pauses, copies, whole = [], [], []
    _touch(variables)
    for number in range(SAVES):
        copies.append(_copied(variables))
        step.assign(number)
        began = time.monotonic()
        with made.flush_at_end():
            made.save({**variables, "global_step": step}, io_device=strategy.io_device, fields={})
            pauses.append(time.monotonic() - began)
            _touch(variables)
        whole.append(time.monotonic() - began)
    found = made.newest()
    if found is None or not found.apart:
        raise RuntimeError("there is nothing to restore")
    restore(found, {**variables, "global_step": step}, io_device=None, servers=servers)
    listed = contents(made.uri)
    return {
        "pauses": [round(each, 4) for each in pauses],
        "copies": [round(each, 4) for each in copies],
        "seconds_until_published": [round(each, 2) for each in whole],
        "megabytes": listed.bytes // 10**6,
        "parts": [each // 10**6 for each in listed.parts],
        "chief_megabytes_connected": before,
        "chief_megabytes_at_most": peak(),
    }


def _build_model() -> keras.Model:
    given = keras.Input((), dtype="int64")
    rows = MEGABYTES * 10**6 // (4 * DIMENSION)
    table = ShardedEmbedding(rows, DIMENSION, shards=SERVERS, name="table")
    return keras.Model(given, keras.layers.Dense(2)(table(given)))


def _touch(variables: Variables) -> None:
    """Update a row of each table, so that TensorFlow copies the table when it is read."""
    for path, each in variables.items():
        if "table" in path:
            with tf.device(each.device):
                each.scatter_add(tf.IndexedSlices(tf.ones([1, DIMENSION]), [0]))


def _copied(variables: Variables) -> float:
    """Return the seconds that the servers take to copy their variables in memory, in parallel."""

    def of_server(server: int) -> None:
        for each in variables.values():
            if find_server(each) == server:
                with tf.device(each.device):
                    # Reading a variable copies it if rows of it were updated.
                    each.read_value()

    began = time.monotonic()
    side_by_side(range(SERVERS), of_server)
    return time.monotonic() - began


def peak() -> int:
    """Return the peak memory of this process in megabytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    kilobytes = next(int(each.split()[1]) for each in lines if each.startswith("VmHWM"))
    return kilobytes * 1024 // 10**6


def main() -> None:
    """Serve, or act as the chief and print the measurements."""
    signals.end_with_parent()
    cluster, task = from_tf_config(os.environ["TF_CONFIG"])
    if task != CHIEF:
        _serve(cluster, task)
        return
    sys.stdout.write(json.dumps(_lead(cluster, task, Path(sys.argv[1]))) + "\n")
    sys.stdout.flush()
    # Skip the cleanup, because TensorFlow's threads may still use the objects that it deletes.
    os._exit(0)


if __name__ == "__main__":
    main()

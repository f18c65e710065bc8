"""Checkpoints by parts without a cluster: this process is the chief and every server."""

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from flotilla.trainer import storage
from flotilla.trainer.checkpoints import part_saver
from flotilla.trainer.checkpoints.checkpoints import Checkpoints, open_checkpoints
from flotilla.trainer.checkpoints.part_saver import PartServers
from flotilla.trainer.checkpoints.part_server import PartServer
from tests.stores.fixtures import bucket_name

SHAPES = {"model/table": [1000, 4], "model/dense/kernel": [4, 2], "optimizer/m": [4, 2]}
ON_FIRST = "model/table"


def variables(step: int = 10, value: float = 1.0, **shapes: list[int]) -> dict[str, tf.Variable]:
    """Return the variables of a run. Those of the table are on the first of two servers."""
    made = {
        path: tf.Variable(tf.fill(shape, value), name=f"on-{int(path != ON_FIRST)}")
        for path, shape in {**SHAPES, **shapes}.items()
    }
    counter = tf.Variable(step, dtype=tf.int64, name="on-0")
    return {**made, "global_step": counter}


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """Limit the size of files that this process writes, as on a nearly full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def number(variable: tf.Variable) -> int:
    return int(variable.name.partition(":")[0].rpartition("-")[2])


@pytest.fixture
def two_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PartServers]:
    folder = tmp_path / "servers"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(part_saver, "find_server", number)
    monkeypatch.setattr(part_saver, "server_device", lambda _: "/CPU:0")
    server = PartServer(folder, "ps-0")
    server.start()
    made = PartServers(2, None)
    made._are_ready = True
    made._folders = dict.fromkeys(range(2), str(folder))
    yield made
    server.stop()


@pytest.fixture
def in_bucket(gcs: Any, tmp_path: Path, two_servers: PartServers) -> Callable[..., Checkpoints]:
    """Return a function that opens a chief's checkpoints in a bucket, which are saved by parts."""
    bucket = bucket_name()
    gcs.create_bucket(bucket)

    def make(scratch: str = "chief") -> Checkpoints:
        uri = f"gs://{bucket}/run/checkpoints"
        made = open_checkpoints(uri, keep=3, scratch=tmp_path / scratch, alone=True)
        made.enable_parts(two_servers, 0)
        return made

    return make


def saved(
    folder: Path, two: PartServers, held: dict[str, tf.Variable], **fields: object
) -> Checkpoints:
    """Save a checkpoint by parts below a folder, and wait until it is published."""
    made = opened(folder, two)
    with made.flush_at_end():
        made.save(held, io_device=None, fields=dict(fields))
    return made


def opened(folder: Path, two: PartServers | None) -> Checkpoints:
    made = Checkpoints(storage.uri_of(folder / "checkpoints"), keep=2, scratch=folder / "scratch")
    if two:
        made.enable_parts(two, 0)
    return made

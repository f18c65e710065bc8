"""The role of a parameter server."""

from __future__ import annotations

import pytest
import tensorflow as tf

from trainer.checkpoints.part_server import READY, REQUESTS, PartServer
from trainer.cluster import loopback
from trainer.cluster.launcher import Job
from trainer.config.schema import Config
from trainer.topology import Cluster, Task
from trainer.training import server


class Serves(Exception):  # noqa: N818
    """TensorFlow's server is there."""


def test_a_server_cleans_its_folder_before_the_chief_reaches_it(tmp_path, monkeypatch):
    left = tmp_path / REQUESTS / "of-another-process.json"
    left.parent.mkdir(parents=True)
    left.write_text("{}")
    parts = PartServer(tmp_path, "ps-0")
    seen = []

    def serves(*_, **__):
        seen.extend([(tmp_path / READY).exists(), left.exists()])
        raise Serves

    monkeypatch.setattr(server, "PartServer", lambda *_: parts)
    monkeypatch.setattr(tf.distribute, "Server", serves)
    monkeypatch.setattr(loopback, "close_to_others", lambda _: None)
    job = Job(config=Config(), workdir=tmp_path, dataset="", checkpoints="")
    cluster = Cluster(addresses={"chief": ("c:1",), "worker": ("w:1",), "ps": ("p:1",)})
    try:
        with pytest.raises(Serves):
            server.serve(job, cluster, Task(role="ps", index=0))
    finally:
        parts.stop()
    assert seen == [True, False]

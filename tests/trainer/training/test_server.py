"""The role of a parameter server."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import tensorflow as tf

from trainer.checkpoints import part_server
from trainer.checkpoints.part_server import READY, REQUESTS, PartServer
from trainer.cluster import loopback
from trainer.cluster.launcher import Job
from trainer.config.schema import Config
from trainer.topology import Cluster, Task
from trainer.training import server


class Serves(Exception):  # noqa: N818
    """TensorFlow's server is there."""


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Return what lets a server serve in the folder of the test, and looks when it is there."""

    def called(look):
        parts, seen = PartServer(tmp_path, "ps-0"), []

        def serves(*_, **__):
            seen.append(look())
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
        return seen

    monkeypatch.chdir(tmp_path)
    return called


def test_a_server_cleans_its_folder_before_the_chief_reaches_it(tmp_path, serve):
    left = tmp_path / REQUESTS / "of-another-process.json"
    left.parent.mkdir(parents=True)
    left.write_text("{}")
    assert serve(lambda: (Path(READY).exists(), left.exists())) == [(True, False)]
    assert Path.cwd() == tmp_path


def test_graphs_do_not_find_what_is_left_where_nothing_can_be_written(
    tmp_path, serve, monkeypatch, caplog
):
    left = tmp_path / READY
    left.parent.mkdir()
    left.write_text('{"task": "ps-0"}')

    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(part_server.shutil, "rmtree", lambda *_, **__: None)
    monkeypatch.setattr(part_server.Path, "mkdir", refuse)
    found = serve(lambda: (left.exists(), bool(tf.io.matching_files(READY).shape[0])))
    assert found == [(True, False)]
    assert "Read-only file system" in caplog.text

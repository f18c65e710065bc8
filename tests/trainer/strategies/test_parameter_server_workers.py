"""What a chief has each worker do by itself, and how long it waits for that."""

from __future__ import annotations

import threading

import pytest
import tensorflow as tf

from trainer.config.schema import Config
from trainer.errors import ClusterLostError
from trainer.strategies import parameter_server
from trainer.strategies.parameter_server import Served
from trainer.topology import Cluster, Task


class Leading(Served):
    """A chief without a model."""

    build = run = None


@pytest.fixture
def waited(monkeypatch):
    """Return what waits for two workers, which do some work of Python's."""
    monkeypatch.setattr(parameter_server, "worker_device", lambda _: "/device:CPU:0")
    cluster = Cluster(addresses={"worker": ("localhost:1", "localhost:2")})

    def wait(work, seconds):
        def graph():
            tf.py_function(work, [], [])

        Leading(Config(), cluster, Task(role="chief", index=0)).each_worker(graph, seconds)

    return wait


def test_workers_are_waited_for(waited):
    done = []
    waited(lambda: done.append(1), 60.0)
    assert done == [1, 1]


def test_one_that_is_gone_has_done_its_own(waited):
    def gone():
        done.append(1)
        raise tf.errors.UnavailableError(None, None, "it is gone")

    done = []
    waited(gone, 60.0)
    assert done == [1, 1]


def test_one_that_does_not_end_ends_the_attempt(waited):
    ends = threading.Event()
    with pytest.raises(ClusterLostError, match=r"worker-0 has not ended after 0.2 s what it did"):
        waited(lambda: ends.wait(60) and None, 0.2)
    ends.set()

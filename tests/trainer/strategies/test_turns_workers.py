"""What a chief has each worker do by itself, and how long it waits for that."""

from __future__ import annotations

import threading

import pytest
import tensorflow as tf

from trainer.errors import ClusterLostError
from trainer.strategies import turns
from trainer.strategies.turns import on_each_worker


@pytest.fixture
def waited(monkeypatch):
    """Return what waits for two workers, which do some work of Python's."""
    monkeypatch.setattr(turns, "worker_device", lambda _: "/device:CPU:0")

    def wait(work, seconds):
        def graph():
            tf.py_function(work, [], [])

        on_each_worker(2, graph, seconds)

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

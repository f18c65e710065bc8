"""The published programs and their sources."""

from __future__ import annotations

from dataclasses import dataclass

_BOOK = "A. Fandango, Mastering TensorFlow 1.x, Packt 2018, chapter 15"

_EXAMPLE = (
    "`dist_mnist.py` of the examples of Kubeflow's training operator, after "
    "`mnist_replica.py` of TensorFlow 1"
)


@dataclass(frozen=True, kw_only=True)
class Program:
    """One published program: what it does, and where it was published."""

    what: str
    source: str


PROGRAMS = {
    "async_softmax": Program(
        what="softmax regression, SGD 0.01, batch 100, 1 parameter server, 3 asynchronous "
        "workers, 50 epochs of 55,000 examples on each: 82,500 global steps",
        source=f"{_BOOK}, `ch-15_mnist_dist_async.py`",
    ),
    "sync_softmax": Program(
        what="the same with synchronous updates",
        source=f"{_BOOK}, `ch-15_mnist_dist_sync.py`",
    ),
    "async_mlp": Program(
        what="784-100-10 with ReLU, Adam 0.01, batch 100, 1 parameter server, 2 workers, "
        "20,000 global steps, `sync_replicas` off",
        source=_EXAMPLE,
    ),
    "sync_mlp": Program(what="the same with `sync_replicas` on", source=_EXAMPLE),
    "mirrored_cnn": Program(
        what="convolution 32 of 3x3, max pooling, dense 64, dense 10; SGD 0.0001, 4 replicas of "
        "batch 64, one epoch of 60,000 examples: 234 steps (here the convolution pads its input)",
        source='TensorFlow tutorial "Multi-worker training with Estimator"',
    ),
    "in_graph": Program(
        what="in-graph replication: one client, a tower for each of 2 workers",
        source='D. Murray, "Distributed TensorFlow", TensorFlow Dev Summit 2017',
    ),
}

"""The programs that Flotilla is compared with do what their descriptions say."""

import subprocess
import sys

import numpy as np
import pytest

from benchmarks.baselines import cluster, mnist
from benchmarks.baselines.mnist import Batches


def test_each_epoch_holds_each_example_once_in_an_order_of_its_own():
    images = np.arange(12, dtype=np.float32)[:, None]
    batches = Batches(images, images, 4, seed=0)
    epochs = [[float(x) for _ in range(3) for x in batches.next()[0][:, 0]] for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(12))
    assert epochs[0] != epochs[1]


def test_the_examples_are_those_of_the_program(mnist_dir, monkeypatch):
    monkeypatch.setenv("FLOTILLA_MNIST_DIR", str(mnist_dir))
    images, labels = mnist.training_examples()
    assert images.shape == (55000, 784)
    assert (images.min(), images.max()) == (0, 1)
    np.testing.assert_array_equal(labels.sum(1), np.ones(55000))
    assert [len(each) for each in mnist.held_out_examples()] == [10000, 10000]


@pytest.mark.cluster
@pytest.mark.long
@pytest.mark.parametrize("sync", [False, True])
def test_both_workers_of_the_program_work(tmp_path, mnist_dir, monkeypatch, sync):
    monkeypatch.setenv("FLOTILLA_MNIST_DIR", str(mnist_dir))
    trained = cluster.train(tmp_path / "run", steps=600, sync=sync, snapshots=0 if sync else 200)
    assert trained.steps_per_second > 0
    # An asynchronous update uses one gradient; a synchronous one uses a gradient of each worker.
    whole = 600 * (2 if sync else 1)
    assert sum(trained.local_steps) == pytest.approx(whole, rel=0.1)
    assert min(trained.local_steps) > 0.3 * max(trained.local_steps)
    assert bool(trained.kept) != sync
    weights = [np.load(path) for _, _, path in trained.kept]
    assert [each["arr_0"].shape for each in weights] == [(784, 100)] * len(weights)
    assert sync or not np.array_equal(weights[0]["arr_0"], weights[-1]["arr_0"])


def process(seconds: float, code: int = 0) -> subprocess.Popen[bytes]:
    program = f"import sys, time; time.sleep({seconds}); sys.exit({code})"
    return subprocess.Popen([sys.executable, "-c", program])


@pytest.mark.parametrize(
    ("server", "workers"),
    [
        ((0, 0), [(60, 0), (60, 0)]),
        ((60, 0), [(0, 0), (0.1, 3)]),
    ],
)
def test_a_program_that_cannot_end_is_not_waited_for(server, workers):
    started = [process(*each) for each in (server, *workers)]
    try:
        with pytest.raises(RuntimeError, match="has failed"):
            cluster.wait(started[0], started[1:], until=len(workers))
    finally:
        for each in started:
            each.kill()
            each.wait()


def test_the_last_worker_of_a_synchronous_program_is_not_waited_for():
    started = [process(60), process(0), process(60)]
    try:
        cluster.wait(started[0], started[1:], until=1)
        assert started[2].poll() is None
    finally:
        for each in started:
            each.kill()
            each.wait()

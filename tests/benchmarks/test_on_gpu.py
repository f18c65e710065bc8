"""Both sides of the comparison on a GPU."""

from __future__ import annotations

import pytest

from benchmarks import launched
from benchmarks.on_gpu import SETTINGS, on_gpu, present


def test_the_run_is_in_16_bits_compiled_and_on_one_gpu():
    settings = {key.replace("__", "."): value for key, value in SETTINGS.items()}
    config = launched.configuration(settings)
    assert config.training.mixed_precision
    assert config.training.jit_compile
    assert config.cluster.gpus_per_worker == 1


@pytest.mark.cluster
@pytest.mark.long
@pytest.mark.skipif(not present(), reason="needs a GPU")
def test_both_sides_train(mnist_dir, monkeypatch):
    monkeypatch.setenv("FLOTILLA_MNIST_DIR", str(mnist_dir))
    monkeypatch.setitem(launched.SAME_AS_BASELINE, "data.manual_dir", str(mnist_dir))
    found = on_gpu(steps=60)
    assert len(found.rounds) == 3
    assert min(found.rounds) > 0
    assert all(each > 0 for pair in found.more["examples_per_second"] for each in pair)

"""Fast paths and `model.fit` are trained alike: as many gradients, the same optimizer."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from benchmarks import launched, same_accuracy
from benchmarks.baselines.plain import Settings
from benchmarks.same_accuracy import PATHS, settings_of
from trainer.strategies.turns import LONG_RUN


@pytest.mark.parametrize("name", PATHS)
def test_both_sides_see_as_many_examples(name):
    path = PATHS[name]
    config = launched.configuration(settings_of(path, 2))
    training = config.training
    gradients = training.pull_every
    if training.strategy == "sync_parameter_server":
        gradients = config.cluster.workers
    seen = training.steps * gradients * training.batch_size
    assert seen == path.plain.steps * path.plain.batch
    assert training.optimizer.name == path.plain.optimizer.lower()
    assert training.optimizer.learning_rate == path.plain.rate
    assert training.seed == 2


def test_the_asynchronous_path_is_the_fast_one():
    config = launched.configuration(settings_of(PATHS["async"], 0))
    assert config.training.steps >= LONG_RUN


def test_a_round_is_a_seed_and_the_ratio_that_of_both(monkeypatch):
    monkeypatch.setattr(same_accuracy, "_own", lambda _path, seed, _home: 0.9 + seed / 10)
    monkeypatch.setattr(same_accuracy, "_plain", lambda settings: 1 - settings.seed / 10)
    found = same_accuracy.same_accuracy("single")
    assert found.rounds == pytest.approx((0.9, 1.0 / 0.9, 1.1 / 0.8))
    assert found.more["accuracy"] == [[0.9, 1.0], [1.0, 0.9], [1.1, 0.8]]


@pytest.mark.long
def test_the_plain_way_learns(mnist_dir, monkeypatch):
    monkeypatch.setenv("FLOTILLA_MNIST_DIR", str(mnist_dir))
    settings = Settings(optimizer="Adam", rate=0.003, batch=100, steps=500)

    def accuracy(settings: Settings) -> float:
        command = [sys.executable, "-m", "benchmarks.baselines.plain", settings.words()]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])["accuracy"]

    assert accuracy(settings) > 0.9
    assert accuracy(replace(settings, rate=0.0)) < 0.3

"""Tests a model on servers that hold earlier values. This process acts as every server."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.topology import Cluster, Task
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.strategies import parameter_server, placement
from flotilla.trainer.strategies.parameter_server import Served
from flotilla.trainer.strategies.strategy import Problem

ROWS, HERE = 40, "/device:CPU:0"


class Building(Served):
    """A strategy that can only be built."""

    run = None

    def connect(self):
        """Do not connect, because all servers are in this process."""


@pytest.fixture
def built(monkeypatch):
    """Return a function that builds a model with a large table; `taken` servers hold its values."""
    monkeypatch.setattr(placement, "LARGE_BYTES", 4 * ROWS)
    for module in (placement, parameter_server):
        monkeypatch.setattr(module, "server_device", lambda _: HERE)

    def built(taken):
        def build_model():
            given = keras.Input((), dtype="int64")
            table = keras.layers.Embedding(ROWS, 4, keras.initializers.Constant(2.0), name="table")
            return keras.Model(given, keras.layers.Dense(1)(table(given)))

        strategy = Building(
            parse_config({"training": {"optimizer": {"name": "adagrad"}}}),
            Cluster(addresses={"ps": ("localhost:1", "localhost:2")}),
            Task(role="chief", index=0),
        )
        strategy.state = SimpleNamespace(taken=taken)
        problem = Problem(
            build_model=build_model,
            build_optimizer=lambda: keras.optimizers.Adagrad(0.1, initial_accumulator_value=0.25),
            loss=None,
            chance_loss=1.0,
            batches=None,
        )
        strategy.build_model(problem)
        return strategy

    return built


def without_values(strategy):
    return sorted(each.path for each, _ in strategy._kept._made)


@pytest.mark.parametrize(("taken", "names"), [((), []), ((1,), []), ((0,), ["table/embeddings"])])
def test_what_is_large_and_on_a_server_with_values_is_made_without(built, taken, names):
    strategy = built(taken)
    assert [each for each in without_values(strategy) if "adagrad" not in each] == names
    table, *_ = strategy.model.trainable_variables
    # Slots of rows are known by their initializer.
    ((_, first),) = parameter_server.embedding_table.list_slots(strategy.optimizer, table)
    assert first == 0.25
    # What nobody has taken gets its values.
    if names:
        strategy._kept.give_others([])
    assert np.unique(table.numpy()).tolist() == [2.0]


@pytest.mark.parametrize(
    ("cause", "raised"),
    [
        (tf.errors.UnavailableError(None, None, "ps-0"), tf.errors.UnavailableError),
        (ValueError("no such layer"), ConfigError),
    ],
)
def test_a_server_that_is_gone_is_no_fault_of_the_model(built, monkeypatch, cause, raised):
    def fails(*_):
        raise ConfigError("model two_tower: it fails") from cause

    monkeypatch.setattr(parameter_server, "build_placed_model", fails)
    with pytest.raises(raised):
        built(())

"""How a model is built for variables that an earlier chief has left; all servers are here."""

from __future__ import annotations

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer.config.load import parse_config
from trainer.strategies import parameter_server, placement
from trainer.strategies.left_variables import MisfitError
from trainer.strategies.parameter_server import Served
from trainer.strategies.strategy import Problem
from trainer.topology import Cluster, Task

ROWS, HERE = 40, "/device:CPU:0"


class Building(Served):
    """A strategy that builds, and does no more."""

    build = run = None

    def connect(self):
        """All servers are here."""


class Own(keras.optimizers.Adagrad):
    """An optimizer of the user's, which gives its slots values when it has made them."""

    def build(self, variables):
        super().build(variables)
        for each in self._accumulators:
            each.assign(tf.fill(each.shape, 5.0))


@pytest.fixture
def built(monkeypatch):
    """Return a strategy that has built a model with a large table, and how often it was built."""
    monkeypatch.setattr(placement, "LARGE_BYTES", 4 * ROWS)
    for module in (placement, parameter_server):
        monkeypatch.setattr(module, "server_device", lambda _: HERE)

    def built(places, optimizer=keras.optimizers.Adagrad, layers=1):
        def build_model():
            built.append(1)
            given = keras.Input((), dtype="int64")
            table = keras.layers.Embedding(ROWS, 4, tf.constant_initializer(matrix), name="table")
            found = table(given)
            for _ in range(layers):
                found = keras.layers.Dense(1)(found)
            return keras.Model(given, found)

        def refuse(reason):
            refused.append(reason)
            raise MisfitError

        built, refused, checked = [], [], []
        matrix = np.arange(4.0 * ROWS, dtype=np.float32).reshape(ROWS, 4)
        strategy = Building(
            parse_config({"training": {"optimizer": {"name": "adagrad"}}}),
            Cluster(addresses={"ps": ("localhost:1", "localhost:2")}),
            Task(role="chief", index=0),
        )
        strategy.left = SimpleNamespace(places=places, refuse=refuse)
        problem = Problem(
            build_model=build_model,
            build_optimizer=lambda: optimizer(0.1, initial_accumulator_value=0.25),
            loss=None,
            chance_loss=1.0,
            batches=None,
            check=checked.append,
        )
        try:
            strategy.build_model(problem)
        except MisfitError:
            assert refused
        return SimpleNamespace(
            times=len(built), strategy=strategy, refused=refused, checked=len(checked)
        )

    return built


def slot_of(found):
    """Return the slot of the table."""
    return found.strategy.optimizer._accumulators[0]


def test_where_places_are_known_it_is_built_once_and_here(built):
    found = built([1, 0, 1])
    assert (found.times, found.checked, found.refused) == (1, 0, [])
    model, optimizer = found.strategy.model, found.strategy.optimizer
    every = [*model.variables, *(each for each in optimizer._accumulators)]
    assert [id(each) for each in found.strategy._made_here] == [id(each.value) for each in every]
    assert [place.server for place in found.strategy._places] == [1, 0, 1]


def test_else_it_is_built_twice_checked_and_has_values(built):
    found = built(())
    assert (found.times, found.checked, found.refused) == (2, 1, [])
    assert list(found.strategy._made_here) == []
    table = found.strategy.model.trainable_variables[0]
    assert table.numpy()[1].tolist() == [4.0, 5.0, 6.0, 7.0]
    assert np.unique(slot_of(found)).tolist() == [0.25]


def test_slots_of_an_optimizer_of_the_user_have_values(built):
    found = built([1, 0, 1], Own)
    assert len(found.strategy._made_here) == len(found.strategy.model.variables)
    assert np.unique(slot_of(found)).tolist() == [5.0]


@pytest.mark.parametrize(("layers", "words"), [(2, "2 more variables"), (0, "2 fewer variables")])
def test_a_model_of_other_variables_is_refused_and_not_the_run(built, layers, words):
    found = built([1, 0, 1], layers=layers)
    assert (found.times, len(found.refused)) == (1, 1)
    assert words in found.refused[0]

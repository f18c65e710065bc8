"""What every strategy is built from: one update, the exact counter, variables by path."""

from __future__ import annotations

import inspect
import threading
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.trainer.objectives import cross_entropy
from tests.trainer.plain import CHIEF, Plain, dense, examples, problem_of
from trainer.config.optimizer import OPTIMIZERS, OptimizerConfig
from trainer.config.schema import Config, TrainingConfig
from trainer.strategies.strategy import Strategy, checkpoint_variables, exact_counter, step_of
from trainer.topology import Cluster
from trainer.training.optimizers import build_optimizer


def built(optimizer="adam", model=dense, **args):
    network = model()
    settings = OptimizerConfig(name=optimizer, args=args)
    updates = build_optimizer(TrainingConfig(optimizer=settings))
    updates.build(network.trainable_variables)
    return network, updates


def linear(**options):
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, name="logits", **options)])


def test_the_interface_asks_for_five_things():
    assert Strategy.__abstractmethods__ == {
        "build",
        "run",
        "global_step",
        "variables",
        "learning_rate",
    }
    assert Strategy.io_device is None
    assert inspect.isabstract(Strategy)


def test_what_a_strategy_gets_before_it_is_built():
    cluster = Cluster(addresses={"ps": ("a:1",)})

    strategy = Plain(Config(), cluster, CHIEF)
    assert (strategy.config, strategy.cluster, strategy.task) == (Config(), cluster, CHIEF)
    strategy.close()


def test_a_strategy_that_leads_alone_publishes_and_agrees_with_itself():
    strategy = Plain()
    assert strategy.publishes
    assert strategy.barrier(3, -3, 0) == (3, -3, 0)
    strategy.leave()


def test_one_update_is_gradient_descent():
    model, optimizer = built("sgd", linear)
    points, labels = examples()
    kernel, bias = (variable.numpy() for variable in model.trainable_variables)
    logits = points.numpy() @ kernel + bias
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    wrong = (shares - np.eye(3)[labels.numpy()]) / len(labels)
    loss = step_of(model, optimizer, cross_entropy)((points, labels))
    expected = -np.log(shares[np.arange(len(labels)), labels.numpy()]).mean()
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    rate = float(optimizer.learning_rate)
    found = [variable.numpy() for variable in model.trainable_variables]
    np.testing.assert_allclose(found[0], kernel - rate * points.numpy().T @ wrong, atol=1e-6)
    np.testing.assert_allclose(found[1], bias - rate * wrong.sum(axis=0), atol=1e-6)


def test_losses_of_layers_count():
    batch = examples()
    plain, _ = built("sgd", linear)
    weighed, optimizer = built(
        "sgd", partial(linear, kernel_regularizer=keras.regularizers.L2(0.5))
    )
    weighed.set_weights(plain.get_weights())
    kernel = plain.get_weights()[0]
    loss = step_of(weighed, optimizer, cross_entropy)(batch)
    without = float(cross_entropy(plain, batch, plain(batch[0])))
    assert float(loss) == pytest.approx(without + 0.5 * (kernel**2).sum(), rel=1e-5)


def test_layers_are_in_training():
    model, optimizer = built(model=dense)
    mean = next(v for v in model.variables if v.path.endswith("moving_mean"))
    before = mean.numpy()
    step_of(model, optimizer, cross_entropy)(examples())
    assert not np.array_equal(mean.numpy(), before)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_every_update_of_every_optimizer_is_counted_once(name):
    model, optimizer = built(name, linear)
    counter = exact_counter(optimizer)
    step = tf.function(step_of(model, optimizer, cross_entropy))
    for _ in range(3):
        step(examples())
    assert int(counter) == 3
    assert int(optimizer.iterations) == 3


def test_no_update_is_left_uncounted_when_workers_race():
    model, optimizer = built("sgd", linear)
    counter = exact_counter(optimizer)
    step = step_of(model, optimizer, cross_entropy)
    batch = examples()

    @tf.function
    def closure():
        for _ in tf.range(200):
            step(batch)

    closure.get_concrete_function()
    workers = [threading.Thread(target=closure) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert int(counter) == 800


def test_the_bias_correction_of_adam_reads_the_exact_counter():
    model, optimizer = built("adam", linear)
    counter = exact_counter(optimizer)
    counter.assign(10**6)
    before = model.get_weights()[0]
    gradient = tf.ones_like(before)
    optimizer.apply([gradient, tf.ones(3)], model.trainable_variables)
    # Far from the beginning nothing is corrected: the first momentum is a tenth of the gradient.
    moved = before - model.get_weights()[0]
    rate = float(optimizer.learning_rate)
    np.testing.assert_allclose(moved, rate * 0.1 / np.sqrt(0.001), rtol=1e-3)


def test_schedules_read_the_exact_counter():
    model = linear()
    halved = keras.optimizers.schedules.ExponentialDecay(1.0, decay_steps=10, decay_rate=0.5)
    optimizer = keras.optimizers.SGD(halved)
    optimizer.build(model.trainable_variables)
    counter = exact_counter(optimizer)
    counter.assign(20)
    assert float(optimizer.learning_rate) == pytest.approx(0.25)


def test_variables_stand_under_their_paths():
    model, optimizer = built("adam", partial(dense, dropout=0.5))
    named = checkpoint_variables(model, optimizer)
    assert all(isinstance(variable, tf.Variable) for variable in named.values())
    assert named["global_step"] is optimizer.iterations.value
    assert named["global_step"].dtype == tf.int64
    of_model = {path.removeprefix("model/") for path in named if path.startswith("model/")}
    assert of_model == {variable.path for variable in model.variables}
    assert any(path.endswith("moving_variance") for path in of_model)
    assert any("seed_generator" in path for path in of_model)
    slots = [path for path in named if path.startswith("optimizer/")]
    assert len(slots) == 2 * len(model.trainable_variables)
    assert not any("learning_rate" in path or "iteration" in path for path in named)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_no_variable_of_an_optimizer_is_forgotten(name):
    model, optimizer = built(name)
    named = checkpoint_variables(model, optimizer)
    kept = {id(variable) for variable in named.values()}
    left = [each.path for each in optimizer.variables if id(each.value) not in kept]
    assert [path.rpartition("/")[2] for path in left] == ["learning_rate"]


def test_the_same_configuration_gives_the_same_paths():
    first, second = (checkpoint_variables(*built("adam")) for _ in range(2))
    assert list(first) == list(second)
    assert {path: variable.shape for path, variable in first.items()} == {
        path: variable.shape for path, variable in second.items()
    }


def test_a_strategy_made_of_these_parts_learns():
    strategy = Plain()
    strategy.build(problem_of(rate=0.05)(0))
    first = strategy.run(5).loss
    assert strategy.run(200).loss < first / 2
    assert strategy.global_step() == 205
    assert strategy.learning_rate() == pytest.approx(0.05)

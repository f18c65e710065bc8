"""Tests the parts that strategies share: gradients, counter, variables, and creation."""

import threading
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer.config.model import OPTIMIZERS, OptimizerConfig
from flotilla.trainer.config.schema import STRATEGIES, Config, TrainingConfig
from flotilla.trainer.config.topology import Cluster, Task
from flotilla.trainer.optimizers.optimizers import build_optimizer
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.strategies.async_parameter_server import AsyncParameterServer
from flotilla.trainer.strategies.strategy import (
    Strategy,
    checkpoint_variables,
    create,
    exact_counter,
)
from tests.trainer.objectives import cross_entropy
from tests.trainer.plain import Plain, build_step, dense, examples


def built(optimizer="adam", model=dense, **args):
    network = model()
    settings = OptimizerConfig(name=optimizer, args=args)
    updates = build_optimizer(TrainingConfig(optimizer=settings))
    updates.build(network.trainable_variables)
    return network, updates


def linear(**options):
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, name="logits", **options)])


def test_what_a_strategy_gets_before_it_is_built():
    cluster = Cluster(addresses={"ps": ("a:1",)})
    strategy = Plain(Config(), cluster, CHIEF)
    assert (strategy.config, strategy.cluster, strategy.task) == (Config(), cluster, CHIEF)
    # It leads alone, so it publishes and agrees with itself.
    assert strategy.publishes
    assert strategy.barrier(3, -3, 0) == (3, -3, 0)
    strategy.leave()
    strategy.close()


def test_one_update_is_gradient_descent():
    model, optimizer = built("sgd", linear)
    points, labels = examples()
    kernel, bias = (variable.numpy() for variable in model.trainable_variables)
    logits = points.numpy() @ kernel + bias
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    wrong = (shares - np.eye(3)[labels.numpy()]) / len(labels)
    loss = build_step(model, optimizer, cross_entropy)((points, labels))
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
    loss = build_step(weighed, optimizer, cross_entropy)(batch)
    without = float(cross_entropy(plain, batch, plain(batch[0])))
    assert float(loss) == pytest.approx(without + 0.5 * (kernel**2).sum(), rel=1e-5)


def test_layers_are_in_training():
    model, optimizer = built(model=dense)
    mean = next(v for v in model.variables if v.path.endswith("moving_mean"))
    before = mean.numpy()
    build_step(model, optimizer, cross_entropy)(examples())
    assert not np.array_equal(mean.numpy(), before)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_every_update_of_every_optimizer_is_counted_once(name):
    model, optimizer = built(name, linear)
    counter = exact_counter(optimizer)
    step = tf.function(build_step(model, optimizer, cross_entropy))
    for _ in range(3):
        step(examples())
    assert int(counter) == 3
    assert int(optimizer.iterations) == 3


def test_no_update_is_left_uncounted_when_workers_race():
    model, optimizer = built("sgd", linear)
    counter = exact_counter(optimizer)
    step = build_step(model, optimizer, cross_entropy)
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
    # At a late step, the bias correction is 1, and the first momentum is a tenth of the gradient.
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
    model, optimizer = built(name, linear)
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


CLUSTER = Cluster(addresses={"chief": ("a:1",), "ps": ("a:2",), "worker": ("a:3",)})
CHIEF = Task(role="chief", index=0)
OWN = """
from tests.trainer.plain import Plain
from flotilla.trainer.strategies.strategy import Strategy

class Good(Plain): ...

class Half(Strategy):
    def build(self, problem): ...
    def run(self, steps): ...

class Former(Plain):
    spares_workers = True

class Unrelated: ...

value = 3
"""


@pytest.fixture
def own(tmp_path, monkeypatch, request):
    name = f"own_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(OWN)
    (tmp_path / f"{name}_broken.py").write_text("def (:\n")
    (tmp_path / f"{name}_failing.py").write_text("raise RuntimeError('first\\nsecond')\n")
    monkeypatch.syspath_prepend(tmp_path)
    return name


def config_of(name):
    return Config(training=TrainingConfig.model_construct(strategy=name))


def refused(name):
    with pytest.raises(ConfigError) as caught:
        create(config_of(name), CLUSTER, CHIEF)
    message = str(caught.value)
    assert message.startswith("training.strategy: ")
    assert len(message.splitlines()) == 1
    return message


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_name_of_the_configuration_is_a_strategy(name):
    assert isinstance(create(config_of(name), CLUSTER, CHIEF), Strategy)


def test_a_built_in_one_is_made_for_its_cluster_without_connecting_to_it():
    config = config_of("async_parameter_server")
    strategy = create(config, CLUSTER, CHIEF)
    assert type(strategy) is AsyncParameterServer
    assert strategy.config is config
    assert strategy.cluster is CLUSTER
    assert strategy.task is CHIEF
    assert strategy.io_device == "/job:chief/task:0"


def test_a_users_own(own):
    strategy = create(config_of(f"{own}:Good"), CLUSTER, CHIEF)
    assert type(strategy).__name__ == "Good"
    assert strategy.cluster is CLUSTER


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("{own}_absent:Good", "cannot import {own}_absent: ModuleNotFoundError: No module"),
        ("{own}:Absent", "{own} has no Strategy 'Absent'"),
        (".own:Good", "cannot import .own: "),
        ("{own}_broken:Good", "cannot import {own}_broken: SyntaxError: invalid syntax"),
        ("{own}_failing:Good", "cannot import {own}_failing: RuntimeError: first ("),
        ("{own}:Unrelated", "'{own}:Unrelated' is not a subclass of Strategy"),
        (
            "{own}:Former",
            "'{own}:Former' sets spares_workers, which is no longer supported; set capabilities",
        ),
        ("{own}:Half", "'{own}:Half' does not define global_step, learning_rate, variables"),
    ],
)
def test_what_is_no_strategy_is_refused_by_name(own, name, said):
    assert refused(name.format(own=own)).startswith(f"training.strategy: {said.format(own=own)}")

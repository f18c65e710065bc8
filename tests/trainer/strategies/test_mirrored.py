"""Tests updates of a single process against a plain loop, and limits of mirrored workers."""

from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.topology import Cluster, Task
from flotilla.trainer.models.registry import freeze
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.strategies.strategy import create
from tests.trainer.plain import CHIEF, NOBODY, Plain, dense, problem_of


def single(**training):
    return create(parse_config({"training": {"strategy": "single", **training}}), NOBODY, CHIEF)


def require_alike(strategy, other, tolerance):
    expected, found = other.variables(), strategy.variables()
    assert list(found) == list(expected)
    for path, variable in expected.items():
        mine = found[path].numpy()
        np.testing.assert_allclose(mine, variable.numpy(), atol=tolerance, err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_it_makes_the_updates_of_a_plain_loop(optimizer, jit):
    plain, strategy = Plain(), single(jit_compile=jit)
    reports = []
    for each in (plain, strategy):
        each.build(problem_of(optimizer=optimizer)(0))
        reports.append(each.run(5))
    assert reports[1].loss == pytest.approx(reports[0].loss, rel=1e-4)
    require_alike(strategy, plain, 1e-4)
    assert strategy.global_step() == 5
    assert strategy.learning_rate() == pytest.approx(plain.learning_rate())
    assert strategy.publishes


def programs(strategy):
    """Return the operations of each XLA program in the graph of the steps."""
    graph = strategy._run_steps.get_concrete_function(strategy._iterator, tf.constant(1)).graph
    functions = {each.signature.name: each for each in graph.as_graph_def().library.function}

    def operations(name, seen):
        for node in functions[name].node_def:
            seen.append(node.op)
            if node.attr["f"].func.name:
                operations(node.attr["f"].func.name, seen)
        return seen

    compiled = [name for name, each in functions.items() if each.attr["_XlaMustCompile"].b]
    return [operations(name, []) for name in compiled]


@pytest.mark.slow
@pytest.mark.parametrize(
    "training", [{"ema": 0.9}, {"accumulate": 3}, {"mixed_precision": "float16"}]
)
def test_gradient_and_update_are_one_program_of_xla(training):
    plain, compiled = single(**training), single(jit_compile=True, **training)
    for each in (plain, compiled):
        each.build(problem_of()(0))
    assert not programs(plain)
    assert any("MatMul" in each and "ResourceApplyAdam" in each for each in programs(compiled))
    losses = [each.run(4).loss for each in (plain, compiled)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    require_alike(compiled, plain, 1e-3)


class LooksUp(keras.layers.Layer):
    """Looks up rows in a user's own code, without Keras's embedding layer."""

    def build(self, _shape):
        self.rows = self.add_weight(shape=(20, 2), initializer="glorot_uniform", name="rows")

    def call(self, points):
        places = tf.cast(tf.math.floormod(points[:, 0] * 10, 10.0), tf.int32)
        return points[:, 1:] * tf.gather(self.rows.value, places)


def rows():
    model = dense()
    layers = [LooksUp(name="looks_up"), *model.layers]
    return keras.Sequential([keras.Input((2,)), *layers], name=model.name)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "ftrl"])
def test_where_rows_are_moved_the_gradient_alone_is_compiled(optimizer):
    plain, compiled = single(), single(jit_compile=True)
    for each in (plain, compiled):
        each.build(problem_of(rows, optimizer=optimizer)(0))
    found = programs(compiled)
    assert any("MatMul" in each for each in found)
    assert not any("AssignAddVariableOp" in each for each in found)
    assert compiled.run(4).loss == pytest.approx(plain.run(4).loss, rel=1e-3)
    require_alike(compiled, plain, 1e-3)


class Positive(keras.constraints.Constraint):
    """A user's constraint that calls NumPy, which XLA cannot compile."""

    def __call__(self, weights):
        return tf.ensure_shape(tf.numpy_function(np.abs, [weights], weights.dtype), weights.shape)


def constrained():
    model = dense()
    model.layers[0]._kernel.constraint = Positive()
    return model


@pytest.mark.slow
def test_what_a_user_has_written_of_an_update_is_not_compiled():
    strategy = single(jit_compile=True)
    strategy.build(problem_of(constrained)(0))
    strategy.run(3)
    assert (strategy.variables()["model/dense/hidden/kernel"].numpy() >= 0).all()
    assert any("MatMul" in each for each in programs(strategy))


def test_several_stretches_go_on_with_the_same_seeds():
    once, twice = single(), single()
    for each in (once, twice):
        each.build(problem_of(partial(dense, dropout=0.5))(0))
    once.run(6)
    for steps in (2, 4):
        twice.run(steps)
    require_alike(twice, once, 1e-5)


@pytest.mark.skipif(bool(tf.config.list_physical_devices("GPU")), reason="there is a GPU")
def test_nccl_is_refused_by_a_worker_that_sees_no_gpu():
    cluster = {"communication": "nccl", "gpus_per_worker": 1}
    config = parse_config({"training": {"strategy": "multi_worker_mirrored"}, "cluster": cluster})
    workers = Cluster(addresses={"worker": ("127.0.0.1:1", "127.0.0.1:2")})
    strategy = create(config, workers, Task(role="worker", index=1))
    assert not strategy.publishes
    with pytest.raises(ConfigError) as caught:
        strategy.build(problem_of()(0))
    assert str(caught.value) == (
        "cluster.communication: nccl needs a GPU, but worker-1 has none; use ring or auto"
    )


class OwnStep(keras.Sequential):
    """Defines `train_step` as in Keras's documentation."""

    def train_step(self, data):
        inputs, labels, weights = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            outputs = self(inputs, training=True)
            loss = self.compute_loss(inputs, labels, outputs, weights)
        found = tape.gradient(loss, [each.value for each in self.trainable_variables])
        self.optimizer.apply_gradients(zip(found, self.trainable_variables, strict=True))
        self._loss_tracker.update_state(loss)
        return {metric.name: metric.result() for metric in self.metrics}


def own_step():
    model = dense()
    return OwnStep([keras.Input((2,)), *model.layers], name=model.name)


def test_a_train_step_of_the_models_own_runs_as_it_is():
    plain, own = single(), single()
    plain.build(problem_of()(0))
    own.build(problem_of(own_step)(0))
    losses = [[each.run(steps).loss for steps in (3, 2)] for each in (plain, own)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert own.global_step() == 5
    require_alike(own, plain, 1e-4)


@pytest.mark.parametrize("kind", [dense, own_step])
def test_frozen_variables_stay_and_have_no_slots(kind):
    def model():
        made = kind()
        freeze(made, ["dense/hidden/*", "dense/norm/*"])
        return made

    strategy = single()
    strategy.build(problem_of(model)(0))
    before = {path: each.numpy() for path, each in strategy.variables().items()}
    strategy.run(5)
    after = strategy.variables()
    moved = {path for path, value in before.items() if (after[path].numpy() != value).any()}
    assert {path for path in moved if path.startswith("model/")} == {
        "model/dense/logits/kernel",
        "model/dense/logits/bias",
    }
    assert all("logits" in path for path in before if path.startswith("optimizer/"))

"""Tests optimizers and schedules that are built from the configuration."""

import itertools
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from flotilla.trainer.config.load import load_config, parse_config
from flotilla.trainer.config.model import ARGS, OPTIMIZERS, OptimizerConfig, ScheduleConfig
from flotilla.trainer.config.schema import TrainingConfig
from flotilla.trainer.embeddings.batch_rows import RowsOnce
from flotilla.trainer.optimizers import optimizers
from flotilla.trainer.optimizers.optimizers import build_optimizer, each_row_once, learning_rate
from flotilla.trainer.runtime.errors import ConfigError
from tests.trainer.refusal import refusal


def _build(kind, **args):
    return _of(OptimizerConfig(name=kind, args=args))


def _of(settings):
    return build_optimizer(TrainingConfig.model_construct(optimizer=settings))


def test_the_configuration_knows_every_keras_optimizer():
    assert sorted(optimizers.available()) == sorted(OPTIMIZERS)
    for name in optimizers.NOT_OFFERED:
        assert issubclass(getattr(keras.optimizers, name), keras.optimizers.Optimizer)


def test_each_optimizer_is_plain_and_has_the_learning_rate():
    for name, kind in optimizers.available().items():
        optimizer = _of(OptimizerConfig.model_construct(name=name, learning_rate=0.25))
        assert type(optimizer) is kind
        assert not optimizer.built
        assert float(optimizer.learning_rate) == pytest.approx(0.25)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(optimizers.available()))
def test_each_optimizer_learns_inside_a_function(name):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(3)])
    optimizer = _of(OptimizerConfig.model_construct(name=name, learning_rate=0.05))
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    x = tf.constant(np.random.default_rng(0).normal(size=(30, 4)), tf.float32)
    y = tf.argmax(x[:, :3], axis=1)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    losses = [float(step()) for _ in range(40)]
    assert losses[-1] < losses[0]


def test_arguments_are_passed_on():
    optimizer = _build("sgd", momentum=0.9, nesterov=True, clipnorm=1)
    assert (optimizer.momentum, optimizer.nesterov, optimizer.clipnorm) == (0.9, True, 1)
    assert _build("muon", exclude_layers=["logits"]).exclude_layers == ["logits"]
    assert _build("adam", clipnorm=None).clipnorm is None


def test_unknown_argument_names_the_nearest():
    message = refusal(_build, "sgd", momentm=0.9)
    assert message.startswith("training.optimizer.args.momentm: sgd has no such argument (")
    assert message.endswith("; did you mean 'momentum'?")
    # Keras itself refuses this pair.
    message = refusal(_build, "adam", clipnorm=1.0, clipvalue=1.0)
    assert message.startswith("training.optimizer.args of adam: ")


def test_arguments_without_effect_are_refused():
    assert set(optimizers.REFUSED) <= {*keras.optimizers.Adam().get_config(), "name"}
    for argument, advice in optimizers.REFUSED.items():
        assert refusal(_build, "adam", **{argument: 1}) == (
            f"training.optimizer.args.{argument}: this argument is not supported; {advice}"
        )


def test_wrong_types_are_named():
    for name, argument, value, allowed in (
        ("adam", "epsilon", "1e-7", "a number"),
        ("adam", "beta_1", None, "a number from 0 to below 1"),
        ("adam", "beta_1", True, "a number from 0 to below 1"),
        ("adam", "beta_2", 1.9, "a number from 0 to below 1"),
        ("adam", "clipnorm", "1", "a number above 0"),
        ("adam", "clipvalue", -1, "a number above 0"),
        ("adam", "amsgrad", 1, "true or false"),
        ("muon", "ns_steps", 2.5, "a whole number"),
        ("muon", "ns_steps", True, "a whole number"),
        ("muon", "exclude_layers", "logits", "a list of strings"),
        ("muon", "exclude_layers", [1], "a list of strings"),
    ):
        assert refusal(_build, name, **{argument: value}) == (
            f"training.optimizer.args.{argument}: {value!r} is not allowed; it must be {allowed}"
        )


def compiled_with(optimizer, policy="float32"):
    keras.mixed_precision.set_global_policy(policy)
    try:
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    finally:
        keras.mixed_precision.set_global_policy("float32")
    model.compile(optimizer=optimizer, loss="mse")
    return model


def built(optimizer, policy="float32", **training):
    config = parse_config({"training": {"optimizer": {"name": "model"}, **training}})
    of_model = compiled_with(optimizer, policy).optimizer if optimizer else None
    return build_optimizer(config.training, of_model)


def test_it_has_the_settings_and_no_variable_of_the_compiled_one():
    given = keras.optimizers.AdamW(0.02, weight_decay=0.3, beta_1=0.5, global_clipnorm=2.0)
    given.exclude_from_weight_decay(var_names=["bias", "gamma"])
    made = built(given)
    assert made is not given
    assert type(made) is keras.optimizers.AdamW
    assert made.get_config() == given.get_config()
    assert not made.built
    kernel, bias = compiled_with("sgd").trainable_variables
    assert (made._use_weight_decay(kernel), made._use_weight_decay(bias)) == (True, False)


def test_a_schedule_comes_with_it():
    made = built(keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.5, 10)))
    made.build(compiled_with("sgd").trainable_variables)
    assert float(made.learning_rate) == pytest.approx(0.5)
    made.iterations.assign(10)
    assert float(made.learning_rate) == pytest.approx(0.0)


def test_under_float16_the_strategy_scales_the_loss():
    made = built("adam", policy="mixed_float16", mixed_precision="float16")
    assert type(made) is keras.optimizers.Adam


def excluding_a_variable():
    optimizer = keras.optimizers.AdamW()
    optimizer.exclude_from_weight_decay(var_list=compiled_with("sgd").trainable_variables)
    return optimizer


class Unmade(keras.optimizers.SGD):
    def __init__(self, pace):
        super().__init__(pace)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: keras.optimizers.Adam(use_ema=True),
            "use_ema, which is not supported; leave it out and set training.ema",
        ),
        (
            lambda: keras.optimizers.Adam(gradient_accumulation_steps=2),
            "gradient_accumulation_steps, which is not supported; leave it out and set training.ac",
        ),
        (
            lambda: keras.optimizers.Adam(loss_scale_factor=8.0),
            "loss_scale_factor, which is not supported; leave it out and set training.mixed_precis",
        ),
        (
            lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()),
            "an optimizer that scales the loss; set training.mixed_precision: float16",
        ),
        (keras.optimizers.ScheduleFreeAdamW, "ScheduleFreeAdamW, which cannot be used here"),
        (excluding_a_variable, "the model's optimizer excludes variables from weight"),
        (lambda: Unmade(0.1), "Unmade, which cannot be recreated from its get_config: "),
        (lambda: None, "but the model is not compiled; compile it, or name one of adadelta"),
    ],
)
def test_what_another_loop_needs_is_refused_in_one_line(make, message):
    found = refusal(built, make())
    assert found.startswith("training.optimizer.name: ")
    assert message in found


@pytest.mark.parametrize(
    ("optimizer", "more", "message"),
    [
        ({"learning_rate": 0.1}, {}, "training.optimizer: learning_ra"),
        ({"args": {"beta_1": 0.5}}, {}, "training.optimizer: args: the"),
        ({}, {"schedule": {"warmup_steps": 3}}, "training.schedule: the model's own optimizer se"),
    ],
)
def test_the_model_alone_says_its_settings(optimizer, more, message):
    with pytest.raises(ConfigError, match=message):
        parse_config({"training": {"optimizer": {"name": "model", **optimizer}, **more}})


ROWS, DIMENSION = 10, 4
VARIANTS = [
    *((name, {}) for name in OPTIMIZERS),
    ("sgd", {"momentum": 0.9}),
    ("sgd", {"momentum": 0.9, "nesterov": True}),
    ("sgd", {"weight_decay": 0.1}),
    ("rmsprop", {"centered": True, "momentum": 0.5}),
    *(
        (name, {clip: 0.5})
        for name in ("sgd", "adam")
        for clip in ("clipnorm", "global_clipnorm", "clipvalue")
    ),
]


def trained(name, args, *, dense):
    """Return an embedding table and a dense variable after four steps with the same gradients."""
    table = keras.Variable(np.random.RandomState(0).normal(size=(ROWS, DIMENSION)), dtype="float32")
    other = keras.Variable(np.ones((2, 2)), dtype="float32")
    settings = {"name": name, "learning_rate": 0.05, "args": args}
    optimizer = build_optimizer(parse_config({"training": {"optimizer": settings}}).training)
    optimizer.build([table, other])

    @tf.function
    def step(indices, values):
        gradient = tf.IndexedSlices(values, indices, tf.constant([ROWS, DIMENSION]))
        if dense:
            gradient = tf.convert_to_tensor(gradient)
        optimizer.apply([gradient, values[:2, :2]], [table, other])

    random = np.random.RandomState(1)
    for indices in ([1, 3, 3], [1, 1, 1], [0, 5, 9], [3, 1, 3]):
        step(tf.constant(indices, tf.int64), tf.constant(random.normal(size=(3, 4)), tf.float32))
    return table.numpy(), other.numpy()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "args"), VARIANTS, ids=[" ".join([name, *args]) for name, args in VARIANTS]
)
def test_rows_are_moved_as_by_the_dense_gradient(name, args):
    for sparse, dense in zip(
        trained(name, args, dense=False), trained(name, args, dense=True), strict=True
    ):
        np.testing.assert_allclose(sparse, dense, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("clip", ["clipnorm", "global_clipnorm", "clipvalue"])
def test_clipping_keeps_the_rows(clip):
    given = tf.IndexedSlices(tf.ones((3, 2)), tf.constant([4, 1, 4]), tf.constant([9, 2]))
    (clipped,) = _build("sgd", **{clip: 0.5})._clip_gradients([given])
    assert sorted(clipped.indices.numpy()) == [1, 4]


def test_the_parts_of_a_row_are_added_up():
    given = tf.IndexedSlices(
        tf.constant([[1.0], [2.0], [4.0]]), tf.constant([7, 2, 7]), tf.constant([9, 1])
    )
    found = each_row_once(given)
    assert dict(zip(found.indices.numpy(), found.values.numpy()[:, 0], strict=True)) == {7: 5, 2: 2}
    np.testing.assert_array_equal(tf.convert_to_tensor(found), tf.convert_to_tensor(given))
    # Other gradients stay unchanged.
    for other in (tf.ones(3), None, RowsOnce(tf.ones([2, 3]), tf.constant([4, 1]))):
        assert each_row_once(other) is other


RATE = 0.4
PIECEWISE = {"boundaries": [10, 20], "factors": [1.0, 0.5, 0.1]}
EXPONENTIAL = {"decay_steps": 10, "decay_rate": 0.5}


def training(name="constant", steps=100, warmup=0, **args):
    schedule = ScheduleConfig(name=name, warmup_steps=warmup, args=args)
    settings = OptimizerConfig(name="sgd", learning_rate=RATE)
    return TrainingConfig(steps=steps, optimizer=settings, schedule=schedule)


def rate_at(step, *args, **named):
    rate = learning_rate(training(*args, **named))
    return float(rate(tf.constant(step, tf.int64))) if callable(rate) else rate


def pieces(boundaries, *factors):
    return {"boundaries": boundaries, "factors": [*factors]}


def test_half_a_cosine_down_to_alpha():
    for step, alpha in itertools.product([0, 25, 99, 100, 250], [0.0, 0.1, 1.0]):
        share = alpha + (1 - alpha) * (1 + math.cos(math.pi * min(step, 100) / 100)) / 2
        assert rate_at(step, "cosine", alpha=alpha) == pytest.approx(RATE * share, abs=1e-7)


def test_a_share_of_the_rate_in_every_so_many_steps():
    for step in (0, 5, 10, 19, 20):
        smooth = rate_at(step, "exponential", **EXPONENTIAL)
        stairs = rate_at(step, "exponential", **EXPONENTIAL, staircase=True)
        assert smooth == pytest.approx(RATE * 0.5 ** (step / 10), rel=1e-6)
        assert stairs == pytest.approx(RATE * 0.5 ** (step // 10), rel=1e-6)


def test_the_next_factor_begins_at_its_boundary():
    for step, factor in ((0, 1), (9, 1), (10, 0.5), (19, 0.5), (20, 0.1), (99, 0.1)):
        assert rate_at(step, "piecewise", **PIECEWISE) == pytest.approx(RATE * factor)
        # With warm-up, boundaries are counted from its end; Keras then passes the step as a float.
        late = rate_at(step + 8, "piecewise", warmup=8, **PIECEWISE)
        assert late == pytest.approx(RATE * factor)


def test_a_warm_up_rises_in_equal_steps_to_the_rate():
    assert learning_rate(training()) == RATE
    rates = [rate_at(step, warmup=4) for step in range(5)]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])


SCHEDULES = [("cosine", {}), ("exponential", EXPONENTIAL), ("piecewise", PIECEWISE)]


@pytest.mark.parametrize(("name", "args"), [*SCHEDULES, ("constant", {})])
def test_there_is_no_jump_where_the_warm_up_ends(name, args):
    rates = [rate_at(step, name, warmup=10, **args) for step in (9, 10)]
    assert rates == pytest.approx([RATE, RATE])


def test_a_cosine_after_a_warm_up_ends_with_the_training():
    assert rate_at(10 + 45, "cosine", warmup=10) == pytest.approx(RATE / 2)
    assert rate_at(100, "cosine", warmup=10) == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize("warmup", [100, 300])
def test_a_warm_up_longer_than_the_training_just_rises(warmup):
    assert rate_at(99, "cosine", warmup=warmup) == pytest.approx(RATE * 100 / warmup)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(SCHEDULES), st.integers(0, 30), st.integers(0, 10**6))
def test_no_rate_is_above_the_one_that_was_set_or_below_nothing(schedule, warmup, step):
    name, args = schedule
    assert -1e-7 <= rate_at(step, name, warmup=warmup, **args) <= RATE * (1 + 1e-6)


def test_an_update_moves_by_the_rate_of_its_step():
    optimizer = build_optimizer(training(warmup=4))
    weight = keras.Variable([0.0])
    optimizer.build([weight])
    places = []
    for _ in range(5):
        optimizer.apply([tf.constant([-1.0])], [weight])
        places.append(float(weight.value[0]))
    assert places == pytest.approx([0.1, 0.3, 0.6, 1.0, 1.4])


def test_a_warm_up_can_be_written_down_and_made_again():
    rate = learning_rate(training("constant", warmup=4))
    again = type(rate)(**rate.get_config())
    assert float(again(2)) == float(rate(2))
    assert set(ARGS) == set(ScheduleConfig.model_fields["name"].annotation.__args__)


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        ("constant", {"alpha": 0.1}, ".alpha of constant: Extra inputs are not permitted"),
        ("constant", {"alpha": 0.1}, "(it takes none)"),
        ("cosine", {"alfa": 0.1}, ".alfa of cosine: Extra inputs are not permitted"),
        ("cosine", {"alfa": 0.1}, "(it takes alpha)"),
        ("cosine", {"alpha": 1.5}, ".alpha of cosine: Input should be less than or equal"),
        ("cosine", {"alpha": "high"}, ".alpha of cosine: Input should be a valid number"),
        ("exponential", {}, ".decay_steps of exponential: Field required"),
        ("exponential", {"decay_steps": 0, "decay_rate": 1}, ".decay_steps of exponential"),
        ("exponential", {"decay_steps": 9, "decay_rate": 2}, ".decay_rate of exponential"),
        ("piecewise", {}, ".boundaries of piecewise: Field required"),
        ("piecewise", pieces([], 1, 1), ".boundaries of piecewise"),
        ("piecewise", pieces([1.5], 1, 1), ".boundaries.0 of piecewise"),
        ("piecewise", pieces([0], 1, 1), "must increase and start at 1 or more"),
        ("piecewise", pieces([9, 9], 1, 1, 1), "must increase and start at 1 or more"),
        ("piecewise", pieces([9], 1, 1, 1), "one more factor than boundaries"),
        ("piecewise", pieces([9], 1, -1), "must be 0 or more"),
    ],
)
def test_arguments_are_refused_by_name_in_one_line(name, args, said):
    schedule = {"name": name, "args": args}
    message = refusal(load_config, None, [f"training.schedule={schedule}"])
    assert message.startswith("training.schedule: args")
    assert said in message

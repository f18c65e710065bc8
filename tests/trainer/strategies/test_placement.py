"""Tests the placement of variables: balance, named servers, models, and errors."""

from itertools import product

import keras
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from keras.src.backend import Variable
from tensorflow.core.protobuf.config_pb2 import ConfigProto
from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig
from tensorflow.python.eager import context, executor

from flotilla.trainer.config.model import OPTIMIZERS, OptimizerConfig
from flotilla.trainer.config.schema import TrainingConfig
from flotilla.trainer.embeddings.embedding_table import BEGINS
from flotilla.trainer.embeddings.sharded_embedding import ShardedEmbedding
from flotilla.trainer.optimizers.optimizers import build_optimizer
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.strategies import placement
from flotilla.trainer.strategies.placement import (
    KeptValues,
    Place,
    Sized,
    assign,
    build_placed_model,
    build_slots,
    choose_places,
    optimize_once,
)

LAYERS = [Sized(path="a/kernel", bytes=60), Sized(path="a/bias", bytes=10)]
LAYERS += [Sized(path="b/kernel", bytes=50), Sized(path="b/bias", bytes=0)]
servers = st.integers(1, 6)


def sized(sizes):
    return [Sized(path=f"v{index}", bytes=size) for index, size in enumerate(sizes)]


def loads(variables, chosen, count):
    held = [0] * count
    for variable, server in zip(variables, chosen, strict=True):
        held[server] += variable.bytes
    return held


def refused(named, variables=LAYERS, count=2):
    with pytest.raises(ConfigError) as caught:
        assign(variables, count, named)
    message = str(caught.value)
    assert "\n" not in message
    return message


@given(st.lists(st.integers(0, 10**9), max_size=40), servers)
def test_servers_differ_by_the_largest_variable_at_most(sizes, count):
    variables = sized(sizes)
    held = loads(variables, assign(variables, count, {}), count)
    assert sum(held) == sum(sizes)
    assert max(held) - min(held) <= max(sizes, default=0)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(1, 3))
def test_the_fullest_server_is_within_four_thirds_of_the_best(sizes, count):
    variables = sized(sizes)
    best = min(
        max(loads(variables, chosen, count))
        for chosen in product(range(count), repeat=len(variables))
    )
    held = max(loads(variables, assign(variables, count, {}), count))
    assert 3 * count * held <= (4 * count - 1) * best


@given(st.integers(0, 40), servers)
def test_equals_are_placed_in_turn_and_alike_in_every_attempt(variables, count):
    assert assign(sized([7] * variables), count, {}) == [i % count for i in range(variables)]


@given(st.lists(st.integers(0, 100), min_size=1, max_size=20), servers, st.data())
def test_a_name_comes_before_the_balance(sizes, count, data):
    variables = sized(sizes)
    target = data.draw(st.integers(0, count - 1))
    chosen = assign(variables, count, {"v0": f"ps:{target}"})
    assert chosen[0] == target
    assert all(0 <= server < count for server in chosen)


@pytest.mark.parametrize(
    ("variables", "count", "named", "expected"),
    [
        # The rest is spread around what is named.
        (LAYERS, 2, {"b/*": "ps:0"}, [1, 0, 0, 0]),
        # The first glob that matches counts.
        (LAYERS, 3, {"a/bias": "ps:2", "a/*": "ps:1", "*": "ps:0"}, [1, 2, 0, 0]),
        # A large variable goes first wherever it is.
        (sized([1, 1, 1, 9]), 2, {}, [1, 1, 1, 0]),
    ],
)
def test_places(variables, count, named, expected):
    assert assign(variables, count, named) == expected


@pytest.mark.parametrize("server", ["ps:2", "ps:-1", "ps", "worker:0", "ps:\u00b2"])
def test_a_server_that_is_not_there_is_refused(server):
    assert refused({"a/*": server}) == (
        f"cluster.placement: 'a/*' is placed on {server!r}; it must be ps:0 to ps:1"
    )


def test_a_glob_that_fits_nothing_is_refused_with_the_nearest_path():
    message = refused({"a/kernl": "ps:0"})
    assert message == ("cluster.placement: 'a/kernl' matches no variable; did you mean 'a/kernel'?")
    assert "matches no variable" in refused({"A/*": "ps:0"})


def two_layers():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(4, name="hidden"), keras.layers.Dense(2, name="logits")]
    return keras.Sequential([keras.Input((3,)), *layers])


def placed_on(build, servers, named):
    return build_placed_model(build, choose_places(build, lambda _model: None, servers, named))


@pytest.fixture
def devices(monkeypatch):
    """Record which servers are used, and place all variables in this process."""
    asked = []

    def here(index):
        asked.append(index)
        return "/device:CPU:0"

    monkeypatch.setattr(placement, "server_device", here)
    return asked


def test_a_model_is_the_same_wherever_its_variables_stand(devices):
    placed, plain = placed_on(two_layers, 2, {"*/bias": "ps:1"}), two_layers()
    found = zip(placed.variables, devices, strict=False)
    by_path = {variable.path.partition("/")[2] or variable.path: at for variable, at in found}
    assert all(at == 1 for path, at in by_path.items() if path.endswith("bias"))
    for mine, theirs in zip(placed.get_weights(), plain.get_weights(), strict=True):
        assert (mine == theirs).all()
    # A glob is matched with the paths of the model.
    with pytest.raises(ConfigError, match="'embedding' matches no variable"):
        placed_on(two_layers, 2, {"embedding": "ps:1"})


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_slots_on_the_servers_of_their_variables_update_alike(name):
    def updated(build):
        model = two_layers()
        args = {"weight_decay": 0.01}
        settings = OptimizerConfig(name=name, learning_rate=0.1, args=args)
        optimizer = build_optimizer(TrainingConfig(optimizer=settings))
        build(optimizer, model)
        for _ in range(3):
            gradients = [tf.ones_like(variable.value) for variable in model.trainable_variables]
            optimizer.apply(gradients, model.trainable_variables)
        return model.get_weights()

    plain = updated(lambda optimizer, model: optimizer.build(model.trainable_variables))
    for mine, theirs in zip(updated(build_slots), plain, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)


def test_a_schedule_is_computed_on_the_server_of_its_counter():
    model = two_layers()
    optimizer = keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 100))
    build_slots(optimizer, model)
    gradients = [tf.ones_like(variable.value) for variable in model.trainable_variables]

    @tf.function
    def update():
        with tf.device("/job:worker/task:1"):
            optimizer.apply(gradients, model.trainable_variables)

    found = update.get_concrete_function().graph.get_operations()
    (cosine,) = (each for each in found if each.type == "Cos")
    assert cosine.device == optimizer.iterations.value.device


def test_a_large_variable_has_no_values_in_the_sketch_of_a_model(monkeypatch):
    monkeypatch.setattr(placement, "LARGE_BYTES", 400)
    asked = []

    def initial(size):
        def values():
            asked.append(tf.executing_eagerly())
            return tf.ones([size])

        return values

    def untraceable():
        return tf.constant(tf.ones([500]).numpy())

    made = []
    with tf.variable_creator_scope(placement._recording(made)):
        tf.Variable(initial(99))
        tf.Variable(initial(100))
        tf.Variable(untraceable)
    # Shapes come from the traced graph; only the small variable gets values.
    assert asked == [False, True, False]
    assert [each.shape.as_list() for each in made] == [[99], [100], [500]]
    assert made[0].numpy().tolist() == [1.0] * 99


def test_the_initializer_of_a_large_variable_is_not_asked_for_a_sketch(monkeypatch):
    monkeypatch.setattr(placement, "LARGE_BYTES", 400)
    monkeypatch.setattr(Variable, "_initialize_with_initializer", placement._initialize_sketch)
    asked = []

    def initial(shape, dtype):
        asked.append(tuple(shape))
        return tf.ones(shape, dtype)

    made = [keras.Variable(initial, shape=(size,)) for size in (99, 100)]
    assert asked == [(99,)]
    assert [each.shape for each in made] == [(99,), (100,)]
    assert made[0].numpy().tolist() == [1.0] * 99


@pytest.mark.parametrize(
    ("gpus", "memory"),
    [([], RewriterConfig.NO_MEM_OPT), (["/job:worker/GPU:0"], RewriterConfig.DEFAULT_MEM_OPT)],
)
def test_graphs_are_optimized_once_and_by_all_else_as_before(monkeypatch, gpus, memory):
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda _kind: gpus)
    here = context.context()
    monkeypatch.setattr(here, "_config", None)
    before = here.config
    optimize_once()
    sent = ConfigProto.FromString(here.function_call_options.config_proto_serialized)
    here.function_call_options = None
    rewrites = sent.graph_options.rewrite_options
    assert rewrites.meta_optimizer_iterations == RewriterConfig.ONE
    assert rewrites.disable_tfg_optimizer
    assert rewrites.memory_optimization == memory
    for name in ("meta_optimizer_iterations", "disable_tfg_optimizer", "memory_optimization"):
        rewrites.ClearField(name)
    before.graph_options.rewrite_options.SetInParent()
    before.allow_soft_placement = True
    assert sent == before


def test_places_say_where_a_model_is_built_without_a_sketch(devices):
    built = []

    def build():
        built.append(1)
        return two_layers()

    model = build_placed_model(build, [Place("", server) for server in (1, 0, 0, 1)])
    assert (len(built), devices) == (1, [1, 0, 0, 1])
    for mine, theirs in zip(model.get_weights(), two_layers().get_weights(), strict=True):
        assert (mine == theirs).all()


@pytest.mark.parametrize(("count", "words"), [(3, "1 more variables"), (5, "1 fewer variables")])
@pytest.mark.usefixtures("devices")
def test_a_model_of_more_or_fewer_variables_than_places_is_refused(count, words):
    with pytest.raises(ValueError, match=words):
        build_placed_model(two_layers, [Place("", 0)] * count)


def test_an_error_of_a_server_is_not_raised_again_when_its_executor_is_deleted(monkeypatch):
    cleared = []
    monkeypatch.setattr(executor.Executor, "clear_error", lambda _: cleared.append(True))
    with pytest.raises(tf.errors.NotFoundError), placement.run_separately():
        raise tf.errors.NotFoundError(None, None, "no such variable")
    assert cleared == [True]


def test_a_sketch_may_be_refused():
    def check(model):
        raise ConfigError(f"{len(model.variables)} are too many")

    with pytest.raises(ConfigError, match="4 are too many"):
        choose_places(two_layers, check, 2, {})


@pytest.mark.usefixtures("devices")
def test_large_variables_of_servers_with_values_have_none_and_say_what_they_begin_with(monkeypatch):
    monkeypatch.setattr(placement, "LARGE_BYTES", 40)
    kept = KeptValues([1])
    model = build_placed_model(two_layers, [Place("", server) for server in (1, 0, 0, 1)], kept)
    # The kernel of shape 3 x 4 is large; the one of shape 4 x 2 has only 32 bytes.
    assert [each.path for each, _ in kept._made] == [model.variables[0].path]
    begins = getattr(model.variables[0].value, BEGINS)
    assert tuple(begins((3, 4), dtype="float32").shape) == (3, 4)
    for each, same in zip(model.get_weights()[1:], two_layers().get_weights()[1:], strict=True):
        assert (each == same).all()


def test_a_large_variable_that_shows_a_copy_says_what_it_begins_with(monkeypatch):
    monkeypatch.setattr(placement, "LARGE_BYTES", 12)
    kept = KeptValues([1])
    scope = keras.src.backend.common.variables.AutocastScope("float16")
    with kept.skip_values(lambda: 1), scope:
        large = keras.Variable(keras.initializers.Constant(4.0), shape=[3])
        assert large.value.dtype == tf.float16
    kept.give_others([])
    assert large.numpy().tolist() == [4.0] * 3


def made_before():
    """Return a model function that reuses the same layers at each call."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="early")])
    return lambda: model


def made_in_a_session_of_its_own():
    keras.backend.clear_session()
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="early")])


@pytest.mark.parametrize(
    "build", [made_before(), pytest.param(made_in_a_session_of_its_own, marks=pytest.mark.slow)]
)
def test_a_model_whose_variables_escape_is_refused(build):
    with pytest.raises(ConfigError, match=r"early/\w+ cannot be placed .* clear_session"):
        placement.choose_places(build, lambda _model: None, 2, {})


@pytest.mark.slow
def test_a_server_without_memory_is_one_line_with_the_variable(monkeypatch):
    # The first model is the sketch, whose variables get no values.
    rows = iter([2, 2**46])

    def build():
        table = keras.layers.Embedding(next(rows), 16, "zeros", name="users")
        return keras.Sequential([keras.Input((), dtype="int64"), table])

    monkeypatch.setattr(placement, "server_device", lambda _index: "/device:CPU:0")
    words = r"\(CPU\) has too little memory for \S+/users/embeddings of type float and shape \["
    with pytest.raises(ConfigError, match=words):
        placement.build_placed_model(
            build, placement.choose_places(build, lambda _model: None, 1, {})
        )


@pytest.mark.parametrize("rows", [1000, 1001, 1_000_000])
def test_each_of_two_servers_holds_half_of_a_table(rows):
    layer = ShardedEmbedding(rows, 16, shards=2)
    shapes = [((rows - shard + 1) // 2, 16) for shard in range(layer.shards)]
    sized = [Sized(path=f"table/shard_{n}", bytes=4 * r * d) for n, (r, d) in enumerate(shapes)]
    others = [Sized(path="logits/kernel", bytes=128), Sized(path="logits/bias", bytes=8)]
    assert sorted(assign([*sized, *others], 2, {})[:2]) == [0, 1]


def test_updates_run_where_their_variable_is(monkeypatch):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
    optimizer = keras.optimizers.AdamW(weight_decay=0.1)
    placement.build_slots(optimizer, model)
    monkeypatch.setattr(
        type(model.variables[0].value), "device", property(lambda _: "/job:ps/task:1/device:CPU:0")
    )

    @tf.function
    def update():
        optimizer.apply([tf.ones((2, 1))], model.trainable_variables)

    nodes = update.get_concrete_function().graph.as_graph_def().node
    heavy = [node.device for node in nodes if node.op in {"Sqrt", "AssignSubVariableOp"}]
    assert heavy
    assert set(heavy) == {"/job:ps/task:1/device:CPU:0"}


def test_what_belongs_together_is_on_one_server():
    tables = [
        Sized(path=f"table/shard_{n}_{part}", bytes=size, group=f"{n}")
        for n in range(3)
        for part, size in (("rows", 600), ("ids", 80), ("", 90))
    ]
    chosen = assign([*tables, Sized(path="kernel", bytes=800)], 2, {})
    servers = [set(chosen[3 * n : 3 * n + 3]) for n in range(3)]
    assert [len(each) for each in servers] == [1, 1, 1]
    assert sorted(chosen.count(server) for server in (0, 1)) == [4, 6]
    named = assign(tables, 2, {"table/shard_0_ids": "ps:1"})
    assert named[:3] == [1, 1, 1]

"""Which models can be placed on parameter servers, and where the shards of a table stand."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

from trainer.errors import ConfigError
from trainer.models.sharded_embedding import ShardedEmbedding
from trainer.strategies import placement
from trainer.strategies.placement import Sized, assign


def made_before():
    """Return a function that gives the same layers at each call."""
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
        placement.places_of(build, lambda _model: None, 2, {})


@pytest.mark.slow
def test_a_server_without_memory_is_one_line_with_the_variable(monkeypatch):
    # The first model is the sketch, of which nothing has values.
    rows = iter([2, 2**46])

    def build():
        table = keras.layers.Embedding(next(rows), 16, "zeros", name="users")
        return keras.Sequential([keras.Input((), dtype="int64"), table])

    monkeypatch.setattr(placement, "server_device", lambda _index: "/device:CPU:0")
    words = r"\(CPU\) has no memory for \S+/users/embeddings of type float and shape \[\d+, 16\]"
    with pytest.raises(ConfigError, match=words):
        placement.build_at(build, placement.places_of(build, lambda _model: None, 1, {}))


@pytest.mark.parametrize("rows", [1000, 1001, 1_000_000])
def test_each_of_two_servers_holds_half_of_a_table(rows):
    layer = ShardedEmbedding(rows, 16, shards=2)
    shapes = [((rows - shard + 1) // 2, 16) for shard in range(layer.shards)]
    sized = [Sized(path=f"table/shard_{n}", bytes=4 * r * d) for n, (r, d) in enumerate(shapes)]
    others = [Sized(path="logits/kernel", bytes=128), Sized(path="logits/bias", bytes=8)]
    assert sorted(assign([*sized, *others], 2, {})[:2]) == [0, 1]


def test_many_shards_are_spread_evenly():
    shards = [Sized(path=f"table/shard_{n}", bytes=64) for n in range(12)]
    found = assign(shards, 4, {})
    assert [found.count(server) for server in range(4)] == [3, 3, 3, 3]


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

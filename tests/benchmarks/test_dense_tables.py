"""Dense tables, the reference for growing tables: the same model with one row per listed id."""

from dataclasses import fields

import numpy as np
import pytest
import tensorflow as tf
from clicks_large import PART, Clickstream

from benchmarks import dense_tables
from flotilla.trainer import storage
from flotilla.trainer.data.prepare import prepare
from flotilla.trainer.embeddings.embedding_table import EmbeddingTable
from flotilla.trainer.models.spec import InputSpec
from flotilla.trainer.models.two_tower import two_tower_ranker

IDS = {"user": [-5, 7, 2**51], "item": [1, 2]}
TRUTH = [each.name for each in fields(Clickstream) if each.name != "seed"]
SPEC = InputSpec(
    shape=dict.fromkeys(IDS, ()), dtype=dict.fromkeys(IDS, "int64"), output_shape=(-1,)
)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    path = tmp_path_factory.mktemp("ids") / "ids.npz"
    np.savez(path, **IDS)
    tables = {name: {"capacity": 8} for name in IDS}
    return dense_tables.dense_ranker(SPEC, ids=path, tables=tables, dimension=3), tables


def test_an_id_has_its_own_row_and_all_others_share_one(dense):
    model, _ = dense
    (rows,) = model.get_layer("user_embedding").variables
    found = model.get_layer("user_embedding")(
        model.get_layer("user_place")(tf.constant([7, 2**51, -5, 6, 2**52, -6, 7]))
    )
    np.testing.assert_array_equal(found, rows.numpy()[[2, 3, 1, 0, 0, 0, 2]])
    assert not rows.numpy()[0].any()
    assert np.abs(rows.numpy()[1:]).min() > 0


def test_all_else_is_the_model_with_tables_that_grow(dense):
    model, tables = dense
    growing = two_tower_ranker(SPEC, tables=tables, dimension=3)

    def shapes(model):
        apart = [each for each in model.variables if "_embedding/" not in each.path]
        return {each.path: tuple(each.shape) for each in apart}

    assert shapes(model) == shapes(growing)
    others = {f"{name}_{part}" for name in IDS for part in ("embedding", "place")}
    assert {each.name for each in model.layers} ^ {each.name for each in growing.layers} == {
        f"{name}_place" for name in IDS
    }
    assert {type(model.get_layer(name)) for name in others}.isdisjoint({EmbeddingTable})


def test_the_ids_are_those_of_the_training_split(tmp_path):
    few = {"users": 900, "items": 50, "new_users": 10, "new_items": 5, "events": 500}
    settings = {f"data.builder_args.{name}": value for name, value in few.items()}
    config = dense_tables._config(settings)
    dataset = prepare(config.data, storage.uri_of(tmp_path), tmp_path / "scratch").uri
    found = dense_tables._ids(dataset, tmp_path / "shards", ["user", "item"])
    drawn = Clickstream(**{name: config.data.builder_args[name] for name in TRUTH}).draw(0, 0, 0)
    for name, ids in found.items():
        np.testing.assert_array_equal(ids, np.unique(drawn[name][:500]))


def test_no_id_is_turned_away_or_evicted():
    config = dense_tables._config({"model.args.tables": dense_tables.TABLES})
    truth = config.data.builder_args
    drawn = Clickstream(**{name: truth[name] for name in TRUTH})
    parts = [drawn.draw(0, 0, part) for part in range(-(-truth["events"] // PART))]
    for name, table in config.model.args["tables"].items():
        assert table.keys() == {"capacity"}
        ids = len(np.unique(np.concatenate([each[name] for each in parts])))
        # The two shards get different numbers of ids.
        assert 1.05 * ids < table["capacity"]


def test_a_round_is_a_seed_and_what_is_lost(monkeypatch):
    class Made:
        uri = "file:///dataset"

    monkeypatch.setattr(dense_tables, "prepare", lambda *_: Made)
    monkeypatch.setattr(dense_tables, "_ids", lambda *_: {})

    def measured(config, *_):
        auc = 0.8 - config.training.seed / 1000
        if config.training.strategy == "single":
            auc += 0.001
            assert config.model.name == "benchmarks.dense_tables:dense_ranker"
        return {"auc": auc, "query_auc": 0.5}

    monkeypatch.setattr(dense_tables, "_measured", measured)
    found = dense_tables.same_tables()
    assert found.rounds == pytest.approx((0.999, 0.999, 0.999))
    assert found.holds
    assert found.more["auc"] == [
        pytest.approx((0.8 - seed / 1000, 0.801 - seed / 1000)) for seed in (1, 2, 3)
    ]

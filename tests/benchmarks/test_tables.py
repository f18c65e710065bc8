"""The table benchmarks: dense tables with a row per listed id, large tables, and real tables."""

import json
import subprocess
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from clicks_large import Clickstream

from benchmarks import dense_tables, large_tables, real_tables
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


def test_steps_and_updates_of_each_optimizer_are_ratios_of_large_over_small(monkeypatch):
    free = SimpleNamespace(available=1 << 40)
    monkeypatch.setattr(large_tables.psutil, "virtual_memory", lambda: free)
    found = json.dumps({"step": [[3.0, 2.0]], "update": [[4.0, 1.0]]})
    monkeypatch.setattr(
        subprocess, "run", lambda *_args, **_kwargs: SimpleNamespace(stdout=f"words\n{found}\n")
    )
    compared = large_tables.large_tables()
    expected = len(large_tables.OPTIMIZERS) * len(large_tables.DIMENSIONS) * 2
    assert len({each.name for each in compared}) == len(compared) == expected
    assert {each.ratio for each in compared} == {1.5, 4.0}
    assert {each.at_most for each in compared} == {1.3}


FOUND = {"rows": 100, "test": 10, "metric": "auc", "direction": "higher", "half": 0.01}


@pytest.mark.parametrize(
    ("own", "said", "count"), [(0.8, "", "1 of 1"), (0.79, "below TF-IDF", "0 of 1")]
)
def test_a_row_of_texts_has_the_mean_of_all_seeds_and_says_what_is_missed(own, said, count):
    values = {"constant": 0.5, "TF-IDF, linear": 0.75}
    seeds = [{**FOUND, **values, "tf-idf": each, "flotilla": own} for each in (0.7, 0.9)]
    page = real_tables.table_of_texts({f"tweets {seed}": each for seed, each in enumerate(seeds)})
    row = next(line for line in page.splitlines() if "`tweets`" in line)
    assert row == (
        f"| `tweets` | two classes | 100, 10 | `auc` | 0.5 | 0.8 | 0.75 | {own:.3g} | {said} |"
    )
    assert f"At least TF-IDF with defaults on {count}." in page


def test_a_table_whose_package_is_not_there_is_skipped_with_its_name(tmp_path, monkeypatch, caplog):
    absent = ("texts", "label", lambda: real_tables._path("no_such_package", "texts.csv"))
    monkeypatch.setattr(real_tables, "TABLES", {})
    monkeypatch.setattr(real_tables, "TEXTS", {"absent": absent})
    monkeypatch.setattr(real_tables, "SEEDS", 1)
    assert real_tables.run(tmp_path / "kept.json", []) == {}
    assert "absent is skipped: No module named 'no_such_package'" in caplog.text

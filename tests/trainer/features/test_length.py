"""Tests the length of training: epochs, steps, and the default for a number of examples."""

import pytest

from flotilla.trainer.config.base import AUTOMATIC
from flotilla.trainer.config.load import load_config, override, parse_config
from flotilla.trainer.features import length
from flotilla.trainer.features.length import Splits, describe_choices, examples_of_step, resolve
from flotilla.trainer.runtime.errors import ConfigError

TABLE = {"data": {"source": "/t.csv", "label": ["y"]}}


def of(training=(), **more):
    return parse_config({**TABLE, "training": dict(training), **more})


def test_a_table_without_a_length_ends_by_validation():
    asked, splits = of(), Splits(4_000, 400)
    known = resolve(asked, splits)
    training = known.training
    assert (training.steps, training.epochs) == (6_250, 0)
    assert (training.batch_size, training.validate_every, training.patience) == (64, 63, 16)
    assert training.checkpoint_every == training.validate_every, "the best is one that is saved"
    assert training.optimizer.name == "adamw"
    assert 0 < training.schedule.warmup_steps <= 100
    assert describe_choices(asked, known, splits) == (
        "4,000 examples: batches of 64, at most 100 epochs (6,250 steps), learning rate 0.002, "
        "ends after 16 validations without improvement"
    )


def test_what_is_known_stays_as_it_is():
    known = resolve(of(), Splits(4_000, 400))
    assert length.is_resolved(known)
    assert resolve(known, Splits(9, 0)) is known
    assert parse_config(known.model_dump(mode="json")) == known


@pytest.mark.parametrize(
    ("examples", "batch", "epochs"),
    [(1_999, 32, 100), (2_000, 64, 100), (60_000, 512, 50), (5_000_000, 1024, 10)],
)
def test_small_tables_have_small_batches_and_large_ones_few_epochs(examples, batch, epochs):
    training = resolve(of(), Splits(examples, examples // 10)).training
    assert training.batch_size == batch
    assert training.steps * batch / examples == pytest.approx(epochs, rel=0.01)


def test_validations_are_not_too_many_nor_too_few():
    tiny, large = (resolve(of(), Splits(n, n // 10)).training for n in (200, 1_000_000))
    assert tiny.validate_every == length.LEAST_STEPS
    assert tiny.steps == length.LEAST_CEILING
    assert large.validate_every == 326, "three in an epoch of 977 steps"
    # Without validation, training is short and never ends early.
    training = resolve(of(data={"source": "/t.csv", "validation": 0}), Splits(4_000, 0)).training
    assert (training.patience, training.steps) == (0, 1_250)


def test_what_is_said_is_kept():
    said = {
        "steps": "auto", "batch_size": 8, "patience": 3, "validate_every": 70,
        "optimizer": {"name": "sgd", "learning_rate": 0.5}, "schedule": {"name": "cosine"},
    }  # fmt: skip
    training = resolve(of(said), Splits(4_000, 400)).training
    assert (training.batch_size, training.patience, training.validate_every) == (8, 3, 70)
    assert training.checkpoint_every == 70
    assert training.optimizer.model_dump(include={"name", "learning_rate", "args"}) == {
        "name": "sgd", "learning_rate": 0.5, "args": {},
    }  # fmt: skip
    assert (training.schedule.name, training.schedule.warmup_steps) == ("cosine", 0)
    assert of({"steps": 300}).training == parse_config({"training": {"steps": 300}}).training


CLUSTERS = [
    ("single", {}, {}, 64),
    ("single", {}, {"gpus_per_worker": 2}, 128),
    ("async_parameter_server", {}, {"workers": 3}, 64),
    ("async_parameter_server", {"pull_every": 4}, {"workers": 3, "gpus_per_worker": 2}, 512),
    ("sync_parameter_server", {}, {"workers": 3}, 192),
    ("sync_parameter_server", {"replicas_to_aggregate": 2}, {"workers": 3}, 128),
    ("in_graph", {"accumulate": 2}, {"workers": 2}, 256),
    ("multi_worker_mirrored", {"pull_every": 4}, {"workers": 2, "gpus_per_worker": 2}, 256),
    ("own.strategies:Ring", {}, {"workers": 2}, 64),
]


@pytest.mark.parametrize(("strategy", "training", "cluster", "examples"), CLUSTERS)
def test_an_epoch_has_as_many_steps_as_the_strategy_needs(strategy, training, cluster, examples):
    config = parse_config(
        {"training": {"strategy": strategy, "epochs": 2.5, **training}, "cluster": cluster}
    )
    assert examples_of_step(config) == examples
    known = resolve(config, Splits(1_000, 100))
    assert known.training.steps == -(-2_500 // examples)
    assert known.training.patience == 0


def test_workers_that_wait_for_each_other_share_a_batch():
    sync = {"strategy": "multi_worker_mirrored"}
    alone, four = (resolve(of(sync, cluster={"workers": n}), Splits(30_000, 3_000)) for n in (1, 4))
    assert examples_of_step(alone) == examples_of_step(four) == 256
    assert four.training.batch_size == 64


def test_epochs_and_steps_are_one_or_the_other():
    with pytest.raises(ConfigError, match=r"training.epochs: 3, but training.steps is also set"):
        of({"steps": 9, "epochs": 3})
    with pytest.raises(ConfigError, match=r"training.epochs: -1.* is not allowed"):
        of({"epochs": -1})


def test_what_is_laid_over_replaces_the_other_key(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("training: {steps: 70}\n")
    training = load_config(path, ["training.epochs=0.5"]).training
    assert (training.steps, training.epochs) == (AUTOMATIC, 0.5)
    again = override(load_config(path, ["training.epochs=2"]), ["training.steps=30"]).training
    assert (again.steps, again.epochs) == (30, 0)
    with pytest.raises(ConfigError, match="leave one of them out"):
        load_config(path, ["training.steps=3", "training.epochs=2"])
    assert load_config(path, ["training.epochs=0"]).training.steps == 70


def test_a_rule_of_a_number_is_checked_once_it_is_known():
    config = of({"epochs": 1, "profile": [100, 110]})
    with pytest.raises(ConfigError, match=r"profile: step 110 is after the end of training"):
        resolve(config, Splits(320, 32))


def test_a_task_of_a_cluster_takes_the_numbers_of_the_dataset(monkeypatch):
    manifest = type("", (), {"fields": {"splits": {"train": {"examples": 640}}}})
    monkeypatch.setattr(length.storage, "read_manifest", lambda _uri: manifest)
    config = parse_config({"training": {"epochs": 3}})
    assert length.resolve_for_dataset(config, "file:///d").training.steps == 30


@pytest.mark.parametrize(
    ("epochs", "words"), [(1, "1 epoch"), (0.096, "0.096 epochs"), (24.4, "24 epochs")]
)
def test_epochs_in_words(epochs, words):
    assert length.format_epochs(epochs) == words

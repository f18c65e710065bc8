"""A fresh run that begins with the weights of another one, and what it says if they do not fit."""

from __future__ import annotations

import shutil

import keras
import pytest
import tensorflow as tf

from tests.trainer.counting import Counting, Run
from tests.trainer.small_run import publish_checkpoint
from trainer import events, storage
from trainer.checkpoints import warm_start
from trainer.checkpoints.checkpoints import Checkpoints
from trainer.errors import ConfigError, UserError
from trainer.events import AttemptBegin, WarmStart
from trainer.strategies.strategy import checkpoint_variables


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv(events.VARIABLE, str(tmp_path / "events.jsonl"))
    return Run(tmp_path)


@pytest.fixture
def before(tmp_path, monkeypatch):
    """An earlier run that has come to global step 30, with a weight of 15."""
    earlier = Run(tmp_path / "earlier")
    with monkeypatch.context() as apart:
        apart.setenv(events.VARIABLE, str(tmp_path / "earlier.jsonl"))
        earlier.train(steps=30, keep=100)
    assert earlier.weight(30) == 15.0
    return earlier


def checkpoint_of(run, step=30):
    return storage.join(run.uri, f"step-{step:08d}")


def refused(run, uri):
    strategy = Counting()
    with pytest.raises(UserError) as caught:
        run.train(strategy, steps=20, warm_start=uri)
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith("training.warm_start: ")
    # Before training begins: nothing was applied, and nothing saved.
    assert run.steps() == []
    assert run.events(AttemptBegin) == []
    return line


def test_it_takes_the_weights_and_begins_at_global_step_0(run, before):
    assert run.train(steps=20, keep=100, warm_start=checkpoint_of(before)) == 20
    assert run.steps() == [0, 10, 20]
    assert [run.weight(step) for step in run.steps()] == [15.0, 20.0, 25.0]
    (attempt,) = run.events(AttemptBegin)
    assert (attempt.global_step, attempt.resumed) == (0, False)


def test_it_is_logged_and_in_every_manifest(run, before):
    uri = checkpoint_of(before)
    run.train(steps=20, keep=100, warm_start=uri)
    (event,) = run.events(WarmStart)
    assert event == WarmStart(uri=uri, taken=1, what="1 variable taken")
    assert {run.fields(step)["warmed_from"] for step in run.steps()} == {uri}
    assert run.fields(20)["warm_start"] == "1 variable taken"


def test_a_run_without_one_says_so(run):
    run.train(steps=10)
    assert (run.fields(10)["warmed_from"], run.fields(10)["warm_start"]) == ("", "")
    assert run.events(WarmStart) == []


def test_a_resumed_run_ignores_it_and_keeps_its_origin(run, before):
    uri = checkpoint_of(before)
    run.train(steps=20, keep=100, warm_start=uri)
    # By now the checkpoint may be gone.
    shutil.rmtree(before.folder)
    run.train(steps=40, keep=100, warm_start=uri)
    assert run.weight(40) == 15.0 + 20.0
    assert run.fields(40)["warmed_from"] == uri
    assert len(run.events(WarmStart)) == 1


def test_a_run_that_began_without_one_takes_none_later(run, before):
    run.train(steps=20, keep=100)
    run.train(steps=40, keep=100, warm_start=checkpoint_of(before))
    assert run.weight(40) == 20.0
    assert run.fields(40)["warmed_from"] == ""


def test_one_that_is_not_there(run, before):
    uri = checkpoint_of(before, 31)
    assert refused(run, uri) == (
        f"training.warm_start: {uri} is not published (no MANIFEST.json there): check the URI, or "
        "make it again"
    )


def test_one_that_is_damaged(run, before):
    before.damage(30)
    line = refused(run, checkpoint_of(before))
    assert "step-00000030 is damaged: variables.data-00000-of-00001 has crc32c" in line


def test_something_else_than_a_checkpoint(run, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    uri = storage.uri_of(tmp_path / "dataset")
    storage.publish(source, uri, kind="dataset")
    line = refused(run, uri)
    assert line == f"training.warm_start: {uri} is of kind 'dataset' and not a checkpoint"


def test_the_word_champion_is_for_the_pipeline(run):
    with pytest.raises(ConfigError, match="the pipeline resolves the champion"):
        run.train(steps=20, warm_start="champion")


def published(folder, variables):
    """Publish variables as the checkpoint of global step 7."""
    kept = Checkpoints(storage.uri_of(folder / "other"), keep=9, scratch=folder / "saving")
    counter = tf.Variable(7, dtype=tf.int64)
    return kept.save({**variables, "global_step": counter}, io_device=None, fields={})


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"model/a": tf.Variable(1.0)}, "it has no weight []"),
        ({"model/weight": tf.Variable([1.0, 2.0])}, "weight is [2] there and [] in this model"),
        (
            {"model/weight": tf.Variable(1.0), "model/v1.0/bias": tf.Variable([0.0])},
            "it has v1.0/bias [1], which this model has not",
        ),
    ],
)
def test_one_of_another_model_names_the_first_variable_that_differs(run, tmp_path, variables, said):
    uri = published(tmp_path, variables)
    assert refused(run, uri) == (
        f"training.warm_start: {uri} is the checkpoint of another model: {said}; name one of the "
        "same model section, choose variables by {from, include, exclude}, or leave it empty"
    )


def test_the_first_of_many_that_differ_is_the_first_of_the_model(tmp_path):
    model = net(units=4)
    uri = publish_checkpoint(tmp_path / "checkpoints", net(units=5))
    found = warm_start.fetched(uri, tmp_path / "scratch")
    named = {f"model/{variable.path}": variable.value for variable in model.variables}
    with pytest.raises(UserError, match=r"hidden/kernel is \[3, 5\] there and \[3, 4\] in this"):
        warm_start.load(found, named, io_device=None)


def net(units=4):
    layers = [
        keras.Input((3,)),
        keras.layers.Dense(units, name="hidden"),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.Dense(2, name="out"),
    ]
    return keras.Sequential(layers, name="net")


def test_all_state_of_the_model_is_taken_and_none_of_the_optimizer(tmp_path):
    earlier, optimizer = trained()
    uri = published(tmp_path, checkpoint_variables(earlier, optimizer))
    fresh = net()
    begun = keras.optimizers.Adam()
    begun.build(fresh.trainable_variables)
    untouched = [variable.numpy().tolist() for variable in begun.variables]
    found = warm_start.fetched(uri, tmp_path / "scratch")
    warm_start.load(found, checkpoint_variables(fresh, begun), io_device=None)
    for mine, theirs in zip(fresh.variables, earlier.variables, strict=True):
        assert mine.numpy().tolist() == theirs.numpy().tolist()
    assert [variable.numpy().tolist() for variable in begun.variables] == untouched
    assert int(begun.iterations) == 0


def trained():
    """A model whose every variable has moved, and its optimizer."""
    model = net()
    optimizer = keras.optimizers.Adam(0.1)
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(tf.random.normal((8, 3)), training=True) ** 2)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, [each.value for each in weights]), weights)
    assert int(optimizer.iterations) == 3
    return model, optimizer

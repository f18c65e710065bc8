"""Tests the rows and events of an attempt's journal, and Keras callbacks in the outer loop."""

from pathlib import Path

import keras
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flotilla.trainer import events, storage
from flotilla.trainer.checkpoints.checkpoints import Checkpoints
from flotilla.trainer.config.schema import TrainingConfig
from flotilla.trainer.runtime.errors import ConfigError, UserError
from flotilla.trainer.training.journal import CALLED, MAX_ROWS, Callbacks, Journal, check_callbacks
from tests.trainer.counting import Counting, config_of
from tests.trainer.telemetry.test_tensorboard import hyperparameters, scalars


@pytest.fixture
def checkpoints(tmp_path):
    uri = storage.uri_of(tmp_path / "digits-1" / "checkpoints")
    return Checkpoints(uri, keep=1, scratch=tmp_path / "scratch")


def row(step, **metrics):
    return {"global_step": step, "loss": 0.5, "seconds": 1.0, **metrics}


def logs(checkpoints):
    return Path(storage.local_path(storage.join(checkpoints.uri, "logs")))


def test_a_long_run_keeps_some_rows_and_every_validation(checkpoints):
    steps = 10 * MAX_ROWS
    journal = Journal(config_of(steps=steps), checkpoints, 0)
    for step in (10, 15, 16, 20, steps):
        journal.add(row(step, **({"validation_loss": 0.25} if step == 16 else {})))
    assert [each["global_step"] for each in journal.rows] == [10, 16, steps]


def test_an_attempt_begins_with_the_configuration_for_tensorboard(checkpoints):
    journal = Journal(config_of(steps=20), checkpoints, 0)
    journal.begin(0, {})
    journal.add(row(20, validation_loss=0.25))
    _, values = hyperparameters(logs(checkpoints), "digits-1")
    assert values["training.steps"] == 20
    assert ("digits-1/validation", 20, "loss", 0.25) in scalars(logs(checkpoints))
    assert journal.logs == logs(checkpoints) / "digits-1"


def test_a_task_that_does_not_publish_writes_nothing(checkpoints):
    journal = Journal(config_of(steps=20), checkpoints, 0, publishes=False)
    journal.begin(0, {})
    journal.add(row(20, validation_loss=0.25))
    journal.add(row(30, validation_loss=0.5))
    assert not logs(checkpoints).parent.exists()
    assert journal.rows == [row(20, validation_loss=0.25), row(30, validation_loss=0.5)]


def test_a_table_without_a_row_at_the_end_is_named_once(checkpoints, monkeypatch):
    said = []
    monkeypatch.setattr(events, "emit", said.append)
    journal = Journal(config_of(steps=20), checkpoints, 0)
    tables = {
        "seldom": {"rows": 0, "evicted": 0, "turned_away": 30},
        "frozen": {"rows": 0, "evicted": 0, "turned_away": 0},
        "old": {"rows": 0, "evicted": 7, "turned_away": 1},
        "user": {"rows": 5, "evicted": 0, "turned_away": 2},
    }
    for step in (10, 20, 20):
        journal.add(row(step, tables=tables))
    assert said == [
        events.TableEmpty(
            table="seldom",
            why="30 lookups found no row for their id: lower min_count, or train longer",
        ),
        events.TableEmpty(
            table="frozen", why="it was frozen, or training never looked up an id in it"
        ),
        events.TableEmpty(table="old", why="all of its rows were evicted by age: raise max_age"),
    ]


def test_progress_says_how_many_epochs_it_is_of(checkpoints, monkeypatch):
    said = []
    monkeypatch.setattr(events, "emit", said.append)
    journal = Journal(config_of(steps=20), checkpoints, 0, 8.0)
    journal.begin(0, {})
    journal.progress(row(12, epoch=1.5, learning_rate=0.1, steps_per_second=4.0))
    begin, progress = said
    assert (begin.steps, begin.epochs) == (20, 2.5)
    assert (progress.epoch, progress.epochs, progress.seconds_left) == (1.5, 2.5, 2.0)


calls = []


class Recorder(keras.callbacks.Callback):
    """Records every hook that is called."""


def _recording(hook):
    def record(self, *args, logs=None):
        calls.append((hook, *args, logs))
        assert self.params["steps"] == 10

    return record


for _hook in CALLED:
    setattr(Recorder, _hook, _recording(_hook))


class StopsAtTwenty(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):  # noqa: ARG002
        self.model.stop_training = logs["global_step"] >= 20


class Summaries(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):  # noqa: ARG002
        tf.summary.scalar("doubled", 2 * logs["val_loss"])


class OfBatches(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):  # noqa: ARG002
        raise AssertionError("never called")


class ReadsWeights(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):  # noqa: ARG002
        self.model.get_weights()


class Fails(keras.callbacks.Callback):
    def on_test_end(self, logs=None):  # noqa: ARG002
        raise KeyError("no such column")


class NeedsArguments(keras.callbacks.Callback):
    def __init__(self, path):  # noqa: ARG002
        super().__init__()


class BestLoss(keras.callbacks.EarlyStopping):
    def __init__(self):
        super().__init__(monitor="val_loss", patience=1)


def loss_of(strategy):
    return {"loss": 1 / strategy.global_step()}


def named(*classes):
    return [f"{__name__}:{each.__name__}" for each in classes]


@pytest.fixture(autouse=True)
def no_calls():
    calls.clear()


def test_a_validation_ends_an_epoch(run):
    run.train(steps=25, validate=loss_of, callbacks=named(Recorder))
    hooks = [(hook, *args) for hook, *args, _ in calls]
    epoch = [("on_test_begin",), ("on_test_end",)]
    assert hooks == [
        ("on_train_begin",),
        *[("on_epoch_begin", 0), *epoch, ("on_epoch_end", 0)],
        *[("on_epoch_begin", 1), *epoch, ("on_epoch_end", 1)],
        *[("on_epoch_begin", 2), *epoch, ("on_epoch_end", 2)],
        ("on_train_end",),
    ]
    measured = [logs for hook, *_, logs in calls if hook == "on_test_end"]
    assert measured == [{"loss": 1 / step} for step in (10, 20, 25)]
    *_, last = [logs for hook, *_, logs in calls if hook == "on_epoch_end"]
    assert (last["global_step"], last["loss"], last["val_loss"]) == (25, 1.0, 1 / 25)


def test_training_without_validations_is_one_epoch(run):
    run.train(steps=25, validate_every=0, checkpoint_every=10, callbacks=named(StopsAtTwenty))
    assert run.steps()[-1] == 25


def test_a_resumed_attempt_goes_on_with_its_epoch(run):
    run.train(steps=20, validate=loss_of)
    run.train(steps=30, validate=loss_of, callbacks=named(Recorder))
    assert [args for hook, *args, _ in calls if "epoch" in hook] == [[2], [2]]


def test_a_callback_ends_training_with_a_checkpoint(run):
    assert run.train(steps=100, validate=loss_of, callbacks=named(StopsAtTwenty)) == 20
    assert run.steps()[-1] == 20


def test_early_stopping_of_keras_itself(run):
    def rises(strategy):
        return {"loss": float(strategy.global_step())}

    assert run.train(steps=100, validate=rises, callbacks=named(BestLoss)) == 20


def test_a_callback_writes_summaries_into_the_logs_of_the_run(run):
    run.train(steps=20, validate=loss_of, callbacks=named(Summaries))
    [folder] = (run.folder / "checkpoints" / "logs").glob("*/callbacks")
    board = EventAccumulator(str(folder)).Reload()
    found = {
        each.step: tf.make_ndarray(each.tensor_proto).item() for each in board.Tensors("doubled")
    }
    assert found == {10: pytest.approx(0.2), 20: pytest.approx(0.1)}


def test_a_task_that_does_not_publish_calls_none(run):
    class Follower(Counting):
        publishes = False

    run.train(Follower(), steps=20, validate=loss_of, callbacks=named(Recorder))
    assert calls == []


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        ("nowhere_at_all:Thing", "training.callbacks: cannot import nowhere_at_all"),
        (f"{__name__}:Record", "has no Callback 'Record'; did you mean 'Recorder'"),
        (f"{__name__}:loss_of", "is not a class derived from keras.callbacks.Callback"),
        (named(OfBatches)[0], "OfBatches has on_train_batch_end, which is never called"),
        ("keras.callbacks:ModelCheckpoint", "ModelCheckpoint has on_train_batch_end"),
    ],
)
def test_a_callback_that_cannot_work_is_refused_before_training(callback, message):
    with pytest.raises(ConfigError) as refused:
        check_callbacks(TrainingConfig(callbacks=(callback,)))
    assert message in str(refused.value)


def test_a_check_creates_no_callback():
    check_callbacks(TrainingConfig(callbacks=tuple(named(NeedsArguments))))
    with pytest.raises(UserError, match=r"NeedsArguments\.__init__ raised TypeError: .*'path'"):
        Callbacks(TrainingConfig(callbacks=tuple(named(NeedsArguments))), publishes=True)


def test_the_weights_of_a_strategy_are_refused_by_name(run):
    with pytest.raises(UserError, match=r"a callback uses model\.get_weights"):
        run.train(steps=20, validate=loss_of, callbacks=named(ReadsWeights))


def test_an_error_of_a_callback_is_one_line_with_its_place(run):
    with pytest.raises(UserError) as failed:
        run.train(steps=20, validate=loss_of, callbacks=named(Fails))
    assert "Fails.on_test_end raised KeyError: 'no such column'" in str(failed.value)
    assert "\n" not in str(failed.value)
    assert run.steps() == [0]

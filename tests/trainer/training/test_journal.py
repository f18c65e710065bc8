"""Tests which rows the journal of an attempt keeps, and which events it emits."""

from pathlib import Path

import pytest

from flotilla.trainer import events, storage
from flotilla.trainer.checkpoints.checkpoints import Checkpoints
from flotilla.trainer.training.journal import MAX_ROWS, Journal
from tests.trainer.counting import config_of
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

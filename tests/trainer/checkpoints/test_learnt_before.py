"""A model is built with the statistics that its weights were trained with."""

from __future__ import annotations

import pytest
import tensorflow as tf

from trainer import storage
from trainer.checkpoints import learnt_before
from trainer.checkpoints.checkpoints import Checkpoints
from trainer.config.schema import TrainingConfig
from trainer.statistics import statistics
from trainer.statistics.statistics import FeatureStatistics, Learnt, SplitStatistics, Statistics


def data(mean):
    age = FeatureStatistics(kind="number", examples=1, mean=mean)
    found = Statistics(splits={"train": SplitStatistics(examples=1, features={"age": age})})
    return statistics.to_bytes(found)


def mean(learnt):
    return learnt.features["age"].mean


@pytest.fixture
def dataset(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / statistics.FILE).write_bytes(data(1.0))
    uri = storage.uri_of(tmp_path / "dataset")
    storage.publish(folder, uri, kind="dataset", fields={})
    return uri


def saved(place, step, learnt=None):
    """Save a checkpoint of a model that has asked for these statistics."""
    checkpoints = Checkpoints(storage.uri_of(place), keep=9, scratch=place.with_name("saving"))
    if learnt is not None:
        checkpoints.learnt = Learnt(lambda: (data(learnt), ""))
        mean(checkpoints.learnt)
    step = tf.Variable(step, dtype=tf.int64)
    return checkpoints.save({"global_step": step}, io_device=None, fields={})


def test_a_new_model_learns_from_its_dataset(dataset, tmp_path):
    run = storage.uri_of(tmp_path / "run")
    assert mean(learnt_before.of_dataset(dataset)) == 1
    assert mean(learnt_before.of_run(run, TrainingConfig(), dataset)) == 1


def test_a_checkpoint_keeps_what_its_model_has_learnt(dataset, tmp_path):
    checkpoint = saved(tmp_path / "run", 5, learnt=2.0)
    assert mean(learnt_before.of_checkpoint(checkpoint, dataset)) == 2


def test_a_model_that_asks_for_nothing_adds_nothing_to_its_checkpoints(dataset, tmp_path):
    checkpoint = saved(tmp_path / "run", 5)
    files = {each.path for each in storage.read_manifest(checkpoint).files}
    assert statistics.FILE not in files
    assert mean(learnt_before.of_checkpoint(checkpoint, dataset)) == 1


def test_a_run_goes_on_with_what_it_has_begun_with(dataset, tmp_path):
    other = saved(tmp_path / "other", 9, learnt=3.0)
    run, training = tmp_path / "run", TrainingConfig(warm_start=other)
    uri = storage.uri_of(run)
    assert mean(learnt_before.of_run(uri, training, dataset)) == 3
    saved(run, 5, learnt=3.0)
    storage.delete(other)
    assert mean(learnt_before.of_run(uri, training, dataset)) == 3


def test_a_damaged_checkpoint_is_passed_over(dataset, tmp_path):
    run = tmp_path / "run"
    saved(run, 5, learnt=2.0)
    newest = saved(run, 6, learnt=2.0)
    (storage.local_path(newest) / statistics.FILE).write_bytes(b"")
    assert mean(learnt_before.of_run(storage.uri_of(run), TrainingConfig(), dataset)) == 2


def test_weights_without_statistics_leave_the_dataset(dataset, tmp_path):
    keras_file = TrainingConfig(warm_start="file:///somewhere/model.keras")
    run = storage.uri_of(tmp_path / "run")
    assert mean(learnt_before.of_run(run, keras_file, dataset)) == 1

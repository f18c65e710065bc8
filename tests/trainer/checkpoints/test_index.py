"""Tests the index of published checkpoints, with their metrics."""

import json

import pytest
import tensorflow as tf

from flotilla.trainer import storage
from flotilla.trainer.checkpoints import index
from flotilla.trainer.checkpoints.checkpoints import Checkpoints
from flotilla.trainer.checkpoints.history import (
    VALIDATIONS_FILE,
    Validations,
    merge_validations,
    read_validations,
)
from flotilla.trainer.checkpoints.index import (
    best_first,
    contents,
    read_index,
    require_first_weights,
    select_checkpoint,
)
from flotilla.trainer.config.schema import TrainingConfig
from flotilla.trainer.features.statistics import statistics
from flotilla.trainer.features.statistics.statistics import (
    FeatureStatistics,
    Learnt,
    SplitStatistics,
    Statistics,
)
from flotilla.trainer.runtime.errors import UserError


def publish(folder, step, **fields):
    source = folder.with_name(f"source-{step}")
    source.mkdir(exist_ok=True)
    uri = storage.uri_of(folder / f"step-{step:08d}")
    return uri, storage.publish(
        source, uri, kind="checkpoint", fields={"global_step": step, **fields}
    )


def test_the_evaluator_s_metrics_precede_those_of_the_manifest(tmp_path):
    folder = tmp_path / "checkpoints"
    uri = storage.uri_of(folder)
    published = {}
    for step, loss in ((100, 0.5), (20, 0.3), (3, None)):
        fields = {} if loss is None else {"metrics": {"validation_loss": loss}}
        published[step] = publish(folder, step, **fields)
    assert [(each.global_step, each.loss) for each in read_index(uri)] == [
        (3, None), (20, 0.3), (100, 0.5),
    ]  # fmt: skip
    assert best_first(read_index(uri))[0].global_step == 20
    measured = Validations(uri)
    measured.add(published[3][1], {"loss": 0.4})
    measured.add(published[20][1], {"loss": 0.9})
    assert [each.loss for each in read_index(uri)] == [0.4, 0.9, 0.5]
    assert best_first(read_index(uri))[0].global_step == 3


def test_what_has_changed_rows_alone_is_not_the_best(tmp_path):
    folder = tmp_path / "checkpoints"
    publish(folder, 10, metrics={"validation_loss": 0.5})
    publish(folder, 20, metrics={"validation_loss": 0.3}, base={"uri": "step-00000010"})
    assert [each.global_step for each in best_first(read_index(storage.uri_of(folder)))] == [10]


def test_a_checkpoint_that_was_made_again_is_another_one(tmp_path):
    folder = tmp_path / "checkpoints"
    at, old = publish(folder, 10)
    measured = Validations(storage.uri_of(folder))
    measured.add(old, {"loss": 0.1})
    assert measured.has(old)
    storage.delete(at)
    (folder.with_name("source-10") / "other").write_text("other")
    _, new = publish(folder, 10, try_=2)
    if new.created == old.created:
        pytest.skip("made within one millisecond")
    assert not measured.has(new)
    assert [each.loss for each in read_index(storage.uri_of(folder))] == [None]
    measured.add(new, {"loss": 0.2, "accuracy": 0.5})
    assert [each.loss for each in read_index(storage.uri_of(folder))] == [0.2]


def test_rows_are_read_by_the_next_evaluator_and_by_the_report(tmp_path):
    uri = storage.uri_of(tmp_path)
    assert read_validations(uri) == []
    measured = Validations(uri)
    for step in (20, 10):
        _, manifest = publish(tmp_path, step)
        measured.add(manifest, {"loss": step / 100})
    rows = read_validations(uri)
    assert [each["global_step"] for each in rows] == [10, 20]
    assert Validations(uri).has(manifest)
    merged = merge_validations([{"global_step": 20, "loss": 1}, {"global_step": 25}], rows)
    assert [each["global_step"] for each in merged] == [10, 20, 25]
    assert (merged[1]["loss"], merged[1]["validation_loss"]) == (1, 0.2)
    assert json.loads((tmp_path / VALIDATIONS_FILE).read_text().splitlines()[0])["created"]


@pytest.mark.parametrize("line", ["{", "[]", "3", "{}", '{"global_step": 5, "created": "x"}'])
def test_damage_to_the_file_of_the_evaluator_reaches_nobody(tmp_path, line):
    uri = storage.uri_of(tmp_path)
    _, manifest = publish(tmp_path, 10)
    Validations(uri).add(manifest, {"loss": 0.5})
    with (tmp_path / VALIDATIONS_FILE).open("ab") as file:
        file.write(f"{line}\n".encode() + b"\xff\x00")
    assert [row["global_step"] for row in read_validations(uri)] == [10]
    assert best_first(read_index(uri))[0].loss == 0.5


def test_one_of_changed_rows_alone_is_passed_over(tmp_path, caplog):
    folder = tmp_path / "checkpoints"
    whole, made = publish(folder, 10)
    base = {"uri": whole, "created": made.created}
    changed, _ = publish(folder, 20, base=base, metrics={"validation_loss": 0.1})
    run = Checkpoints(storage.uri_of(folder), keep=3, scratch=tmp_path / "scratch")
    assert run.newest().uri == whole
    line = f"{changed} contains only the rows that changed since another checkpoint (written by"
    assert line in caplog.text
    with pytest.raises(UserError, match=r"use a complete checkpoint$"):
        select_checkpoint(run.uri, "last")
    with pytest.raises(UserError, match=r"use a complete checkpoint$"):
        contents(run.uri)


class TestFirstWeights:
    @pytest.fixture
    def own(self, tmp_path):
        return storage.uri_of(tmp_path / "own")

    def test_what_is_there_will_do(self, tmp_path, own):
        checkpoint, _ = publish(tmp_path / "checkpoints", 10)
        (tmp_path / "a.keras").touch()
        for value in (checkpoint, str(tmp_path / "a.keras"), "", "champion"):
            require_first_weights(value, own)
        require_first_weights({"from": checkpoint, "include": ["a"]}, own)

    @pytest.mark.parametrize("name", ["step-00000011", "a.keras"])
    def test_what_is_not_there_is_refused(self, tmp_path, own, name):
        missing = storage.uri_of(tmp_path / name)
        with pytest.raises(UserError, match=rf"^training.warm_start: .*{missing}"):
            require_first_weights(missing, own)

    def test_a_run_that_has_begun_needs_none(self, tmp_path, own):
        publish(tmp_path / "own", 0)
        require_first_weights(storage.uri_of(tmp_path / "a.keras"), own)


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
    """Save a checkpoint of a model that uses these statistics."""
    checkpoints = Checkpoints(storage.uri_of(place), keep=9, scratch=place.with_name("saving"))
    if learnt is not None:
        checkpoints.learnt = Learnt(lambda: (data(learnt), ""))
        mean(checkpoints.learnt)
    step = tf.Variable(step, dtype=tf.int64)
    return checkpoints.save({"global_step": step}, io_device=None, fields={})


def test_a_new_model_learns_from_its_dataset(dataset, tmp_path):
    run = storage.uri_of(tmp_path / "run")
    assert mean(index.learnt_of_dataset(dataset)) == 1
    assert mean(index.learnt_of_run(run, TrainingConfig(), dataset)) == 1


def test_a_checkpoint_keeps_what_its_model_has_learnt(dataset, tmp_path):
    checkpoint = saved(tmp_path / "run", 5, learnt=2.0)
    assert mean(index.learnt_of_checkpoint(checkpoint, dataset)) == 2


def test_a_model_that_asks_for_nothing_adds_nothing_to_its_checkpoints(dataset, tmp_path):
    checkpoint = saved(tmp_path / "run", 5)
    files = {each.path for each in storage.read_manifest(checkpoint).files}
    assert statistics.FILE not in files
    assert mean(index.learnt_of_checkpoint(checkpoint, dataset)) == 1


def test_a_run_goes_on_with_what_it_has_begun_with(dataset, tmp_path):
    other = saved(tmp_path / "other", 9, learnt=3.0)
    run, training = tmp_path / "run", TrainingConfig(warm_start=other)
    uri = storage.uri_of(run)
    assert mean(index.learnt_of_run(uri, training, dataset)) == 3
    saved(run, 5, learnt=3.0)
    storage.delete(other)
    assert mean(index.learnt_of_run(uri, training, dataset)) == 3


def test_a_damaged_checkpoint_is_passed_over(dataset, tmp_path):
    run = tmp_path / "run"
    saved(run, 5, learnt=2.0)
    newest = saved(run, 6, learnt=2.0)
    (storage.local_path(newest) / statistics.FILE).write_bytes(b"")
    assert mean(index.learnt_of_run(storage.uri_of(run), TrainingConfig(), dataset)) == 2


def test_weights_without_statistics_leave_the_dataset(dataset, tmp_path):
    keras_file = TrainingConfig(warm_start="file:///somewhere/model.keras")
    run = storage.uri_of(tmp_path / "run")
    assert mean(index.learnt_of_run(run, keras_file, dataset)) == 1

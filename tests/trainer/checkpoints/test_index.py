"""Tests the index of published checkpoints, and which ones are due, kept and selected."""

import json
from datetime import UTC, datetime, timedelta

import pytest
import tensorflow as tf

from flotilla.trainer import events, storage
from flotilla.trainer.checkpoints import index
from flotilla.trainer.checkpoints.checkpoints import Checkpoints
from flotilla.trainer.checkpoints.history import (
    VALIDATIONS_FILE,
    Validations,
    merge_validations,
    read_validations,
)
from flotilla.trainer.checkpoints.index import (
    IndexEntry,
    Interval,
    Retention,
    SaveInterval,
    best_first,
    contents,
    read_index,
    require_first_weights,
    select_checkpoint,
)
from flotilla.trainer.config.main_metric import MainMetric
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
    # A Keras file contains no statistics.
    keras_file = TrainingConfig(warm_start="file:///somewhere/model.keras")
    assert mean(index.learnt_of_dataset(dataset)) == 1
    for training in (TrainingConfig(), keras_file):
        assert mean(index.learnt_of_run(run, training, dataset)) == 1


@pytest.mark.parametrize(("learnt", "found"), [(2.0, 2), (None, 1)])
def test_a_checkpoint_keeps_what_its_model_has_learnt_if_it_asks(dataset, tmp_path, learnt, found):
    checkpoint = saved(tmp_path / "run", 5, learnt=learnt)
    files = {each.path for each in storage.read_manifest(checkpoint).files}
    assert (statistics.FILE in files) is (learnt is not None)
    assert mean(index.learnt_of_checkpoint(checkpoint, dataset)) == found


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


@pytest.mark.parametrize(
    ("steps", "before", "after", "due", "following"),
    [
        (100, 0, 99, False, 100),
        (100, 99, 100, True, 200),
        (100, 50, 250, True, 250),
        (100, 200, 250, True, 250),
        (0, 0, 250, False, 250),
    ],
)
def test_it_is_due_at_each_multiple_and_at_the_last_step(steps, before, after, due, following):
    every = Interval(steps=steps, last_step=250)
    assert every.is_due(before, after) is due
    assert every.find_next(after) == following


@pytest.mark.parametrize(
    ("every", "seconds", "late"), [(10, 9.9, False), (10, 10, True), (0, 99, False)]
)
def test_a_save_may_be_late(every, seconds, late):
    training = TrainingConfig(checkpoint_seconds=every)
    assert SaveInterval.from_config(training).is_late(seconds) is late


AUC = MainMetric(name="auc", better="higher")


BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


def row(step, loss=None, auc=None, hours=0.0):
    named = {"validation_loss": loss, "validation_auc": auc}
    validation = {name: value for name, value in named.items() if value is not None}
    return IndexEntry(
        uri=f"file:///step-{step}",
        global_step=step,
        validation=validation,
        main=AUC,
        created=BEGIN + timedelta(hours=hours),
    )


def left(found, newest=1, unmeasured=0, every_hours=0.0):
    gone = Retention(newest=newest, unmeasured=unmeasured, every_hours=every_hours).list_outdated(
        found
    )
    return [each.global_step for each in found if each.uri not in gone]


@pytest.mark.parametrize(
    ("every_hours", "expected"),
    [(0, [6]), (1, [0, 2, 4, 6]), (1.5, [0, 3, 6]), (2.9, [0, 6]), (9, [0, 6])],
)
def test_one_checkpoint_of_each_interval_stays(every_hours, expected):
    found = [row(step, hours=step / 2) for step in range(7)]
    assert left(found, every_hours=every_hours) == expected


@pytest.mark.parametrize("every_hours", [0.7, 1, 3])
def test_the_same_checkpoints_stay_when_others_were_deleted_meanwhile(every_hours):
    found = []
    for step in range(20):
        found.append(row(step, hours=step / 3))
        stay = left(found, every_hours=every_hours)
        found = [each for each in found if each.global_step in stay]
    whole = [row(step, hours=step / 3) for step in range(20)]
    assert [each.global_step for each in found] == left(whole, every_hours=every_hours)


@pytest.mark.parametrize(
    ("losses", "keep", "expected"),
    [
        ({10: None, 20: None, 30: None}, 1, [30]),
        ({10: 0.1, 20: 0.2, 30: 0.3}, 1, [10, 30]),
        ({10: 0.3, 20: 0.1, 30: 0.2, 40: 0.2}, 2, [20, 30, 40]),
        ({10: 0.3, 20: 0.2, 30: 0.1}, 1, [30]),
        ({10: 0.1, 20: 0.1, 30: None}, 1, [10, 30]),
        ({}, 3, []),
    ],
)
def test_the_newest_and_the_best_stay(losses, keep, expected):
    assert left([row(step, loss) for step, loss in losses.items()], keep) == expected


def test_the_best_by_the_main_metric_stays_whatever_its_loss():
    found = [row(10, 0.2, 0.6), row(20, 0.9, 0.8), row(30, 0.8, 0.8), row(40, 0.1), row(50)]
    assert left(found) == [30, 50]
    assert left(found[3:]) == [40, 50]


def test_what_an_evaluator_has_still_to_see_stays_up_to_a_limit():
    found = [row(0, 0.5), row(1, 0.6), *(row(step) for step in range(2, 20))]
    assert left(found, unmeasured=7) == [0, *range(13, 20)]
    assert left(found) == [0, 19]


class TestSelectedCheckpoint:
    @pytest.fixture
    def run(self, tmp_path, monkeypatch):
        """Return a function that publishes checkpoints with given losses and returns their URI."""
        monkeypatch.setenv(events.VARIABLE, str(tmp_path / "events.jsonl"))

        def published(losses, damaged=(), areas=(), **fields):
            for step, loss in losses.items():
                weights = tmp_path / f"source-{step}"
                weights.mkdir()
                (weights / "variables.index").write_text(str(step), encoding="utf-8")
                metrics = {} if loss is None else {"validation_loss": loss}
                metrics |= {"validation_auc": areas[step]} if step in areas else {}
                publish(tmp_path / "checkpoints", step, metrics=metrics, **fields)
            for step in damaged:
                file = tmp_path / "checkpoints" / f"step-{step:08d}" / "variables.index"
                file.write_text("other", encoding="utf-8")
            return storage.uri_of(tmp_path / "checkpoints")

        return published

    @staticmethod
    def emitted(tmp_path):
        return list(events.read(tmp_path / "events.jsonl"))

    @pytest.mark.parametrize(
        ("losses", "choice", "expected"),
        [
            ({10: 0.3, 20: 0.1, 30: 0.2}, "best", (20, "best by validation loss")),
            ({10: 0.3, 20: 0.1, 30: 0.2}, "last", (30, "the last, as set in training.hand_on")),
            ({10: 0.3, 20: None}, "best", (10, "best by validation loss")),
            ({10: None, 20: None}, "best", (20, "the last, because no checkpoint was validated")),
            ({10: 0.1, 20: 0.1}, "best", (10, "best by validation loss")),
            ({0: 0.1, 20: None}, "best", (20, "the last, because no checkpoint was validated")),
            ({0: 0.1, 20: 0.2}, "best", (0, "best by validation loss")),
        ],
    )
    def test_it_is_the_one_that_is_asked_for(self, run, tmp_path, losses, choice, expected):
        step, why = expected
        found = select_checkpoint(run(losses), choice)
        assert (found.global_step, found.trained, found.why) == (step, max(losses), why)
        assert found.fields["global_step"] == step
        (event,) = self.emitted(tmp_path)
        assert event == events.HandedOn(
            uri=found.uri, global_step=step, trained=max(losses), why=why
        )

    @pytest.mark.parametrize(
        ("main_metric", "direction", "areas", "expected"),
        [
            ("auc", "higher", {10: 0.6, 20: 0.9, 30: 0.7}, (20, "best by validation AUC")),
            ("auc", "lower", {10: 0.6, 20: 0.9, 30: 0.7}, (10, "best by validation AUC")),
            # Of two equal values, the one with the lower loss is selected.
            ("auc", "higher", {10: 0.9, 20: 0.9, 30: 0.9}, (30, "best by validation AUC")),
            # An undefined metric is worse than any value.
            ("auc", "higher", {20: 0.4}, (20, "best by validation AUC")),
            (
                "ndcg", "higher", {10: 0.6, 20: 0.9, 30: 0.7},
                (30, "best by validation loss, because validations do not measure NDCG"),
            ),
            # The checkpoints of an earlier version have no main metric.
            ("", "higher", {10: 0.6, 20: 0.9, 30: 0.7}, (30, "best by validation loss")),
        ],
    )  # fmt: skip
    def test_the_best_is_that_of_the_main_metric(
        self, run, main_metric, direction, areas, expected
    ):
        said = {"main_metric": main_metric, "directions": {main_metric: direction}}
        found = select_checkpoint(
            run({10: 0.3, 20: 0.5, 30: 0.1}, areas=areas, **said if main_metric else {}), "best"
        )
        assert (found.global_step, found.why) == expected
        assert found.validation["validation_loss"] == {10: 0.3, 20: 0.5, 30: 0.1}[expected[0]]

    def test_a_run_that_goes_on_with_another_main_metric_selects_by_that_one(self, run):
        losses, areas = {10: 0.3, 20: 0.5}, {10: 0.4, 20: 0.9}
        uri = run(losses, areas=areas)
        assert select_checkpoint(uri, "best").global_step == 10
        more = {"main_metric": "auc", "directions": {"auc": "higher"}}
        run({30: 0.4}, areas={30: 0.5}, **more)
        assert select_checkpoint(uri, "best").global_step == 20
        assert select_checkpoint(uri, "best", "loss").global_step == 10

    def test_a_damaged_one_makes_room_for_the_next_best_and_is_named(self, run, tmp_path, caplog):
        uri = run({10: 0.3, 20: 0.1, 30: 0.2}, damaged=[20])
        found = select_checkpoint(uri, "best")
        assert found.global_step == 30
        assert found.why == "best by validation loss among the intact checkpoints"
        assert found.best.global_step == 20
        passed, event = self.emitted(tmp_path)
        assert passed.uri.endswith("step-00000020")
        assert "variables.index" in passed.reason
        assert event.uri == found.uri
        assert "skipped" in caplog.text

    def test_the_last_that_was_not_validated_is_better_than_none(self, run):
        found = select_checkpoint(run({10: 0.3, 20: None}, damaged=[10]), "best")
        assert found.global_step == 20
        assert found.why == "the last, because no validated checkpoint is intact"

    @pytest.mark.parametrize("choice", ["best", "last"])
    def test_without_a_whole_one_it_is_refused(self, run, choice):
        uri = run({10: 0.3}, damaged=[10])
        with pytest.raises(UserError, match="step-00000010 is damaged"):
            select_checkpoint(uri, choice)

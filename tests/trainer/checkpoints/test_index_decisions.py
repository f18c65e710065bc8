"""Tests when a checkpoint is due, which ones are kept, and which one is selected."""

from datetime import UTC, datetime, timedelta

import pytest

from flotilla.trainer import events, storage
from flotilla.trainer.checkpoints.index import (
    IndexEntry,
    Interval,
    Retention,
    SaveInterval,
    select_checkpoint,
)
from flotilla.trainer.config.main_metric import MainMetric
from flotilla.trainer.config.schema import TrainingConfig
from flotilla.trainer.runtime.errors import UserError
from tests.trainer.checkpoints.test_index import publish


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

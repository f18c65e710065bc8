"""Tests which checkpoints the evaluator skips, and which errors end it."""

import math

import pytest

from flotilla.trainer import storage
from flotilla.trainer.cluster.launcher import Job
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.training import evaluator
from flotilla.trainer.training.evaluator import evaluate_checkpoint
from tests.trainer.telemetry.test_tensorboard import scalars


@pytest.fixture
def uri(tmp_path):
    (tmp_path / "source").mkdir()
    published = storage.uri_of(tmp_path / "step-00000010")
    storage.publish(tmp_path / "source", published, kind="checkpoint", fields={"global_step": 10})
    return published


def measuring(outcome):
    def measure(_uri, _scratch):
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return measure


@pytest.mark.parametrize(("loss", "is_kept"), [(0.5, True), (math.nan, False), (math.inf, False)])
def test_metrics_that_are_not_finite_are_passed_over(uri, tmp_path, loss, is_kept):
    metrics = {"loss": loss, "accuracy": 1.0}
    expected = metrics if is_kept else {}
    assert evaluate_checkpoint(measuring(metrics), uri, tmp_path) == expected


def test_what_is_wrong_with_one_is_passed_over_and_with_all_of_them_ends_the_evaluator(
    uri, tmp_path, caplog
):
    assert evaluate_checkpoint(measuring(storage.Corrupt("a bit")), uri, tmp_path) == {}
    assert f"skipped {uri}: a bit" in caplog.text
    with pytest.raises(UserError, match="no room"):
        evaluate_checkpoint(measuring(UserError("no room")), uri, tmp_path)
    # The checkpoint has been deleted meanwhile.
    storage.delete(uri)
    assert evaluate_checkpoint(measuring(UserError("cannot fetch")), uri, tmp_path) == {}


def test_its_metrics_are_in_the_validation_of_the_run_for_tensorboard(uri, tmp_path, monkeypatch):
    checkpoints = tmp_path / "digits-1" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (tmp_path / "step-00000010").rename(checkpoints / "step-00000010")
    job = Job(
        config=parse_config({"training": {"steps": 10}}),
        dataset=uri,
        checkpoints=storage.uri_of(checkpoints),
        workdir=tmp_path / "evaluator-0",
    )
    monkeypatch.setattr(evaluator, "_measure", lambda _job: measuring({"loss": 0.5}))
    evaluator.watch(job)
    assert scalars(checkpoints / "logs") == [("digits-1/validation", 10, "loss", 0.5)]

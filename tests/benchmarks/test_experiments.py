"""The published experiments: their table is whole, and their numbers are those of the runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.experiments.measure import Measured, Run, measured
from benchmarks.experiments.programs import PROGRAMS
from benchmarks.experiments.rows import ROWS, accuracy_of, fallen, same_losses, synchronous
from benchmarks.experiments.table import page
from trainer.config.load import load_config

ROOT = Path(__file__).parents[2]
GOOD = Measured(
    accuracy=0.97,
    loss=2.28,
    first_loss=2.30,
    training_loss=2.29,
    last_loss=2.28,
    global_step=100,
    local_steps=300,
    steps_per_second=50.0,
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.program}: {row.goal}")
def test_runs_are_valid_and_pass_the_gate_only_where_the_goal_is_reached(row):
    assert row.program in PROGRAMS
    for run in row.runs:
        config = load_config(ROOT / run.config, run.settings)
        if "accuracy" in config.gate.min and not row.goal.startswith("none"):
            assert row.goal.startswith(str(config.gate.min["accuracy"]))


def test_every_configuration_of_an_experiment_is_run_and_described():
    configs = {run.config for row in ROWS for run in row.runs}
    assert configs == {f"configs/{path.name}" for path in ROOT.glob("configs/mnist_*.yaml")}
    written = (ROOT / "docs/experiments.md").read_text(encoding="utf-8")
    for row in ROWS:
        assert row.goal in written
        assert all(run.command() in written for run in row.runs)
    assert "**no**" not in written


@pytest.mark.parametrize(
    ("judge", "good", "bad"),
    [
        (accuracy_of(0.97), [GOOD], [replace(GOOD, accuracy=0.969)]),
        (synchronous(0.97, workers=3), [GOOD], [replace(GOOD, local_steps=299)]),
        (synchronous(0.97, workers=3), [GOOD], [replace(GOOD, accuracy=0.969)]),
        (fallen, [GOOD, replace(GOOD, loss=2.2999)], [GOOD, replace(GOOD, loss=2.3101)]),
        (same_losses, [GOOD, GOOD], [GOOD, GOOD, GOOD, replace(GOOD, loss=2.2802)]),
        (same_losses, [GOOD, GOOD], [GOOD, replace(GOOD, training_loss=2.2898)]),
    ],
)
def test_a_goal_that_is_missed_is_reported(judge, good, bad):
    assert judge(good).reached
    assert not judge(bad).reached


def test_the_page_has_a_row_for_each_finding():
    findings = [accuracy_of(0.97)([replace(GOOD, accuracy=0.9699)])] * len(ROWS)
    lines = [line for line in page(findings).splitlines() if "accuracy 0.9699" in line]
    assert len(lines) == len(ROWS)
    assert all(line.endswith("| **no** |") for line in lines)


@pytest.mark.cluster
@pytest.mark.long
def test_results_are_those_of_the_run_and_are_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    settings = ("training.strategy=sync_parameter_server", "training.steps=200", "gate.min={}")
    run = Run(config="configs/digits.yaml", settings=settings)
    found = measured(run, tmp_path)
    assert (found.global_step, found.local_steps) == (200, 400)
    assert 0.8 < found.accuracy <= 1
    assert found.loss < found.training_loss < found.first_loss
    assert measured(run, tmp_path) == found
    assert len(list((tmp_path / "runs").glob("digits-*"))) == 1

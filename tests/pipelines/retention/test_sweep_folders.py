"""The trials of a sweep are there as long as the sweep may go on with them."""

from __future__ import annotations

import fcntl
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pipelines.retention.inventory import read
from pipelines.retention.plan import planned, policy
from pipelines.sweeps.plan import SweepOptions
from pipelines.sweeps.plan import planned as trials_of
from tests.pipelines.retention.roots import age, manifest, run_of
from trainer import storage
from trainer.config.schema import Config
from trainer.sweeps.study import FILE, OLD_FILE, Study


@pytest.fixture
def root(tmp_path):
    return tmp_path / "root"


def going(root, workdir=Path()):
    uri = storage.uri_of(root)
    return [
        each.path
        for each in planned(read(uri, workdir), policy("30d", None), datetime.now(UTC)).going
    ]


def sweep_in(folder, root, days=90):
    """Lay out a sweep of which two trials have ended so many days ago; return its folder."""
    data = manifest(root / "datasets" / "d", "dataset", days)
    sweep = trials_of(SweepOptions(config=Config(), settings=["training.seed=1,2,3"]))
    # Without the time in their names.
    trials = tuple(replace(each, run_id=f"digits-{each.number:04}") for each in sweep.trials)
    for trial in trials[:2]:
        run_of(root, trial.number, days, data)
    at = folder / "sweep-1"
    at.mkdir(parents=True)
    Study(at, replace(sweep, sweep_id=at.name, trials=trials))
    (at / "lock").touch()
    age(folder, days)
    return at


def test_an_old_sweep_goes_with_its_trials(root):
    sweep_in(root, root)
    assert going(root) == ["sweep-1", "digits-0001", "digits-0002", "datasets/d"]


@pytest.mark.parametrize("is_in_workdir", [False, True])
@pytest.mark.parametrize("what", ["goes on", "was killed lately"])
def test_a_sweep_that_may_go_on_keeps_its_trials(root, tmp_path, what, is_in_workdir):
    workdir = tmp_path / "work" if is_in_workdir else root
    at = sweep_in(workdir, root)
    if what == "goes on":
        with (at / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            assert going(root, workdir) == []
    else:
        (at / FILE).touch()
        assert going(root, workdir) == []


def test_a_damaged_sweep_cannot_go_on_and_is_no_error(root):
    at = sweep_in(root, root)
    (at / FILE).write_text("{")
    age(at, 90)
    assert going(root) == ["sweep-1", "digits-0001", "digits-0002", "datasets/d"]


def test_a_sweep_of_an_earlier_version_goes_as_well(root):
    at = sweep_in(root, root)
    (at / FILE).rename(at / OLD_FILE)
    assert going(root) == ["sweep-1", "digits-0001", "digits-0002", "datasets/d"]


def test_the_trials_of_a_sweep_on_a_cluster_are_as_young_as_it(root):
    data = manifest(root / "datasets" / "d", "dataset", 90)
    for number, name in ((1, "sweep-1"), (2, "sweep-1-t01"), (3, "sweep-1-text")):
        run_of(root, number, 90, data)
        (root / f"digits-{number:04}").rename(root / name)
    (root / "sweep-1" / "trials").mkdir()
    (root / "sweep-1" / "trials" / "0001.json").write_text("{}")
    age(root / "sweep-1", 2)
    assert going(root) == ["sweep-1-text"]

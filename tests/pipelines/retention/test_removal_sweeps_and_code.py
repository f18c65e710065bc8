"""Tests that `flotilla gc` keeps sweeps with their trials, and code that is still needed."""

import fcntl
import json
import tempfile
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flotilla.components import in_use
from flotilla.pipelines.retention import make_plan, policy, removal
from flotilla.pipelines.retention.inventory import read
from flotilla.pipelines.sweeps import SweepOptions
from flotilla.pipelines.sweeps import plan_sweep as trials_of
from flotilla.trainer import code as bundle
from flotilla.trainer import storage
from flotilla.trainer.config.schema import Config
from flotilla.trainer.sweeps.study import FILE, OLD_FILE, Study
from tests.pipelines.retention.roots import (
    age,
    manifest,
    run_of,
    version_of,
)
from tests.trainer.code.referred import referred


@pytest.fixture
def root(tmp_path):
    return tmp_path / "root"


def going(root, workdir=Path()):
    uri = storage.uri_of(root)
    plan = make_plan(read(uri, workdir), policy("30d", None), datetime.now(UTC))
    return [each.path for each in plan.going]


def sweep_in(folder, root, days=90):
    """Write a sweep with two trials that ended some days ago; return its folder."""
    data = manifest(root / "datasets" / "d", "dataset", days)
    sweep = trials_of(SweepOptions(config=Config(), settings=["training.seed=1,2,3"]))
    # Use run IDs without a time, as `run_of` does.
    trials = tuple(replace(each, run_id=f"digits-{each.number:04}") for each in sweep.trials)
    for trial in trials[:2]:
        run_of(root, trial.number, days, data)
    at = folder / "sweep-1"
    at.mkdir(parents=True)
    Study(at, replace(sweep, sweep_id=at.name, trials=trials)).close()
    (at / "lock").touch()
    age(folder, days)
    return at


def test_an_old_sweep_goes_with_its_trials_unless_it_is_damaged(root):
    at = sweep_in(root, root)
    assert going(root) == ["sweep-1", "digits-0001", "digits-0002", "datasets/d"]
    state = (at / FILE).read_text()
    (at / FILE).write_text("{")
    age(at, 90)
    assert going(root) == []
    # A file with the name that an earlier version gave to sweeps may be from any tool.
    (at / FILE).write_text(state)
    (at / FILE).rename(at / OLD_FILE)
    age(at, 90)
    assert going(root) == ["digits-0001", "digits-0002", "datasets/d"]


@pytest.mark.parametrize("is_in_workdir", [False, True])
@pytest.mark.parametrize("what", ["goes on", "was killed lately"])
def test_a_sweep_that_may_go_on_keeps_its_trials(root, tmp_path, what, is_in_workdir):
    workdir = tmp_path / "work" if is_in_workdir else root
    at = sweep_in(workdir, root)
    with (at / "lock").open() as lock:
        if what == "goes on":
            fcntl.flock(lock, fcntl.LOCK_EX)
        else:
            (at / FILE).touch()
        assert going(root, workdir) == []


def test_the_trials_of_a_sweep_on_a_cluster_are_as_young_as_it(root):
    data = manifest(root / "datasets" / "d", "dataset", 90)
    for number, name in ((1, "sweep-1"), (2, "sweep-1-t01"), (3, "sweep-1-text")):
        run_of(root, number, 90, data, name)
    (root / "sweep-1" / "trials").mkdir()
    (root / "sweep-1" / "trials" / "0001.json").write_text("{}")
    age(root / "sweep-1", 2)
    assert going(root) == ["sweep-1-text"]


DIGESTS = [letter * 64 for letter in "abc"]


codes = st.sampled_from(DIGESTS)
days = st.sampled_from([1, 90])
happened = st.one_of(
    st.tuples(st.sampled_from(["run", "version", "note"]), codes, days),
    st.tuples(st.sampled_from(["schedule", "unschedule", "submit"]), codes, st.just(0)),
)


def swept_bundles(root: Path) -> list[str]:
    uri, wanted, gone = storage.uri_of(root), policy("30d", 1), []
    plan = make_plan(read(uri, Path()), wanted, datetime.now(UTC))
    removal.remove(uri, Path(), plan, wanted, lambda item: gone.append(item.path))
    return gone


def take_place(root: Path, history) -> set[str]:
    """Apply all events below a root; return the bundles that are still needed afterwards."""
    data = manifest(root / "datasets" / "d", "dataset", 1)
    at = {each: manifest(root / "code" / each, "code", 90) for each in DIGESTS}
    used, scheduled, champion = set(), set(), None
    for number, (what, code, old) in enumerate(history, 1):
        name = f"digits-{number:04d}"
        if what in ("run", "version"):
            made = run_of(root, number, old, data)
            bundle.note_run(storage.uri_of(root), name, at[code])
            age(root / name, old)
            used |= {code} if old == 1 else set()
            if what == "version":
                count = len(list((root / "registry" / "models" / "digits" / "versions").glob("*")))
                version_of(root, count + 1, old, made, code=at[code])
                champion = [*(champion or [])[-1:], code]
        elif what == "note":
            # The first step of this run was killed before it could write a record.
            bundle.note_run(storage.uri_of(root), name, at[code])
            used.add(code)
        elif what == "schedule":
            bundle.note_schedule(at[code], "nightly")
            scheduled.add(code)
        elif what == "unschedule":
            bundle.forget_schedule(at[code], "nightly")
            scheduled.discard(code)
        else:
            assert in_use.use(at[code])
            used.add(code)
    return used | scheduled | set(champion or ())


@settings(max_examples=12, deadline=None)
@given(st.lists(happened, max_size=6))
def test_what_is_referred_to_is_never_removed_and_all_else_is(history):
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "root")
        needed = take_place(root, history)
        swept_bundles(root)
        left = set(storage.names(storage.join(storage.uri_of(root), "code")))
        assert left == needed
        assert referred(storage.uri_of(root)) <= left


def test_a_damaged_note_of_a_schedule_keeps_all_code(tmp_path):
    manifest(tmp_path / "code" / DIGESTS[0], "code", 90)
    note = tmp_path / "code-of-schedules" / "nightly.json"
    note.parent.mkdir()
    note.write_text("{")
    plan = make_plan(read(storage.uri_of(tmp_path), Path()), policy("30d", None), datetime.now(UTC))
    assert not plan.going
    assert "nightly.json is damaged; all code is kept until you remove this file" in plan.remarks[0]
    note.write_text(json.dumps({"bundles": []}))
    assert swept_bundles(tmp_path) == [f"code/{DIGESTS[0]}"]


def test_what_was_used_long_ago_goes_whatever_the_fraction_of_its_second(tmp_path, monkeypatch):
    uri = manifest(tmp_path / "code" / DIGESTS[0], "code", 90)
    monkeypatch.setattr(in_use.time, "time", lambda: 1700000000.4470134)
    assert in_use.use(uri)
    monkeypatch.undo()
    assert swept_bundles(tmp_path) == [f"code/{DIGESTS[0]}"]

"""Runs with faults, on this machine and on each engine of the fake cluster."""

import pytest

from tests.chaos.__main__ import main

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]

NOTHING = ", 0 lost, 0 unclear, 0 torn, 0 wrongly green, 0 inexact, 0 left, "

# These seeds include kills of a pair and of a server, a damaged file, exit code 0, and a store
# outage.
SEEDS = (4, 11, 17)


@pytest.mark.parametrize(
    "seed", [SEEDS[0], *(pytest.param(seed, marks=pytest.mark.long) for seed in SEEDS[1:])]
)
def test_the_invariants_hold(tmp_path, capsys, seed):
    code = main(["--runs", "1", "--seed", str(seed), "--folder", str(tmp_path)])
    output = capsys.readouterr().out
    assert code == 0, output
    assert NOTHING in output.splitlines()[-1]


# These seeds include a cancel, a killed launcher, a suspension, and deletions, evictions and a
# preemption of pods of the chief, servers and workers.
JOB_SEEDS = (5, 2, 16)


@pytest.mark.long
@pytest.mark.parametrize("seed", JOB_SEEDS)
@pytest.mark.parametrize("engine", ["tfjob", "jobset"])
def test_the_invariants_hold_on_an_engine(tmp_path, capsys, engine, seed):
    options = ["--on", engine, "--runs", "1", "--seed", str(seed), "--folder", str(tmp_path)]
    code = main(options)
    output = capsys.readouterr().out
    assert code == 0, output
    assert NOTHING in output.splitlines()[-1]


# These seeds include kills of the chief and of a server together with a worker, a pause, and a
# damaged checkpoint.
TABLE_SEEDS = (1, 2, 3)


@pytest.mark.long
@pytest.mark.parametrize("seed", TABLE_SEEDS)
def test_the_invariants_hold_of_tables(tmp_path, capsys, seed):
    code = main(["--on", "tables", "--runs", "1", "--seed", str(seed), "--folder", str(tmp_path)])
    output = capsys.readouterr().out
    assert code == 0, output
    assert NOTHING in output.splitlines()[-1]

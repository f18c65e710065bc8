"""Runs with faults, on this machine and on each engine of the fake cluster."""

import pytest

from tests.chaos.__main__ import main

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]

NOTHING = ", 0 lost, 0 unclear, 0 torn, 0 wrongly green, 0 inexact, 0 left, "


def assert_that_the_invariants_hold(tmp_path, capsys, *options):
    code = main([*options, "--runs", "1", "--folder", str(tmp_path)])
    output = capsys.readouterr().out
    assert code == 0, output
    assert NOTHING in output.splitlines()[-1]


# These seeds include kills of a pair and of a server, a damaged file, exit code 0, and a store
# outage.
SEEDS = (4, 11, 17)


@pytest.mark.parametrize(
    "seed", [SEEDS[0], *(pytest.param(seed, marks=pytest.mark.long) for seed in SEEDS[1:])]
)
def test_the_invariants_hold(tmp_path, capsys, seed):
    assert_that_the_invariants_hold(tmp_path, capsys, "--seed", str(seed))


# The seeds of jobs include a cancel, a killed launcher, a suspension, and deletions, evictions and
# a preemption of pods of the chief, servers and workers. The seeds of tables include kills of the
# chief and of a server together with a worker, a pause, and a damaged checkpoint.
@pytest.mark.long
@pytest.mark.parametrize(
    ("where", "seed"),
    [
        *((engine, seed) for engine in ("tfjob", "jobset") for seed in (5, 2, 16)),
        *(("tables", seed) for seed in (1, 2, 3)),
    ],
)
def test_the_invariants_hold_on_an_engine_and_of_tables(tmp_path, capsys, where, seed):
    assert_that_the_invariants_hold(tmp_path, capsys, "--on", where, "--seed", str(seed))

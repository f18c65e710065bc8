"""Tests synchronous updates on parameter servers: exact, with backup workers, and after losses."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from flotilla.trainer.config.topology import Task
from flotilla.trainer.strategies.async_parameter_server import LONG_RUN
from tests.cluster.problems import FAILURE
from tests.cluster.servers import CHIEF, Leading, Outcome, Servers, Trial, serving

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

BATCH = 8
NEAR = 1e-5
SLOW_STEPS = 50
# A long run unrolls its steps in a graph, even if only a few steps remain.
IN_TURNS = pytest.mark.parametrize("steps", [LONG_RUN, 100], ids=["in turns", "one by one"])


def trial(
    problem: str,
    runs: list[int],
    *,
    workers: int = 2,
    needed: int = 0,
    steps: int = LONG_RUN,
    **arguments: Any,
) -> Trial:
    training = {"strategy": "sync_parameter_server", "batch_size": BATCH, "steps": steps}
    config = {
        "training": {**training, "replicas_to_aggregate": needed},
        "cluster": {"workers": workers},
    }
    return Trial(config, f"tests.cluster.{problem}", runs, arguments)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Callable[..., Outcome]:
    def outcome(problem: str, runs: list[int], **arguments: Any) -> Outcome:
        config = {"training": {"strategy": "single"}}
        with serving(tmp_path_factory.mktemp("single")) as nothing:
            return nothing.lead(Trial(config, f"tests.cluster.{problem}", runs, arguments))

    return outcome


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory) -> Iterator[Servers]:
    with serving(tmp_path_factory.mktemp("two"), ps=2, workers=2) as servers:
        yield servers


@pytest.fixture(scope="module")
def three_workers(tmp_path_factory) -> Iterator[Servers]:
    with serving(tmp_path_factory.mktemp("three"), ps=1, workers=3) as servers:
        yield servers


def local_steps(report: dict[str, Any]) -> dict[str, int]:
    workers = report["metrics"]["workers"]
    for each in workers.values():
        assert each["examples"] == BATCH * each["local_steps"]
    return {name: each["local_steps"] for name, each in workers.items()}


def assert_adds_up(outcome: Outcome, runs: list[int], needed: int) -> None:
    """Check that every update used exactly `needed` gradients, and that all others were dropped."""
    assert [r["global_step"] for r in outcome.reports] == np.cumsum(runs).tolist()
    assert outcome.variables["global_step"] == outcome.global_step == sum(runs)
    for report in outcome.reports:
        taken = needed * report["global_step"]
        assert sum(local_steps(report).values()) == taken + report["metrics"]["dropped_gradients"]


def failure(leading: Leading, servers: Servers) -> str:
    assert leading.process.wait() != 0
    return (servers.folder / str(CHIEF) / "log.txt").read_text(encoding="utf-8")


@IN_TURNS
def test_equal_gradients_move_exactly_as_one_process(alone, two_workers, steps):
    # Run lengths: more than a turn, a whole number of turns, and less than a turn.
    runs = [17, 20, 3]
    outcome = two_workers.lead(trial("problems:equal", runs, steps=steps))
    single = alone("problems:equal", runs)
    assert outcome.variables == single.variables
    np.testing.assert_allclose(
        [r["loss"] for r in outcome.reports], [r["loss"] for r in single.reports], rtol=1e-6
    )
    assert_adds_up(outcome, runs, needed=2)
    assert local_steps(outcome.reports[-1]) == {"worker-0": sum(runs), "worker-1": sum(runs)}


def test_each_worker_computes_its_own_gradients(two_workers):
    known = two_workers.lead(trial("problems:equal", [4])).reports
    found = two_workers.lead(trial("problems:located", [4])).reports
    # Half of the losses are from worker 1, whose losses are larger by 100.
    assert found[-1]["loss"] == pytest.approx(known[-1]["loss"] + 50, abs=1e-3)


@pytest.mark.parametrize(
    "problem", ["problems:clipped", pytest.param("problems:embedded", marks=pytest.mark.long)]
)
def test_the_mean_of_two_equals_one_process_with_twice_the_batch(alone, two_workers, problem):
    runs = [7, 13]
    outcome = two_workers.lead(trial(problem, runs, batch_size=BATCH, workers=2))
    single = alone(problem, runs, batch_size=2 * BATCH, workers=1)
    assert len(set(outcome.devices.values())) == 2
    for path, value in single.variables.items():
        np.testing.assert_allclose(outcome.variables[path], value, rtol=0, atol=NEAR, err_msg=path)
    np.testing.assert_allclose(
        [r["loss"] for r in outcome.reports], [r["loss"] for r in single.reports], atol=NEAR
    )


def slowed(needed: int, runs: list[int]) -> Trial:
    uneven = {"worker": 2, "times": 20, "microseconds": 10_000}
    return trial("problems:slowed", runs, workers=3, needed=needed, **uneven)


@pytest.mark.long
def test_a_slow_worker_holds_nobody_up_where_two_of_three_are_enough(three_workers):
    runs = [25] * 60
    waiting = three_workers.lead(slowed(needed=3, runs=[SLOW_STEPS]))
    assert local_steps(waiting.reports[-1])["worker-2"] == waiting.global_step == SLOW_STEPS
    ahead = three_workers.lead(slowed(needed=2, runs=runs))
    assert_adds_up(ahead, runs, needed=2)
    # The limit is measured in steps of the slow worker, not in time.
    slow = local_steps(ahead.reports[-1])["worker-2"]
    assert slow > 0
    assert ahead.global_step / slow >= 5 * waiting.global_step / SLOW_STEPS
    dropped = [report["metrics"]["dropped_gradients"] for report in ahead.reports]
    assert dropped[-1] > 0
    assert all(before <= after for before, after in pairwise(dropped))


def test_updates_go_on_without_a_worker_that_died(tmp_path):
    runs = [20, 400, 20]
    with serving(tmp_path, ps=1, workers=2) as servers:
        leading = servers.start_lead(trial("problems:equal", runs, needed=1))
        leading.next()
        servers.kill(Task(role="worker", index=1))
        assert_adds_up(leading.outcome(), runs, needed=1)


@pytest.mark.long
@IN_TURNS
def test_updates_wait_for_a_worker_that_they_cannot_do_without(tmp_path, steps):
    runs = [20, 400, 20]
    worker = Task(role="worker", index=1)
    with serving(tmp_path, ps=1, workers=2) as servers:
        leading = servers.start_lead(trial("problems:equal", runs, steps=steps))
        leading.next()
        servers.kill(worker)
        servers.start(worker)
        assert_adds_up(leading.outcome(), runs, needed=2)


@pytest.mark.long
def test_a_chief_on_the_servers_of_a_dead_one_computes_as_if_they_were_new(two_workers):
    runs = [20, 1000, 20]
    undisturbed = two_workers.lead(trial("problems:equal", runs))
    dying = two_workers.start_lead(trial("problems:equal", runs))
    dying.next()
    two_workers.kill(CHIEF)
    again = two_workers.lead(trial("problems:equal", runs))
    assert (again.reports, again.variables) == (undisturbed.reports, undisturbed.variables)


def test_a_worker_that_fails_for_good_ends_the_run_with_its_error(two_workers):
    leading = two_workers.start_lead(trial("problems:failing", [20, 400], worker=1, after=50))
    leading.next()
    assert FAILURE in failure(leading, two_workers)


def test_a_dead_parameter_server_ends_the_run(tmp_path):
    with serving(tmp_path, ps=2, workers=2) as servers:
        leading = servers.start_lead(trial("problems:equal", [20, 100_000]))
        leading.next()
        servers.kill(Task(role="ps", index=1))
        assert "UnavailableError" in failure(leading, servers)

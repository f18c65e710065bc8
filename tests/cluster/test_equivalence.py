"""Strategies that compute the same come to the same weights: SGD, fixed seeds, fixed order."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tests.cluster.servers import Outcome, Servers, Trial, serving
from trainer.strategies.turns import LONG_RUN, TURN
from trainer.topology import Task

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

BATCH = 8
RUNS = [7, 13]
NEAR = 1e-5
# Standardized labels with weights of examples, and two outputs with weights of losses.
TASKS = ["regressed", "two_outputs"]


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


def long(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.long)


def trial(strategy: str, problem: str, *, batch_size: int, workers: int, **cluster) -> Trial:
    config = {"training": {"strategy": strategy}, "cluster": {"workers": workers, **cluster}}
    arguments = {"batch_size": batch_size, "workers": workers}
    return Trial(config, f"tests.cluster.stateful:{problem}", RUNS, arguments)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Callable[[str], Outcome]:
    """`single` with the batch of two workers, once for each problem."""
    known: dict[str, Outcome] = {}

    def outcome(problem: str) -> Outcome:
        if problem not in known:
            with serving(tmp_path_factory.mktemp("single")) as nothing:
                known[problem] = nothing.lead(
                    trial("single", problem, batch_size=2 * BATCH, workers=1)
                )
        return known[problem]

    return outcome


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory) -> Iterator[Servers]:
    """One parameter server and two workers."""
    with serving(tmp_path_factory.mktemp("two"), ps=1, workers=2) as servers:
        yield servers


@pytest.fixture(scope="module")
def one_worker(tmp_path_factory) -> Iterator[Servers]:
    """Two parameter servers and one worker."""
    with serving(tmp_path_factory.mktemp("one"), ps=2, workers=1) as servers:
        yield servers


def side_by_side(servers: Servers, wanted: Trial) -> list[Outcome]:
    workers = range(servers.cluster.count("worker"))
    leading = [servers.start_lead(wanted, Task(role="worker", index=index)) for index in workers]
    return [each.outcome() for each in leading]


def assert_same(outcome: Outcome, other: Outcome, steps: int = sum(RUNS)) -> None:
    losses, others = ([report["loss"] for report in each.reports] for each in (outcome, other))
    np.testing.assert_allclose(losses, others, rtol=0, atol=NEAR)
    assert outcome.global_step == other.global_step == steps
    assert set(outcome.variables) == set(other.variables)
    for path, value in other.variables.items():
        np.testing.assert_allclose(outcome.variables[path], value, rtol=0, atol=NEAR, err_msg=path)


# The weights of a loss are those of the synchronous servers, which the tests below have.
@pytest.mark.parametrize(
    "problem",
    ["stepped", "sharded", *map(long, ["clipped", *TASKS, "embedded", "computed"])],
)
def test_two_mirrored_workers_equal_one_process_with_twice_the_batch(alone, tmp_path, problem):
    with serving(tmp_path, workers=2, chief=False) as servers:
        wanted = trial("multi_worker_mirrored", problem, batch_size=BATCH, workers=2)
        both = side_by_side(servers, wanted)
    for outcome in both:
        assert_same(outcome, alone(problem))


@pytest.mark.parametrize("problem", ["clipped", *map(long, [*TASKS, "embedded", "computed"])])
def test_two_workers_in_a_graph_equal_one_process_with_twice_the_batch(alone, two_workers, problem):
    outcome = two_workers.lead(trial("in_graph", problem, batch_size=BATCH, workers=2))
    assert_same(outcome, alone(problem))


@pytest.mark.parametrize("problem", TASKS)
def test_a_synchronous_update_of_two_workers_equals_one_process_with_twice_the_batch(
    alone, two_workers, problem
):
    outcome = two_workers.lead(trial("sync_parameter_server", problem, batch_size=BATCH, workers=2))
    assert_same(outcome, alone(problem))


@pytest.mark.parametrize("problem", [slow("clipped"), "embedded", long("computed")])
def test_one_asynchronous_worker_equals_one_process(alone, one_worker, problem):
    wanted = trial("async_parameter_server", problem, batch_size=2 * BATCH, workers=1)
    assert_same(one_worker.lead(wanted), alone(problem))


@pytest.mark.long
@pytest.mark.parametrize(("problem", "pull_every"), [("clipped", 1), ("normed", 1), ("clipped", 3)])
def test_turns_of_a_long_run_change_nothing(one_worker, problem, pull_every):
    # Several turns, and some updates one by one.
    updates = 4 * TURN + 3

    def outcome(steps: int) -> Outcome:
        training = {
            "strategy": "async_parameter_server",
            "steps": steps,
            "pull_every": pull_every,
        }
        config = {"training": training, "cluster": {"workers": 1}}
        wanted = Trial(config, f"tests.cluster.stateful:{problem}", [updates], {"workers": 1})
        return one_worker.lead(wanted)

    assert_same(outcome(LONG_RUN), outcome(LONG_RUN - 1), steps=updates)


@pytest.mark.parametrize("strategy", ["async_parameter_server", slow("in_graph")])
def test_it_does_not_matter_on_which_servers_the_variables_stand(alone, one_worker, strategy):
    problem = "clipped"
    spread = {"parameter_servers": 2, "placement": {"*/dense/*": "ps:1", "*": "ps:0"}}
    outcome = one_worker.lead(trial(strategy, problem, batch_size=2 * BATCH, workers=1, **spread))
    devices = {
        path.split("/")[2]: device
        for path, device in outcome.devices.items()
        if path.startswith("model/")
    }
    assert {name: device.split("/")[3] for name, device in devices.items()} == {
        "dense": "task:1",
        "dense_1": "task:0",
        "idle": "task:0",
    }
    assert_same(outcome, alone(problem))


@pytest.mark.parametrize("problem", [slow("clipped"), "embedded", "computed"])
def test_two_devices_of_one_process_equal_one_with_twice_the_batch(alone, tmp_path, problem):
    config = {"training": {"strategy": "tests.cluster.two_devices:TwoDevices"}}
    arguments = {"problem": problem, "batch_size": 2 * BATCH, "workers": 1}
    with serving(tmp_path) as nothing:
        outcome = nothing.lead(Trial(config, "tests.cluster.stateful:halved", RUNS, arguments))
    assert_same(outcome, alone(problem))


def test_replicas_share_moving_averages_and_not_the_units_that_they_drop(tmp_path):
    config = {"training": {"strategy": "multi_worker_mirrored"}, "cluster": {"workers": 2}}
    wanted = Trial(config, "tests.cluster.stateful:dropped", RUNS)
    with serving(tmp_path, workers=2, chief=False) as servers:
        first, second = (each.variables for each in side_by_side(servers, wanted))
    different = {path for path in first if first[path] != second[path]}
    (seed,) = different
    assert seed.endswith("seed_generator_state")
    # As many draws on each, from seeds of their own; the first worker, which saves, has the given.
    assert np.subtract(second[seed], first[seed]).tolist() == [1, 0]
    (moving_mean,) = (path for path in first if path.endswith("moving_mean"))
    inputs = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")
    expected = (inputs.mean(axis=0) + 0.5) * (1 - 0.99 ** sum(RUNS))
    np.testing.assert_allclose(first[moving_mean], expected, rtol=0, atol=NEAR)

"""Workers with two devices, played by parts of the processor: one gradient, one push."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tests.cluster.servers import Outcome, Servers, Trial, serving

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

BATCH = 8
RUNS = [7, 13]
NEAR = 1e-5


def long(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.long)


def trial(strategy: str, problem: str, *, workers: int = 1, **training: object) -> Trial:
    """The batches of a problem in halves: a device takes one of them."""
    config = {
        "training": {"strategy": strategy, "batch_size": BATCH, **training},
        "cluster": {"workers": workers},
    }
    arguments = {"problem": problem, "batch_size": 2 * BATCH, "workers": workers}
    return Trial(config, "tests.cluster.stateful:halved", RUNS, arguments)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Callable[[str], Outcome]:
    """`single` with the batch of two devices, once for each problem."""
    known: dict[str, Outcome] = {}

    def outcome(problem: str) -> Outcome:
        if problem not in known:
            arguments = {"batch_size": 2 * BATCH, "workers": 1}
            config = {"training": {"strategy": "single"}}
            whole = Trial(config, f"tests.cluster.stateful:{problem}", RUNS, arguments)
            with serving(tmp_path_factory.mktemp("single")) as nothing:
                known[problem] = nothing.lead(whole)
        return known[problem]

    return outcome


@pytest.fixture(scope="module")
def two_devices(tmp_path_factory) -> Iterator[Servers]:
    with serving(tmp_path_factory.mktemp("two"), ps=2, workers=1, devices=2) as servers:
        yield servers


def assert_same(outcome: Outcome, other: Outcome) -> None:
    losses, others = ([report["loss"] for report in each.reports] for each in (outcome, other))
    np.testing.assert_allclose(losses, others, rtol=0, atol=NEAR)
    assert outcome.global_step == other.global_step == sum(RUNS)
    assert set(outcome.variables) == set(other.variables)
    for path, value in other.variables.items():
        np.testing.assert_allclose(outcome.variables[path], value, rtol=0, atol=NEAR, err_msg=path)


@pytest.mark.parametrize(
    ("strategy", "problem"),
    [
        long("async_parameter_server", "clipped"),
        long("async_parameter_server", "embedded"),
        long("sync_parameter_server", "clipped"),
        long("sync_parameter_server", "embedded"),
        ("in_graph", "clipped"),
        long("in_graph", "embedded"),
    ],
)
def test_two_devices_of_a_worker_equal_one_with_twice_the_batch(
    alone, two_devices, strategy, problem
):
    outcome = two_devices.lead(trial(strategy, problem))
    assert_same(outcome, alone(problem))
    workers = outcome.reports[-1]["metrics"]["workers"]
    steps = sum(RUNS)
    assert workers == {"worker-0": {"local_steps": steps, "examples": steps * 2 * BATCH}}


def test_gpus_that_tensorflow_finds_are_towers_and_no_replicas(alone, two_devices):
    assert_same(
        two_devices.lead(trial("tests.cluster.two_gpus:TwoGpus", "clipped")), alone("clipped")
    )

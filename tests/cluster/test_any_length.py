"""Batches of any length: every strategy comes to the weights of one process."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.cluster.servers import Outcome, Servers, Trial, serving
from trainer.topology import Task

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

STEPS = 12
PROBLEM = "tests.cluster.any_length:sequences"


def trial(strategy: str, workers: int) -> Trial:
    config = {"training": {"strategy": strategy}, "cluster": {"workers": workers}}
    return Trial(config, PROBLEM, [STEPS])


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Outcome:
    with serving(tmp_path_factory.mktemp("single")) as nothing:
        return nothing.lead(trial("single", 1))


@pytest.fixture(scope="module")
def servers(tmp_path_factory) -> Iterator[Servers]:
    with serving(tmp_path_factory.mktemp("two"), ps=1, workers=2) as found:
        yield found


def assert_same(outcome: Outcome, alone: Outcome) -> None:
    assert outcome.global_step == STEPS
    assert outcome.reports[-1]["loss"] == pytest.approx(alone.reports[-1]["loss"], abs=1e-5)
    for path, value in alone.variables.items():
        np.testing.assert_allclose(outcome.variables[path], value, atol=1e-5, err_msg=path)


@pytest.mark.parametrize(
    "strategy", [pytest.param("in_graph", marks=pytest.mark.long), "sync_parameter_server"]
)
def test_two_workers_on_the_same_batches(alone, servers, strategy):
    assert_same(servers.lead(trial(strategy, 2)), alone)


@pytest.mark.long
def test_one_asynchronous_worker(alone, tmp_path):
    with serving(tmp_path, ps=1, workers=1) as one:
        assert_same(one.lead(trial("async_parameter_server", 1)), alone)


def test_two_mirrored_workers_on_the_same_batches(alone, tmp_path):
    with serving(tmp_path, workers=2, chief=False) as both:
        tasks = [Task(role="worker", index=index) for index in range(2)]
        leading = [both.start_lead(trial("multi_worker_mirrored", 2), task) for task in tasks]
        for each in leading:
            assert_same(each.outcome(), alone)

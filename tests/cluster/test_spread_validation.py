"""What is measured in parts on the workers is what one process measures."""

from __future__ import annotations

import pytest

from tests.cluster.servers import Outcome, Servers, Trial, serving
from trainer.topology import Task

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

RUNS = [3]
EXAMPLES = 23
# One part on each of two workers, or both on one of them; see `problems.measured`.
ON_WORKERS = {2, 11, 20}


def trial(strategy: str, workers: int = 2) -> Trial:
    config = {"training": {"strategy": strategy}, "cluster": {"workers": workers}}
    return Trial(config, "tests.cluster.problems:measured", RUNS, measured=True)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Outcome:
    folder = tmp_path_factory.mktemp("single")
    (folder / "chief-0").mkdir()
    (folder / "chief-0" / "number.txt").write_text("0", encoding="utf-8")
    with serving(folder) as nothing:
        return nothing.lead(trial("single"))


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("two"), ps=2, workers=2) as servers:
        yield servers


def assert_same(outcome: Outcome, alone: Outcome) -> None:
    count, loss, hits, *_ = alone.totals
    assert count == EXAMPLES
    assert outcome.totals[:4] == [EXAMPLES, pytest.approx(loss, rel=1e-6), hits, EXAMPLES]


@pytest.mark.parametrize(
    "strategy", [pytest.param("in_graph", marks=pytest.mark.long), "sync_parameter_server"]
)
def test_workers_of_a_chief_measure_a_part_each(alone, two_workers: Servers, strategy):
    outcome = two_workers.lead(trial(strategy))
    assert_same(outcome, alone)
    assert outcome.totals[-1] in ON_WORKERS


def test_asynchronous_workers_measure_what_the_servers_hold(alone, tmp_path):
    with serving(tmp_path, ps=1, workers=1) as servers:
        assert_same(servers.lead(trial("async_parameter_server", workers=1)), alone)


def test_mirrored_workers_measure_a_part_each_and_know_the_whole(alone, tmp_path):
    with serving(tmp_path, workers=2, chief=False) as servers:
        tasks = [Task(role="worker", index=index) for index in range(2)]
        leading = [servers.start_lead(trial("multi_worker_mirrored"), task) for task in tasks]
        for each in leading:
            outcome = each.outcome()
            assert_same(outcome, alone)
            assert outcome.totals[-1] == 11

"""Every example of an epoch once, whatever was killed, counted in the weights themselves."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tests.cluster import visited
from tests.cluster.launched import Launched, launched
from tests.cluster.servers import Trial, serving
from trainer.config.schema import STRATEGIES
from trainer.events import AttemptBegin, Restart
from trainer.strategies.turns import MAX_PORTION

pytestmark = pytest.mark.cluster

ASYNC, SYNC = "async_parameter_server", "sync_parameter_server"
# From one kill to the next.
STEPS = 400
KILLED = ("worker-0", "chief-0", "ps-0", "worker-1")


@pytest.fixture(scope="module")
def numbers(tmp_path_factory) -> str:
    return visited.published(tmp_path_factory.mktemp("numbers"))


def require_once(run: Launched, batches: int, *, lost: int = 0) -> None:
    """Check weights against position and batches: an example is repeated only where its update is.

    After each of `lost` kills of a worker, a portion of `MAX_PORTION` updates at most runs again.
    The worker may have died after it had pushed a gradient and before it counted the update.
    """
    seen, fields = visited.visits(run.checkpoints)
    position = fields["input_position"]
    gaps = sum(count for _, count in position["gaps"])
    more = int(seen.sum()) - (position["visited"] - gaps)
    assert 0 <= more <= lost * MAX_PORTION * visited.BATCH
    assert 0 <= int(seen.sum()) - batches * visited.BATCH <= lost * visited.BATCH
    least, most = (
        position["visited"] // visited.EXAMPLES,
        -(-position["visited"] // visited.EXAMPLES),
    )
    # What is visited next is missing here, and nothing else.
    assert np.maximum(least - seen, 0).sum() <= gaps
    assert np.maximum(seen - most, 0).sum() <= more


# How many batches make an update of two workers, and of three.
AVERAGED = {
    "single": (1, 1),
    ASYNC: (1, 1),
    SYNC: (2, 2),
    "in_graph": (2, 3),
    "multi_worker_mirrored": (2, 3),
}


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(each, marks=pytest.mark.slow if each == SYNC else pytest.mark.long)
        for each in STRATEGIES
    ],
)
def test_epochs_go_on_with_another_number_of_workers(numbers, tmp_path, strategy):
    steps, batches = 0, 0
    for more, workers, averaged in zip((100, 110), (2, 3), AVERAGED[strategy], strict=True):
        steps, batches = steps + more, batches + more * averaged
        config = visited.settings(
            strategy,
            steps,
            averaged,
            # The third worker of three is a backup: its gradients are dropped.
            training={"replicas_to_aggregate": 2 if strategy == SYNC else 0},
            cluster={"workers": workers},
        )
        with launched(config, numbers, tmp_path) as run:
            code, said = run.end()
        assert code == 0, said
        require_once(run, batches)
    assert run.history()[-1]["epoch"] == batches * visited.BATCH / visited.EXAMPLES


@pytest.mark.slow
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.long), 3])
def test_disjoint_shards_are_dealt_anew_to_another_number_of_workers(numbers, tmp_path, workers):
    for steps, count in ((40, 2), (80, workers)):
        named = {"data": {"partition": "disjoint"}, "cluster": {"workers": count}}
        with launched(visited.settings(ASYNC, steps, **named), numbers, tmp_path) as run:
            code, said = run.end()
        assert code == 0, said
    seen, fields = visited.visits(run.checkpoints)
    assert fields["global_step"] == 80
    assert seen.sum() == 80 * visited.BATCH
    assert "input_position" not in fields


def killed(numbers: str, folder: Any, strategy: str, names: list[str]) -> Launched:
    """Kill tasks one after the other, each when it is back and some steps later."""
    draw = random.Random(len(names))
    config = visited.settings(
        strategy,
        STEPS * (len(names) + 1),
        AVERAGED[strategy][0],
        training={"checkpoint_every": 50},
        cluster={"max_restarts": 50},
    )
    with launched(config, numbers, folder) as run:
        for number, name in enumerate(names):
            run.wait_for_step(STEPS * number + draw.randint(1, STEPS))
            run.kill(name)
            run.wait_for(lambda e: isinstance(e, Restart) and e.task == name)  # noqa: B023
        code, said = run.end()
    assert code == 0, said
    return run


@pytest.mark.parametrize(
    ("strategy", "names"),
    [
        pytest.param(ASYNC, ["worker-1", "chief-0"], marks=pytest.mark.slow),
        pytest.param(ASYNC, ["ps-0", "worker-0", "chief-0"], marks=pytest.mark.long),
        pytest.param(SYNC, ["worker-1", "chief-0", "ps-0"], marks=pytest.mark.long),
    ],
)
def test_each_example_is_visited_once_whatever_was_killed(numbers, tmp_path, strategy, names):
    run = killed(numbers, tmp_path, strategy, names)
    assert len(run.events(AttemptBegin)) >= 2
    require_kept(run, strategy, names)


@pytest.mark.long
@pytest.mark.parametrize("strategy", [ASYNC, SYNC])
def test_each_example_is_visited_once_after_twenty_random_kills(numbers, tmp_path, strategy):
    names = random.Random(19).choices(KILLED, k=20)
    run = killed(numbers, tmp_path, strategy, names)
    require_kept(run, strategy, names)


def require_kept(run: Launched, strategy: str, names: list[str]) -> None:
    """Check visits after kills; synchronously a killed worker costs no update."""
    lost = sum(name.startswith("worker") for name in names) if strategy == ASYNC else 0
    require_once(run, run.newest() * AVERAGED[strategy][0], lost=lost)


# Times that a slow worker takes for a step of the others.
SLOWER = 4


@pytest.mark.long
def test_a_worker_that_is_four_times_slower_takes_a_quarter(tmp_path):
    config = {"training": {"strategy": ASYNC, "batch_size": 8}, "cluster": {"workers": 2}}
    # Long enough that what else a step costs counts for little.
    uneven = {"worker": 1, "times": SLOWER, "microseconds": 200_000}
    trial = Trial(config, "tests.cluster.uneven:lent", [10, 100], uneven)
    with serving(tmp_path, ps=1, workers=2) as servers:
        both = [steps_of(report) for report in servers.lead(trial).reports]
    fast, slow = (both[1][name] - both[0][name] for name in ("worker-0", "worker-1"))
    assert fast + slow == 100
    assert SLOWER - 1 <= fast / slow <= SLOWER + 1


def steps_of(report: dict[str, Any]) -> dict[str, int]:
    """Return the steps of each worker so far."""
    return {name: each["local_steps"] for name, each in report["metrics"]["workers"].items()}

"""Every example of an epoch once, whatever was killed, counted in the weights themselves."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tests.cluster import visited
from tests.cluster.launched import Launched, launched
from trainer.config.schema import STRATEGIES
from trainer.events import AttemptBegin, Progress

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

ASYNC, SYNC = "async_parameter_server", "sync_parameter_server"
# 16,000 visits: 16 epochs.
STEPS = 1000
KILLED = ("worker-0", "chief-0", "ps-0", "worker-1")


@pytest.fixture(scope="module")
def numbers(tmp_path_factory) -> str:
    return visited.published(tmp_path_factory.mktemp("numbers"))


def require_once(run: Launched, *, repeated: int = 0) -> None:
    """Check weights against position; `repeated` updates may count twice, with their examples."""
    seen, fields = visited.visits(run.checkpoints)
    position = fields["input_position"]
    gaps = sum(count for _, count in position["gaps"])
    more = int(seen.sum()) - (position["visited"] - gaps)
    assert 0 <= more <= repeated * visited.BATCH
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
    [each if each == SYNC else pytest.param(each, marks=pytest.mark.long) for each in STRATEGIES],
)
def test_epochs_go_on_with_another_number_of_workers(numbers, tmp_path, strategy):
    for steps, workers, averaged in zip((100, 210), (2, 3), AVERAGED[strategy], strict=True):
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
        require_once(run)
    batches = sum(n * each for n, each in zip((100, 110), AVERAGED[strategy], strict=True))
    assert run.history()[-1]["epoch"] == batches * visited.BATCH / visited.EXAMPLES


@pytest.mark.parametrize("workers", [1, 3])
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


def killed(numbers: str, folder: Any, strategy: str, names: list[str], steps: int) -> Launched:
    """Kill tasks one after the other, each after some more steps."""
    config = visited.settings(
        strategy,
        steps,
        AVERAGED[strategy][0],
        training={"checkpoint_every": 50},
        cluster={"max_restarts": 50},
    )
    with launched(config, numbers, folder) as run:
        for name in names:
            seen = len(run.events(Progress))
            run.wait_for(lambda e: isinstance(e, Progress))
            assert len(run.events(Progress)) > seen
            run.kill(name)
        code, said = run.end()
    assert code == 0, said
    return run


@pytest.mark.parametrize("strategy", [ASYNC, pytest.param(SYNC, marks=pytest.mark.long)])
def test_each_example_is_visited_once_after_three_kills(numbers, tmp_path, strategy):
    run = killed(numbers, tmp_path, strategy, ["worker-1", "chief-0", "ps-0"], STEPS)
    assert len(run.events(AttemptBegin)) >= 2
    require_once(run, repeated=100 if strategy == ASYNC else 0)


@pytest.mark.long
@pytest.mark.parametrize("strategy", [ASYNC, SYNC])
def test_each_example_is_visited_once_after_twenty_random_kills(numbers, tmp_path, strategy):
    names = random.Random(19).choices(KILLED, k=20)
    run = killed(numbers, tmp_path, strategy, names, 20 * STEPS)
    lost = sum(name.startswith("worker") for name in names)
    require_once(run, repeated=100 * lost if strategy == ASYNC else 0)

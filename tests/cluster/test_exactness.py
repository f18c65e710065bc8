"""Every strategy counts exactly, and goes on from the checkpoint of every other one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.launched import Launched, launched
from trainer import storage
from trainer.checkpoints.index import newest_checkpoint
from trainer.config.schema import STRATEGIES
from trainer.events import AttemptBegin

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

STEPS = 1000
# The others are processes of their own by nature, or one process.
IN_PROCESS = ("async_parameter_server", "sync_parameter_server", "in_graph")


def settings(strategy: str, steps: int, **cluster: object) -> dict[str, Any]:
    return {
        "training": {
            "strategy": strategy,
            "steps": steps,
            "batch_size": 16,
            "checkpoint_every": STEPS,
            "validate_every": 0,
        },
        "cluster": {"parameter_servers": 1, "workers": 2, **cluster},
    }


def counted(run: Launched) -> int:
    """Return the global step of the newest checkpoint, by its manifest and by the counter in it."""
    step = run.newest()
    uri, _ = newest_checkpoint(run.checkpoints)
    assert storage.read_manifest(uri).fields["global_step"] == step
    assert run.history()[-1]["global_step"] == step
    return step


@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_thousand_steps_are_a_thousand_updates(dataset, tmp_path, strategy):
    with launched(settings(strategy, STEPS), dataset, tmp_path) as run:
        code, said = run.end()
    assert code == 0, said
    assert counted(run) == STEPS


def pairs() -> list[object]:
    """All pairs of strategies; of the slow ones each strategy goes before and after another one."""
    several = len(STRATEGIES)
    return [
        pytest.param(
            STRATEGIES[first],
            STRATEGIES[(first + apart) % several],
            marks=() if apart == 1 else pytest.mark.long,
        )
        for first in range(several)
        for apart in range(several)
    ]


@pytest.fixture(scope="module")
def half(dataset, tmp_path_factory) -> Callable[[str], Path]:
    """The checkpoints of a strategy at half the steps, made once."""
    known: dict[str, Path] = {}

    def checkpoints(strategy: str) -> Path:
        if strategy not in known:
            folder = tmp_path_factory.mktemp(strategy)
            cluster = {"in_process": strategy in IN_PROCESS}
            with launched(settings(strategy, STEPS // 2, **cluster), dataset, folder) as run:
                code, said = run.end()
            assert code == 0, said
            known[strategy] = folder / "checkpoints"
        return known[strategy]

    return checkpoints


@pytest.mark.parametrize(("first", "second"), pairs())
def test_it_goes_on_from_the_checkpoint_of_another_strategy(dataset, tmp_path, half, first, second):
    shutil.copytree(half(first), tmp_path / "checkpoints")
    cluster = {"in_process": second in IN_PROCESS}
    with launched(settings(second, STEPS, **cluster), dataset, tmp_path) as run:
        code, said = run.end()
    assert code == 0, said
    (attempt,) = run.events(AttemptBegin)
    assert (attempt.resumed, attempt.global_step) == (True, STEPS // 2)
    assert counted(run) == STEPS
    manifests = [manifest.fields for _, manifest in storage.published(run.checkpoints)]
    strategies = [fields["strategy"] for fields in manifests]
    assert strategies == [first, first, second]

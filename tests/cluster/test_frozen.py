"""Frozen layers under every strategy: what is frozen stays as it was, bit by bit."""

from __future__ import annotations

import pytest

from tests.cluster.launched import launched
from tests.cluster.test_warm_started import values
from trainer.checkpoints.index import list_checkpoints
from trainer.config.schema import STRATEGIES

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]

# One that pushes gradients, and one that averages state; `make test-long` runs the others.
UNLIKE = ("async_parameter_server", "multi_worker_mirrored")
FROZEN = ["dense/*", "batch_normalization/*"]


@pytest.mark.parametrize(
    "strategy",
    [each if each in UNLIKE else pytest.param(each, marks=pytest.mark.long) for each in STRATEGIES],
)
def test_what_is_frozen_stays_and_all_else_is_trained(dataset, tmp_path, strategy):
    config = {
        "model": {"name": "tests.cluster.stateful:net"},
        "training": {"strategy": strategy, "steps": 20, "validate_every": 0, "freeze": FROZEN},
        "cluster": {"parameter_servers": 2, "workers": 2},
    }
    with launched(config, dataset, tmp_path) as run:
        code, said = run.end()
    assert code == 0, said
    (first, _), *_, (last, _) = list_checkpoints(run.checkpoints)
    before, after = values(first), values(last)
    moved = {key for key in before if (before[key] != after[key]).any()}
    weights = {key for key in moved if "seed" not in key}
    assert len(weights) == 2
    assert all(key.startswith("variables/model.Sdense_1.S") for key in weights)

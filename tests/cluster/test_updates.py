"""What makes one update means the same under every strategy, in real processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.cluster.servers import Outcome, Trial, serving
from trainer.topology import Task

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

RUNS = [5, 6]
BATCH = 16
LED = ["async_parameter_server", "sync_parameter_server", "in_graph"]


def some_of(strategies: list[str], *quick: str) -> list[object]:
    """Return all strategies; those that are not `quick` run with the long tests."""
    return [
        each if each in quick else pytest.param(each, marks=pytest.mark.long) for each in strategies
    ]


def trial(strategy: str, name: str, size: int, workers: int = 1, **training: object) -> Trial:
    training = {"strategy": strategy, "batch_size": size, **training}
    config = {"training": training, "cluster": {"workers": workers}}
    arguments = {"batch_size": size, "workers": workers}
    return Trial(config, f"tests.cluster.updates:{name}", RUNS, arguments)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Callable[..., Outcome]:
    """`single` in a process of its own."""

    def outcome(name: str, size: int = BATCH, **training: object) -> Outcome:
        with serving(tmp_path_factory.mktemp("single")) as nothing:
            return nothing.lead(trial("single", name, size, **training))

    return outcome


@pytest.fixture(scope="module")
def whole(alone) -> Outcome:
    """One process with the whole batch, and the average of its weights."""
    return alone("dense", ema=0.9)


@pytest.fixture(scope="module")
def exact(alone) -> Outcome:
    """One process in float32."""
    return alone("exact")


def lead(folder, strategy: str, name: str, size: int, **training: object) -> list[Outcome]:
    """Run two workers; the asynchronous strategy has one, so that its updates have an order."""
    if strategy == "multi_worker_mirrored":
        with serving(folder, workers=2, chief=False) as servers:
            wanted = trial(strategy, name, size // 2, workers=2, **training)
            both = [servers.start_lead(wanted, Task(role="worker", index=n)) for n in range(2)]
            return [each.outcome() for each in both]
    workers = 1 if strategy.startswith("async") else 2
    with serving(folder, ps=2, workers=workers) as servers:
        wanted = trial(strategy, name, size // workers, workers, **training)
        return [servers.lead(wanted)]


def assert_same(outcome: Outcome, other: Outcome) -> None:
    assert outcome.global_step == other.global_step == sum(RUNS)
    assert set(outcome.variables) == set(other.variables)
    for path, value in other.variables.items():
        np.testing.assert_allclose(outcome.variables[path], value, atol=1e-5, err_msg=path)


@pytest.mark.parametrize(
    "strategy",
    some_of([*LED, "multi_worker_mirrored"], "multi_worker_mirrored"),
)
def test_small_batches_equal_a_large_one_and_so_do_their_averages(whole, tmp_path, strategy):
    for outcome in lead(tmp_path, strategy, "dense", BATCH // 2, accumulate=2, ema=0.9):
        assert_same(outcome, whole)
        assert any(path.startswith("average/") for path in outcome.variables)
    workers = outcome.reports[-1]["metrics"]["workers"]
    assert sum(each["examples"] for each in workers.values()) == sum(RUNS) * BATCH


@pytest.mark.parametrize(
    "strategy",
    ["sync_parameter_server"]
    + [
        pytest.param(each, marks=pytest.mark.long)
        for each in ("async_parameter_server", "in_graph")
    ],
)
def test_towers_of_a_worker_accumulate_scale_and_average_together(whole, tmp_path, strategy):
    together = {"accumulate": 2, "ema": 0.9, "mixed_precision": "float16"}
    with serving(tmp_path, ps=2, workers=1, devices=2) as servers:
        outcome = servers.lead(trial(strategy, "dense", BATCH // 4, **together))
    scale = {path for path in outcome.variables if path.startswith("loss_scale/")}
    # As the gradients of one worker: those of its towers are computed at once.
    assert outcome.variables["loss_scale/gradients"] == sum(RUNS) * 2
    kept = {path: each for path, each in outcome.variables.items() if path not in scale}
    assert_same(replace(outcome, variables=kept), whole)
    workers = outcome.reports[-1]["metrics"]["workers"]
    assert workers == {"worker-0": {"local_steps": sum(RUNS), "examples": sum(RUNS) * BATCH}}


@pytest.mark.parametrize("strategy", some_of(["single", *LED], "single", "in_graph"))
def test_gradients_of_rows_are_accumulated(alone, tmp_path, strategy):
    expected = alone("rows")
    if strategy == "single":
        (outcome,) = [alone("rows", BATCH // 4, accumulate=4)]
    else:
        (outcome,) = lead(tmp_path, strategy, "rows", BATCH // 2, accumulate=2)
    assert_same(outcome, expected)


@pytest.mark.parametrize(
    "strategy",
    some_of([*LED, "multi_worker_mirrored"], "async_parameter_server", "sync_parameter_server"),
)
def test_a_scale_that_is_too_large_costs_no_step(exact, tmp_path, strategy):
    for outcome in lead(tmp_path, strategy, "large", BATCH, mixed_precision="float16"):
        assert outcome.global_step == sum(RUNS)
        assert 1 <= outcome.variables["loss_scale/scale"] < 2**15
        for path, value in exact.variables.items():
            found = outcome.variables[path]
            np.testing.assert_allclose(found, value, atol=0.01, err_msg=path)


def test_two_devices_scale_and_accumulate_together(tmp_path):
    name = "tests.cluster.two_devices:TwoDevices"
    training = {"accumulate": 2, "mixed_precision": "float16", "ema": 0.9}
    with serving(tmp_path) as nothing:
        outcome = nothing.lead(trial(name, "large", BATCH // 4, **training))
    assert outcome.global_step == sum(RUNS)
    assert 1 <= outcome.variables["loss_scale/scale"] < 2**15
    assert np.isfinite(outcome.reports[-1]["loss"])

"""Tests that all strategies make the same updates as one process, also with state and towers."""

import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer import storage
from flotilla.trainer.checkpoints.index import newest_checkpoint
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.schema import STRATEGIES
from flotilla.trainer.config.topology import Task
from flotilla.trainer.evaluation.evaluate import evaluate
from flotilla.trainer.events import AttemptBegin, Restart
from flotilla.trainer.export.export import export
from flotilla.trainer.promotion import gate
from flotilla.trainer.runtime.errors import BEGIN_AGAIN, INTERRUPTED
from flotilla.trainer.strategies.async_parameter_server import LONG_RUN, TURN
from flotilla.trainer.training.journal import MAX_ROWS
from tests.cluster.launched import Launched, launched, run_to_end, sections, some_of
from tests.cluster.servers import Outcome, Servers, Trial, serving

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

BATCH = 8
RUNS = [7, 13]
NEAR = 1e-5
# Problems of two learning tasks: one has standardized labels and weighted examples, the other has
# two outputs whose losses have weights.
TASKS = ["regressed", "two_outputs"]


def long(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.long)


def trial(strategy: str, problem: str, *, batch_size: int, workers: int, **cluster) -> Trial:
    config = {"training": {"strategy": strategy}, "cluster": {"workers": workers, **cluster}}
    arguments = {"batch_size": batch_size, "workers": workers}
    return Trial(config, f"tests.cluster.problems:{problem}", RUNS, arguments)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Callable[[str], Outcome]:
    """Return a function that runs `single` with the batch of two workers, once per problem."""
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
    with serving(tmp_path_factory.mktemp("two"), ps=1, workers=2) as servers:
        yield servers


@pytest.fixture(scope="module")
def one_worker(tmp_path_factory) -> Iterator[Servers]:
    with serving(tmp_path_factory.mktemp("one"), ps=2, workers=1) as servers:
        yield servers


def side_by_side(servers: Servers, wanted: Trial) -> list[Outcome]:
    workers = range(servers.cluster.count("worker"))
    leading = [servers.start_lead(wanted, Task(role="worker", index=index)) for index in workers]
    return [each.outcome() for each in leading]


def assert_same(outcome: Outcome, other: Outcome, steps: int = sum(RUNS)) -> None:
    losses, others = ([report["loss"] for report in each.reports] for each in (outcome, other))
    np.testing.assert_allclose(losses, others, rtol=0, atol=NEAR)
    assert_same_state(outcome, other, steps)


def assert_same_state(outcome: Outcome, other: Outcome, steps: int) -> None:
    assert outcome.global_step == other.global_step == steps
    assert set(outcome.variables) == set(other.variables)
    for path, value in other.variables.items():
        np.testing.assert_allclose(outcome.variables[path], value, rtol=0, atol=NEAR, err_msg=path)


# Except in long tests, the problems in TASKS run only with synchronous servers (below).
@pytest.mark.parametrize(
    "problem", ["stepped", "sharded", *map(long, ["clipped", *TASKS, "embedded", "computed"])]
)
def test_two_mirrored_workers_equal_one_process_with_twice_the_batch(alone, tmp_path, problem):
    with serving(tmp_path, workers=2, chief=False) as servers:
        wanted = trial("multi_worker_mirrored", problem, batch_size=BATCH, workers=2)
        both = side_by_side(servers, wanted)
    for outcome in both:
        assert_same(outcome, alone(problem))


@pytest.mark.parametrize(
    ("strategy", "problem"),
    [
        ("in_graph", "clipped"),
        *(long("in_graph", each) for each in (*TASKS, "embedded", "computed")),
        *(("sync_parameter_server", each) for each in TASKS),
    ],
)
def test_an_update_of_two_workers_equals_one_process_with_twice_the_batch(
    alone, two_workers, strategy, problem
):
    outcome = two_workers.lead(trial(strategy, problem, batch_size=BATCH, workers=2))
    assert_same(outcome, alone(problem))


@pytest.mark.parametrize("problem", ["clipped", "embedded", long("computed")])
def test_one_asynchronous_worker_equals_one_process(alone, one_worker, problem):
    wanted = trial("async_parameter_server", problem, batch_size=2 * BATCH, workers=1)
    assert_same(one_worker.lead(wanted), alone(problem))


@pytest.mark.long
@pytest.mark.parametrize(("problem", "pull_every"), [("clipped", 1), ("normed", 1), ("clipped", 3)])
def test_turns_of_a_long_run_change_nothing(one_worker, problem, pull_every):
    # These updates fill several turns, and some single updates remain.
    updates = 4 * TURN + 3

    def outcome(steps: int) -> Outcome:
        training = {"strategy": "async_parameter_server", "steps": steps, "pull_every": pull_every}
        config = {"training": training, "cluster": {"workers": 1}}
        wanted = Trial(config, f"tests.cluster.problems:{problem}", [updates], {"workers": 1})
        return one_worker.lead(wanted)

    assert_same(outcome(LONG_RUN), outcome(LONG_RUN - 1), steps=updates)


def test_it_does_not_matter_on_which_servers_the_variables_stand(alone, one_worker):
    problem, strategy = "clipped", "async_parameter_server"
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


@pytest.mark.parametrize("problem", ["embedded", "computed"])
def test_two_devices_of_one_process_equal_one_with_twice_the_batch(alone, tmp_path, problem):
    config = {"training": {"strategy": "tests.cluster.problems:TwoDevices"}}
    arguments = {"problem": problem, "batch_size": 2 * BATCH, "workers": 1}
    with serving(tmp_path) as nothing:
        outcome = nothing.lead(Trial(config, "tests.cluster.problems:halved", RUNS, arguments))
    assert_same(outcome, alone(problem))


def test_replicas_share_moving_averages_and_not_the_units_that_they_drop(tmp_path):
    config = {"training": {"strategy": "multi_worker_mirrored"}, "cluster": {"workers": 2}}
    wanted = Trial(config, "tests.cluster.problems:dropped", RUNS)
    with serving(tmp_path, workers=2, chief=False) as servers:
        first, second = (each.variables for each in side_by_side(servers, wanted))
    different = {path for path in first if first[path] != second[path]}
    (seed,) = different
    assert seed.endswith("seed_generator_state")
    # Both workers have drawn equally often, but with different seeds. The first worker has the
    # configured seed and saves the checkpoint.
    assert np.subtract(second[seed], first[seed]).tolist() == [1, 0]
    (moving_mean,) = (path for path in first if path.endswith("moving_mean"))
    inputs = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")
    expected = (inputs.mean(axis=0) + 0.5) * (1 - 0.99 ** sum(RUNS))
    np.testing.assert_allclose(first[moving_mean], expected, rtol=0, atol=NEAR)


# Strategies that only long tests cover here. In `single` and `in_graph`, no other worker changes
# the state, and `test_sync_parameter_server` compares synchronous updates with one process.
SEEN_ELSEWHERE = {"single", "in_graph", "sync_parameter_server"}


def settings(strategy: str, steps: int) -> dict[str, Any]:
    clipping = {"global_clipnorm": 0.5}
    optimizer = {"name": "adam", "learning_rate": 0.01, "args": clipping}
    training = {"strategy": strategy, "optimizer": optimizer, "validate_every": 200}
    own = {"model": {"name": "tests.cluster.problems:net"}, "gate": {"min": {"accuracy": 0.9}}}
    return {**own, **sections(steps, 1000, training, parameter_servers=2)}


def state(run: Launched) -> dict[str, np.ndarray]:
    uri, _ = newest_checkpoint(run.checkpoints)
    reader = tf.train.load_checkpoint(str(storage.local_path(uri) / "variables"))
    wanted = ("moving_mean", "moving_variance", "seed_generator_state")
    return {
        short: reader.get_tensor(name)
        for name in reader.get_variable_to_shape_map()
        for short in wanted
        if short in name
    }


def trained(strategy: str, steps: int, dataset: str, folder: Path) -> Launched:
    run = run_to_end(settings(strategy, steps), dataset, folder)
    assert run.newest() == steps
    return run


@pytest.mark.parametrize("strategy", some_of(STRATEGIES, *{*STRATEGIES} - SEEN_ELSEWHERE))
def test_state_is_trained_saved_resumed_and_exported(dataset, tmp_path, strategy):
    run = trained(strategy, 300, dataset, tmp_path)
    before = state(run)
    assert (before["moving_mean"] != 0).all()
    assert (before["moving_variance"] != 1).all()
    assert before["seed_generator_state"][1] > 0
    after = state(trained(strategy, 400, dataset, tmp_path))
    # If the counter were not restored, it would now be smaller than before.
    assert after["seed_generator_state"][0] == before["seed_generator_state"][0]
    assert after["seed_generator_state"][1] > before["seed_generator_state"][1]
    assert (after["moving_mean"] != before["moving_mean"]).any()
    if strategy == "multi_worker_mirrored":
        _export(run, parse_config(settings(strategy, 400)), dataset, tmp_path)


def _export(run: Launched, config: Any, dataset: str, folder: Path) -> None:
    checkpoint, _ = newest_checkpoint(run.checkpoints)
    evaluation, decision, model = (
        storage.uri_of(folder / name) for name in ("evaluation", "decision", "model")
    )
    scratch = folder / "scratch"
    scratch.mkdir()
    evaluate(config, dataset, checkpoint, evaluation, scratch)
    assert gate.check(config, evaluation, decision).blessed
    # The export fails if the outputs of the loaded model differ from the outputs of the model in
    # memory.
    export(config, dataset, checkpoint, decision, model, scratch)
    assert storage.verify(model).kind == "model"


def trial_of_towers(strategy: str, problem: str) -> Trial:
    """Return a trial in which each device gets half of a problem's batch."""
    config = {"training": {"strategy": strategy, "batch_size": BATCH}, "cluster": {"workers": 1}}
    arguments = {"problem": problem, "batch_size": 2 * BATCH, "workers": 1}
    return Trial(config, "tests.cluster.problems:halved", RUNS, arguments)


@pytest.fixture(scope="module")
def two_devices(tmp_path_factory) -> Iterator[Servers]:
    with serving(tmp_path_factory.mktemp("two"), ps=2, workers=1, devices=2) as servers:
        yield servers


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
    outcome = two_devices.lead(trial_of_towers(strategy, problem))
    assert_same(outcome, alone(problem))
    workers = outcome.reports[-1]["metrics"]["workers"]
    steps = sum(RUNS)
    assert workers == {"worker-0": {"local_steps": steps, "examples": steps * 2 * BATCH}}


def test_gpus_that_tensorflow_finds_are_towers_and_no_replicas(alone, two_devices):
    assert_same(
        two_devices.lead(trial_of_towers("tests.cluster.problems:TwoGpus", "clipped")),
        alone("clipped"),
    )


UPDATES_RUNS = [5, 6]
UPDATES_BATCH = 16
LED = ["async_parameter_server", "sync_parameter_server", "in_graph"]


def trial_of_updates(
    strategy: str, name: str, size: int, workers: int = 1, **training: object
) -> Trial:
    training = {"strategy": strategy, "batch_size": size, **training}
    config = {"training": training, "cluster": {"workers": workers}}
    arguments = {"batch_size": size, "workers": workers}
    return Trial(config, f"tests.cluster.problems:{name}", UPDATES_RUNS, arguments)


@pytest.fixture(scope="module")
def alone_of_updates(tmp_path_factory) -> Callable[..., Outcome]:
    def outcome(name: str, size: int = UPDATES_BATCH, **training: object) -> Outcome:
        with serving(tmp_path_factory.mktemp("single")) as nothing:
            return nothing.lead(trial_of_updates("single", name, size, **training))

    return outcome


@pytest.fixture(scope="module")
def whole(alone_of_updates) -> Outcome:
    """Train in one process with the whole batch, and average the weights."""
    return alone_of_updates("dense", ema=0.9)


@pytest.fixture(scope="module")
def exact(alone_of_updates) -> Outcome:
    return alone_of_updates("exact")


def lead(folder, strategy: str, name: str, size: int, **training: object) -> list[Outcome]:
    """Train with two workers, or with one if asynchronous updates need a fixed order."""
    if strategy == "multi_worker_mirrored":
        with serving(folder, workers=2, chief=False) as servers:
            wanted = trial_of_updates(strategy, name, size // 2, workers=2, **training)
            return side_by_side(servers, wanted)
    workers = 1 if strategy.startswith("async") else 2
    with serving(folder, ps=2, workers=workers) as servers:
        wanted = trial_of_updates(strategy, name, size // workers, workers, **training)
        return [servers.lead(wanted)]


@pytest.mark.parametrize(
    "strategy", some_of([*LED, "multi_worker_mirrored"], "multi_worker_mirrored")
)
def test_small_batches_equal_a_large_one_and_so_do_their_averages(whole, tmp_path, strategy):
    for outcome in lead(tmp_path, strategy, "dense", UPDATES_BATCH // 2, accumulate=2, ema=0.9):
        assert_same_state(outcome, whole, sum(UPDATES_RUNS))
        assert any(path.startswith("average/") for path in outcome.variables)
    workers = outcome.reports[-1]["metrics"]["workers"]
    assert sum(each["examples"] for each in workers.values()) == sum(UPDATES_RUNS) * UPDATES_BATCH


@pytest.mark.parametrize("strategy", some_of(LED, "sync_parameter_server"))
def test_towers_of_a_worker_accumulate_scale_and_average_together(whole, tmp_path, strategy):
    together = {"accumulate": 2, "ema": 0.9, "mixed_precision": "float16"}
    with serving(tmp_path, ps=2, workers=1, devices=2) as servers:
        outcome = servers.lead(trial_of_updates(strategy, "dense", UPDATES_BATCH // 4, **together))
    scale = {path for path in outcome.variables if path.startswith("loss_scale/")}
    # All towers of a worker count as one gradient, so an update has two accumulated gradients.
    assert outcome.variables["loss_scale/gradients"] == sum(UPDATES_RUNS) * 2
    kept = {path: each for path, each in outcome.variables.items() if path not in scale}
    assert_same_state(replace(outcome, variables=kept), whole, sum(UPDATES_RUNS))
    workers = outcome.reports[-1]["metrics"]["workers"]
    steps = sum(UPDATES_RUNS)
    assert workers == {"worker-0": {"local_steps": steps, "examples": steps * UPDATES_BATCH}}


@pytest.mark.parametrize("strategy", some_of(["single", *LED], "single", "in_graph"))
def test_gradients_of_rows_are_accumulated(alone_of_updates, tmp_path, strategy):
    expected = alone_of_updates("rows")
    if strategy == "single":
        (outcome,) = [alone_of_updates("rows", UPDATES_BATCH // 4, accumulate=4)]
    else:
        (outcome,) = lead(tmp_path, strategy, "rows", UPDATES_BATCH // 2, accumulate=2)
    assert_same_state(outcome, expected, sum(UPDATES_RUNS))


@pytest.mark.parametrize(
    "strategy", some_of([*LED, "multi_worker_mirrored"], "sync_parameter_server")
)
def test_a_scale_that_is_too_large_costs_no_step(exact, tmp_path, strategy):
    for outcome in lead(tmp_path, strategy, "large", UPDATES_BATCH, mixed_precision="float16"):
        assert outcome.global_step == sum(UPDATES_RUNS)
        assert 1 <= outcome.variables["loss_scale/scale"] < 2**15
        for path, value in exact.variables.items():
            found = outcome.variables[path]
            np.testing.assert_allclose(found, value, atol=0.01, err_msg=path)


def test_two_devices_scale_and_accumulate_together(tmp_path):
    name = "tests.cluster.problems:TwoDevices"
    training = {"accumulate": 2, "mixed_precision": "float16", "ema": 0.9}
    with serving(tmp_path) as nothing:
        outcome = nothing.lead(trial_of_updates(name, "large", UPDATES_BATCH // 4, **training))
    assert outcome.global_step == sum(UPDATES_RUNS)
    assert 1 <= outcome.variables["loss_scale/scale"] < 2**15
    assert np.isfinite(outcome.reports[-1]["loss"])


EVERY = 200
SETTINGS = sections(1000, EVERY, {"strategy": "multi_worker_mirrored"}, communication="ring")


def words(run: Launched, task: str) -> str:
    return (run.folder / "cluster" / task / "termination.txt").read_text(encoding="utf-8").strip()


@pytest.mark.parametrize(
    ("killed", "other"),
    [("worker-0", "worker-1"), pytest.param("worker-1", "worker-0", marks=pytest.mark.long)],
)
def test_all_begin_again_when_one_dies_and_all_end_by_a_signal_after_one_last_checkpoint(
    dataset, tmp_path, killed, other
):
    # A longer run omits rows from its history, so the step of the interrupt might have no row.
    long_run = {**SETTINGS["training"], "steps": MAX_ROWS}
    with launched({**SETTINGS, "training": long_run}, dataset, tmp_path) as run:
        run.wait_for_step(EVERY + 1)
        run.kill(killed)
        begun = run.wait_for(lambda event: isinstance(event, AttemptBegin))
        run.wait_for_step(begun.global_step + 1)
        run.process.send_signal(signal.SIGTERM)
        code, said = run.end()
    assert code == INTERRUPTED, said
    restarts = {(e.task, e.cause, e.restarts) for e in run.events(Restart)}
    assert restarts == {(killed, "signal SIGKILL", 1), (other, f"exit code {BEGIN_AGAIN}", 1)}
    first, second = run.events(AttemptBegin)
    assert first.global_step == 0
    assert second.global_step >= EVERY
    assert second.global_step % EVERY == 0
    log = (run.folder / "cluster" / other / "log.txt").read_text(encoding="utf-8")
    assert "flotilla: the cluster lost a task: Collective ops is aborted by" in log
    newest = run.newest()
    assert newest == run.history()[-1]["global_step"]
    assert said.strip() == (
        f"interrupted at global step {newest}; checkpoint {run.checkpoints}/step-{newest:08d}"
    )
    assert words(run, "worker-0") == words(run, "worker-1") == said.strip()

"""Tests that each step is counted once, and that each example is in the expected batch."""

import random
from typing import Any

import numpy as np
import pytest

from flotilla.trainer import storage
from flotilla.trainer.checkpoints.index import learnt_of_dataset, newest_checkpoint
from flotilla.trainer.cluster import local
from flotilla.trainer.cluster.launcher import Job
from flotilla.trainer.config.schema import STRATEGIES
from flotilla.trainer.config.topology import Task
from flotilla.trainer.data.prepare import prepare
from flotilla.trainer.events import AttemptBegin, Restart
from flotilla.trainer.features import length
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.models import choice
from flotilla.trainer.preflight.proposal import propose
from flotilla.trainer.strategies.async_parameter_server import MAX_PORTION
from tests.cluster import visited
from tests.cluster.launched import Launched, launched, run_to_end, sections, some_of
from tests.cluster.servers import Outcome, Trial, serving

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

STEPS = 1000
ASYNC, SYNC = "async_parameter_server", "sync_parameter_server"
# Strategies that support `cluster.in_process`. The other strategies always use several processes,
# or always a single one.
IN_PROCESS = ("async_parameter_server", "sync_parameter_server", "in_graph")


def settings(strategy: str, steps: int, **cluster: object) -> dict[str, Any]:
    return sections(steps, STEPS, {"strategy": strategy, "batch_size": 16}, **cluster)


def counted(run: Launched) -> int:
    """Return the global step of the newest checkpoint; its manifest and counter must agree."""
    step = run.newest()
    uri, _ = newest_checkpoint(run.checkpoints)
    assert storage.read_manifest(uri).fields["global_step"] == step
    steps = [row["global_step"] for row in run.history()]
    assert steps == sorted(set(steps))
    assert steps[-1] == step
    return step


CHAIN_STEPS = 100


def test_each_strategy_goes_on_from_the_checkpoint_of_another(dataset, tmp_path):
    """Train with every strategy in turn, and again with the first.

    The number of workers also changes, so the shards are redistributed.
    """
    for number, strategy in enumerate([*STRATEGIES, STRATEGIES[0]]):
        steps = CHAIN_STEPS * (number + 1)
        sizes = {"in_process": strategy in IN_PROCESS, "workers": 3 if strategy == SYNC else 2}
        run = run_to_end(settings(strategy, steps, **sizes), dataset, tmp_path)
        (attempt,) = run.events(AttemptBegin)
        assert (attempt.resumed, attempt.global_step) == (number > 0, steps - CHAIN_STEPS)
        assert counted(run) == steps
        uri, _ = newest_checkpoint(run.checkpoints)
        fields = storage.read_manifest(uri).fields
        assert fields["strategy"] == strategy
        assert strategy != ASYNC or "input_position" not in fields


ANY_LENGTH_STEPS = 12
# `problems.sequences` validates this number of examples. The last sum has one digit per worker:
# either each of the two workers evaluated one part, or one of them evaluated both.
EXAMPLES = 23
ON_WORKERS = {2, 11, 20}


def trial(strategy: str, workers: int) -> Trial:
    config = {"training": {"strategy": strategy}, "cluster": {"workers": workers}}
    problem = "tests.cluster.problems:sequences"
    return Trial(config, problem, [ANY_LENGTH_STEPS], measured=True)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Outcome:
    with serving(tmp_path_factory.mktemp("single")) as nothing:
        return nothing.lead(trial("single", 1))


def assert_same(outcome: Outcome, alone: Outcome) -> None:
    """Check that a strategy trained on the same batches, and validated each example once."""
    assert outcome.global_step == ANY_LENGTH_STEPS
    assert outcome.reports[-1]["loss"] == pytest.approx(alone.reports[-1]["loss"], abs=1e-5)
    for path, value in alone.variables.items():
        np.testing.assert_allclose(outcome.variables[path], value, atol=1e-5, err_msg=path)
    count, loss, hits, *_ = alone.totals
    assert count == EXAMPLES
    assert outcome.totals[:4] == [EXAMPLES, pytest.approx(loss, rel=1e-5), hits, EXAMPLES]


@pytest.mark.parametrize(
    ("strategy", "workers"),
    [
        ("sync_parameter_server", 2),
        ("async_parameter_server", 1),
        pytest.param("in_graph", 2, marks=pytest.mark.long),
    ],
)
def test_a_chief_trains_and_validates_on_its_workers(alone, tmp_path, strategy, workers):
    with serving(tmp_path, ps=2, workers=workers) as servers:
        outcome = servers.lead(trial(strategy, workers))
    assert_same(outcome, alone)
    assert outcome.totals[-1] in (ON_WORKERS if workers == 2 else {1})


def test_mirrored_workers_train_alike_and_validate_a_part_each(alone, tmp_path):
    with serving(tmp_path, workers=2, chief=False) as both:
        tasks = [Task(role="worker", index=index) for index in range(2)]
        leading = [both.start_lead(trial("multi_worker_mirrored", 2), task) for task in tasks]
        for each in leading:
            outcome = each.outcome()
            assert_same(outcome, alone)
            assert outcome.totals[-1] == 11


# One task is killed in each interval of this number of steps.
DYNAMIC_STEPS = 250
KILLED = ("worker-0", "chief-0", "ps-0", "worker-1")


@pytest.fixture(scope="module")
def numbers(tmp_path_factory) -> str:
    return visited.published(tmp_path_factory.mktemp("numbers"))


def require_once(run: Launched, batches: int, *, lost: int = 0) -> None:
    """Check that the visits of examples agree with the input position and the number of batches.

    After each of `lost` kills of a worker, up to `MAX_PORTION` updates run again: the worker may
    have died after it pushed a gradient but before the update was counted.
    """
    seen, fields = visited.visits(run.checkpoints)
    position = fields["input_position"]
    gaps = sum(count for _, count in position["gaps"])
    more = int(seen.sum()) - (position["visited"] - gaps)
    assert 0 <= more <= lost * MAX_PORTION * visited.BATCH
    assert 0 <= int(seen.sum()) - batches * visited.BATCH <= lost * visited.BATCH
    least = position["visited"] // visited.EXAMPLES
    most = -(-position["visited"] // visited.EXAMPLES)
    # An example may have fewer visits only if it is in a gap, and more visits only if it was
    # repeated.
    assert np.maximum(least - seen, 0).sum() <= gaps
    assert np.maximum(seen - most, 0).sum() <= more


# Number of gradients per update, for two workers and for three.
AVERAGED = {
    "single": (1, 1),
    ASYNC: (1, 1),
    SYNC: (2, 2),
    "in_graph": (2, 3),
    "multi_worker_mirrored": (2, 3),
}


@pytest.mark.parametrize("strategy", some_of(STRATEGIES, SYNC))
def test_epochs_go_on_with_another_number_of_workers(numbers, tmp_path, strategy):
    steps, batches = 0, 0
    for more, workers, averaged in zip((100, 110), (2, 3), AVERAGED[strategy], strict=True):
        steps, batches = steps + more, batches + more * averaged
        config = visited.settings(
            strategy,
            steps,
            averaged,
            # With `sync_parameter_server`, the third worker is a backup: each update uses two
            # gradients.
            training={"replicas_to_aggregate": 2 if strategy == SYNC else 0},
            cluster={"workers": workers},
        )
        run = run_to_end(config, numbers, tmp_path)
        require_once(run, batches)
    assert run.history()[-1]["epoch"] == batches * visited.BATCH / visited.EXAMPLES


def killed(numbers: str, folder: Any, strategy: str, names: list[str]) -> Launched:
    """Kill tasks one after another, each some steps after the previous task is back."""
    draw = random.Random(len(names))
    config = visited.settings(
        strategy,
        DYNAMIC_STEPS * (len(names) + 1),
        AVERAGED[strategy][0],
        training={"checkpoint_every": 50},
        cluster={"max_restarts": 50},
    )
    with launched(config, numbers, folder) as run:
        for number, name in enumerate(names):
            run.wait_for_step(DYNAMIC_STEPS * number + draw.randint(1, DYNAMIC_STEPS))
            run.kill(name)
            run.wait_for(lambda e: isinstance(e, Restart) and e.task == name)  # noqa: B023
        code, said = run.end()
    assert code == 0, said
    return run


def test_each_example_is_visited_once_although_a_worker_and_the_chief_were_killed(
    numbers, tmp_path
):
    names = ["worker-1", "chief-0"]
    run = killed(numbers, tmp_path, ASYNC, names)
    assert len(run.events(AttemptBegin)) >= 2
    require_kept(run, ASYNC, names)


@pytest.mark.long
@pytest.mark.parametrize("strategy", [ASYNC, SYNC])
def test_each_example_is_visited_once_after_twenty_random_kills(numbers, tmp_path, strategy):
    names = random.Random(19).choices(KILLED, k=20)
    run = killed(numbers, tmp_path, strategy, names)
    require_kept(run, strategy, names)


def require_kept(run: Launched, strategy: str, names: list[str]) -> None:
    """Check visits after kills; in synchronous training, a killed worker must cost no update."""
    lost = sum(name.startswith("worker") for name in names) if strategy == ASYNC else 0
    require_once(run, run.newest() * AVERAGED[strategy][0], lost=lost)


ROWS, EPOCHS, BATCH, WORKERS = 300, 3, 16, 2
WORDS = ("sun", "rain", "wind", "snow", "fog", "hail", "frost", "storm")
DRAW = random.Random(0)


def sentence(number):
    return f"{' '.join(DRAW.choices(WORDS, k=5))} on day {number}"


TABLES = {
    "text": ("report,y", lambda n: f"{sentence(n)},{'ab'[n % 2]}"),
    "two_tower": ("user_id,item_id,y", lambda n: f"{n % 23},{n * 7 % 31},{n % 2}"),
    "tabular": ("x,sky,person_id,y", lambda n: f"{n / 7},{WORDS[n % 8]},{n % 19},{'ab'[n % 2]}"),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("model", "strategy", "together"),
    [
        ("text", "async_parameter_server", 1),
        ("two_tower", "sync_parameter_server", WORKERS),
        ("tabular", "in_graph", WORKERS),
    ],
)
def test_all_examples_are_seen_as_often_as_is_asked_for(model, strategy, together, tmp_path):
    head, row = TABLES[model]
    source = tmp_path / "table.csv"
    source.write_text("\n".join([head, *(row(n) for n in range(ROWS))]) + "\n")
    settings = {
        "training.strategy": strategy,
        "training.epochs": EPOCHS,
        "training.batch_size": BATCH,
        "cluster.workers": WORKERS,
        "cluster.parameter_servers": 2,
        "cluster.in_process": "true",
    }
    config = propose(source, ["y"], [f"{key}={value}" for key, value in settings.items()]).config
    (tmp_path / "scratch").mkdir()
    uri = prepare(config.data, storage.uri_of(tmp_path / "data"), tmp_path / "scratch").uri
    spec = DatasetSpec.from_manifest(storage.read_manifest(uri), learnt_of_dataset(uri))
    config = length.resolve_for_dataset(choice.with_model(config, spec), uri)
    assert config.model.name == model
    checkpoints = storage.uri_of(tmp_path / "checkpoints")
    workdir = tmp_path / "tasks"
    local.launch(Job(config=config, dataset=uri, checkpoints=checkpoints, workdir=workdir))
    _, reached = newest_checkpoint(checkpoints)
    assert reached == -(-EPOCHS * spec.examples("train") // (BATCH * together))

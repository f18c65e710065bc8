"""Tests parameter servers that are started by hand, joined, killed, and publish checkpoints."""

import signal

import numpy as np
import pytest

from flotilla.trainer import storage
from flotilla.trainer.checkpoints.index import contents, newest_checkpoint
from flotilla.trainer.cluster.local import reserve_cluster
from flotilla.trainer.config.topology import Task
from flotilla.trainer.events import AttemptBegin
from flotilla.trainer.runtime.errors import BEGIN_AGAIN
from tests.cluster.by_hand import CHIEF, PS, by_hand
from tests.cluster.launched import run_to_end, sections
from tests.cluster.looking import MORE
from tests.cluster.problems import values_of
from tests.cluster.servers import serving

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


MOST_BYTES = 800


@pytest.mark.timeout(1200)
def test_a_look_leaves_nothing_in_the_memory_of_a_server(tmp_path):
    config = {
        "training": {"strategy": "async_parameter_server"},
        "cluster": {"parameter_servers": 1, "workers": 1},
    }
    with serving(tmp_path, ps=1, workers=1) as started:
        spec = {"config": config, "pid": started.processes["ps-0"].pid}
        leading = started.start_module("tests.cluster.looking", spec)
        said = leading.next()
        leading.end()
    assert said["grown"] < MOST_BYTES * MORE


STEPS = 300
CONFIG = sections(STEPS, 100)
WORKERS = [Task(role="worker", index=index) for index in range(2)]


@pytest.mark.parametrize("given_by", ["TF_CONFIG", pytest.param("flags", marks=pytest.mark.long)])
def test_a_cluster_without_a_chief_trains_to_the_very_step(dataset, tmp_path, given_by):
    with (
        reserve_cluster({"ps": 1, "worker": 2}) as cluster,
        by_hand(tmp_path, dataset, cluster, CONFIG) as tasks,
    ):
        for task in (PS, *WORKERS):
            tasks.start(task, tasks.flags(task) if given_by == "flags" else ())
        assert tasks.end_of(WORKERS[0]) == 0, tasks.log(WORKERS[0])
        assert [tasks.processes[task].poll() for task in (PS, WORKERS[1])] == [None, None]
        uri, step = newest_checkpoint(tasks.checkpoints)
    assert step == STEPS
    workers = storage.verify(uri).fields["metrics"]["workers"]
    assert sum(each["local_steps"] for each in workers.values()) == STEPS


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_servers_that_run_already_are_joined_and_left_running(dataset, tmp_path, monkeypatch):
    config = {**CONFIG, "cluster": {**CONFIG["cluster"], "existing_servers": True}}
    with (
        reserve_cluster({"chief": 1, "ps": 1, "worker": 2}) as cluster,
        by_hand(tmp_path, dataset, cluster, config) as tasks,
    ):
        for task in (PS, *WORKERS):
            tasks.start(task, tasks.flags(task))
        monkeypatch.setenv("TF_CONFIG", cluster.tf_config(CHIEF))
        for name in ("one", "two"):
            run = run_to_end(config, dataset, tmp_path / name)
            assert run.newest() == STEPS
            assert [path.name for path in (tmp_path / name / "cluster").iterdir()] == ["chief-0"]
        assert [process.poll() for process in tasks.processes.values()] == [None] * 3


SECOND = Task(role="ps", index=1)
WORKER = Task(role="worker", index=0)


def settings_of_parts(steps: int, servers: int = 2, **training: object) -> dict[str, object]:
    # With a partial recovery, the chief might save the values that remain.
    sizes = {"parameter_servers": servers, "workers": 1, "recovery": "full"}
    return sections(steps, 20, {"checkpoint_parts_mb": 0, **training}, **sizes)


@pytest.mark.timeout(1200)
def test_a_server_that_is_killed_while_it_publishes_leaves_the_checkpoint_before(dataset, tmp_path):
    with (
        reserve_cluster({"chief": 1, "ps": 2, "worker": 1}) as cluster,
        by_hand(tmp_path, dataset, cluster, settings_of_parts(40)) as tasks,
    ):
        tasks.start(SECOND, module="tests.cluster.dying_server")
        for task in (PS, WORKER, CHIEF):
            tasks.start(task)
        assert tasks.end_of(SECOND) == -signal.SIGKILL
        assert tasks.end_of(CHIEF) == BEGIN_AGAIN, tasks.log(CHIEF)
        # The second checkpoint is incomplete, because a server died while it published its part.
        assert storage.names(tasks.checkpoints)[-1] == "step-00000000"
        first = contents(tasks.checkpoints)
        assert (first.global_step, len(first.parts)) == (0, 2)
        for task in (SECOND, CHIEF):
            tasks.start(task)
        assert tasks.end_of(CHIEF) == 0, tasks.log(CHIEF)
    last = contents(tasks.checkpoints)
    storage.verify(last.uri)
    assert (last.global_step, len(last.parts)) == (40, 2)
    assert not [each for each in (tmp_path / "checkpoints").iterdir() if ".part" in each.name]
    # Each variable is in the part of its server, and the servers' folders contain no more data.
    assert {each.part for each in last.variables.values()} == {0, 1}
    for task in (PS, SECOND):
        left = [each for each in (tmp_path / str(task) / "parts").rglob("*") if each.is_file()]
        assert [each.name for each in left if each.parent.name != "replies"] == ["ready.json"]


@pytest.mark.timeout(1200)
@pytest.mark.long
def test_any_number_of_servers_and_every_strategy_resume(dataset, tmp_path):
    run = run_to_end(settings_of_parts(20), dataset, tmp_path)
    first = contents(run.checkpoints)
    assert len(first.parts) == 2
    # The updates are too small to change a value, so each checkpoint equals the restored one.
    still = {"optimizer": {"name": "sgd", "learning_rate": 1e-30}}
    steps = 20
    strategies = [
        ("async_parameter_server", 1, 1),
        ("sync_parameter_server", 3, 3),
        ("in_graph", 2, 2),
        ("single", 2, 1),
        ("async_parameter_server", 2, 2),
    ]
    for strategy, servers, parts in strategies:
        steps += 20
        config = settings_of_parts(steps, servers, strategy=strategy, **still)
        run = run_to_end(config, dataset, tmp_path)
        begun = run.events(AttemptBegin)
        assert [each.global_step for each in begun] == [steps - 20]
        found = contents(run.checkpoints)
        assert (found.global_step, len(found.parts)) == (steps, parts)
        for key, value in values_of(found.uri).items():
            np.testing.assert_array_equal(value, values_of(first.uri)[key])
        first = found

"""Tasks that no launcher of ours has started: by TF_CONFIG, by flags, without a chief."""

from __future__ import annotations

import pytest

from tests.cluster.by_hand import CHIEF, PS, by_hand
from tests.cluster.launched import launched
from tests.cluster.test_lease import left_elsewhere
from trainer import storage
from trainer.checkpoints.index import newest_checkpoint
from trainer.cluster.local import held_cluster
from trainer.topology import Task

pytestmark = pytest.mark.cluster

STEPS = 300
CONFIG = {
    "training": {"steps": STEPS, "checkpoint_every": 100, "validate_every": 0},
    "cluster": {"parameter_servers": 1, "workers": 2},
}
WORKERS = [Task(role="worker", index=index) for index in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("given_by", ["TF_CONFIG", pytest.param("flags", marks=pytest.mark.long)])
def test_a_cluster_without_a_chief_trains_to_the_very_step(dataset, tmp_path, given_by):
    with (
        held_cluster({"ps": 1, "worker": 2}) as cluster,
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
        held_cluster({"chief": 1, "ps": 1, "worker": 2}) as cluster,
        by_hand(tmp_path, dataset, cluster, config) as tasks,
    ):
        for task in (PS, *WORKERS):
            tasks.start(task, tasks.flags(task))
        monkeypatch.setenv("TF_CONFIG", cluster.tf_config(CHIEF))
        for name in ("one", "two"):
            with launched(config, dataset, tmp_path / name) as run:
                code, said = run.end()
            assert code == 0, said
            assert run.newest() == STEPS
            assert [path.name for path in (tmp_path / name / "cluster").iterdir()] == ["chief-0"]
        assert [process.poll() for process in tasks.processes.values()] == [None] * 3


@pytest.mark.slow
@pytest.mark.long
def test_a_chief_that_is_started_again_elsewhere_waits_for_its_own_lock(dataset, tmp_path):
    config = {**CONFIG, "training": {**CONFIG["training"], "steps": 10**7}}
    with (
        held_cluster({"chief": 1, "ps": 1, "worker": 2}) as cluster,
        by_hand(tmp_path, dataset, cluster, config) as tasks,
    ):
        for task in (PS, *WORKERS, CHIEF):
            tasks.start(task)
        tasks.wait_for(CHIEF, "step-00000100")
        tasks.processes[CHIEF].kill()
        tasks.end_of(CHIEF)
        place = left_elsewhere(tasks)
        _, reached = newest_checkpoint(tasks.checkpoints)
        tasks.config = {**config, "training": {**config["training"], "steps": reached + 100}}
        tasks.start(CHIEF)
        tasks.wait_for(CHIEF, "it may be dead")
        storage.delete(place)
        assert tasks.end_of(CHIEF) == 0, tasks.log(CHIEF)
        assert newest_checkpoint(tasks.checkpoints)[1] == reached + 100


def test_servers_are_joined_by_a_chief_only(dataset, tmp_path, monkeypatch):
    config = {**CONFIG, "cluster": {**CONFIG["cluster"], "existing_servers": True}}
    with held_cluster({"chief": 1, "ps": 1, "worker": 2}) as cluster:
        monkeypatch.setenv("TF_CONFIG", cluster.tf_config(PS))
        with launched(config, dataset, tmp_path) as run:
            code, said = run.end()
    assert code == 2
    assert said.startswith("cluster.existing_servers: TF_CONFIG names the task ps-0, and only a")
    assert said.count("\n") == 1

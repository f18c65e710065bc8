"""Checkpoints by parts on real servers, each in a folder of its own."""

from __future__ import annotations

import signal

import numpy as np
import pytest
import tensorflow as tf

from tests.cluster.by_hand import CHIEF, PS, by_hand
from tests.cluster.launched import launched
from trainer import storage
from trainer.checkpoints.contents import contents
from trainer.cluster.local import held_cluster
from trainer.errors import BEGIN_AGAIN
from trainer.events import AttemptBegin
from trainer.topology import Task

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

SECOND = Task(role="ps", index=1)
WORKER = Task(role="worker", index=0)


def settings(steps: int, servers: int = 2, **training: object) -> dict[str, object]:
    own = {"steps": steps, "checkpoint_every": 20, "validate_every": 0, "checkpoint_parts_mb": 0}
    return {
        "training": {**own, **training},
        # Otherwise the chief may save what is left.
        "cluster": {"parameter_servers": servers, "workers": 1, "recovery": "full"},
    }


@pytest.mark.slow
def test_a_server_that_is_killed_while_it_publishes_leaves_the_checkpoint_before(dataset, tmp_path):
    with (
        held_cluster({"chief": 1, "ps": 2, "worker": 1}) as cluster,
        by_hand(tmp_path, dataset, cluster, settings(40)) as tasks,
    ):
        tasks.start(SECOND, module="tests.cluster.dying_server")
        for task in (PS, WORKER, CHIEF):
            tasks.start(task)
        assert tasks.end_of(SECOND) == -signal.SIGKILL
        assert tasks.end_of(CHIEF) == BEGIN_AGAIN, tasks.log(CHIEF)
        # The draft of the second is an orphan of a chief that is gone.
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
    # Every variable is in the part of its server, in whose folder nothing is left.
    assert {each.part for each in last.variables.values()} == {0, 1}
    for task in (PS, SECOND):
        left = [each for each in (tmp_path / str(task) / "parts").rglob("*") if each.is_file()]
        assert [each.name for each in left if each.parent.name != "replies"] == ["ready.json"]


def values(uri: str) -> dict[str, np.ndarray]:
    reader = tf.train.load_checkpoint(f"{storage.local_path(uri)}/variables")
    keys = [each for each in reader.get_variable_to_shape_map() if "model" in each]
    return {key: reader.get_tensor(key) for key in keys}


@pytest.mark.long
def test_any_number_of_servers_and_every_strategy_resume(dataset, tmp_path):
    with launched(settings(20), dataset, tmp_path) as run:
        code, said = run.end()
    assert code == 0, said
    first = contents(run.checkpoints)
    assert len(first.parts) == 2
    # Steps so small that they change nothing: each save has what was restored.
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
        config = settings(steps, servers, strategy=strategy, **still)
        with launched(config, dataset, tmp_path) as run:
            code, said = run.end()
        assert code == 0, said
        begun = run.events(AttemptBegin)
        assert [each.global_step for each in begun] == [steps - 20]
        found = contents(run.checkpoints)
        assert (found.global_step, len(found.parts)) == (steps, parts)
        for key, value in values(found.uri).items():
            np.testing.assert_array_equal(value, values(first.uri)[key])
        first = found

"""A parameter server dies, and a new attempt begins: what goes back, and what does not.

So it is where the strategy is synchronous, or a single server has all variables.
"""

from __future__ import annotations

import signal

import numpy as np
import pytest
import tensorflow as tf

from tests.cluster.launched import launched
from trainer import storage
from trainer.checkpoints.contents import RECOVERED, of_field
from trainer.checkpoints.history import VALIDATION_LOSS
from trainer.events import AttemptBegin, Saved, ServersLost

pytestmark = [pytest.mark.cluster, pytest.mark.long]

EVERY, STEPS = 400, 1600


def settings(*, recovery="partial", training=None, **cluster):
    own = {"steps": STEPS, "checkpoint_every": EVERY, "validate_every": 0, "keep": 100}
    own |= {"strategy": "sync_parameter_server"}
    sizes = {"parameter_servers": 2, "workers": 1, "max_restarts": 3, "recovery": recovery}
    return {"training": {**own, **(training or {})}, "cluster": {**sizes, **cluster}}


def values(checkpoints, step):
    """Return the values of a checkpoint by the paths of the variables."""
    uri = storage.join(checkpoints, f"step-{step:08d}")
    reader = tf.train.load_checkpoint(f"{storage.local_path(uri)}/variables")
    found = of_field(storage.verify(uri).fields)
    keys = {path: key for path in found for key in [_key(path)]}
    return {path: reader.get_tensor(key) for path, key in keys.items()}


def _key(path):
    return f"variables/{path.replace('.', '..').replace('/', '.S')}/.ATTRIBUTES/VARIABLE_VALUE"


def fields(checkpoints, step):
    return storage.read_manifest(storage.join(checkpoints, f"step-{step:08d}")).fields


@pytest.mark.parametrize("lost", ["ps-0", "ps-1"])
@pytest.mark.parametrize("parts_mb", [64, 0])
def test_only_the_variables_of_the_lost_server_go_back(dataset, tmp_path, lost, parts_mb):
    config = settings(training={"checkpoint_parts_mb": parts_mb, "validate_every": EVERY})
    with launched(config, dataset, tmp_path) as run:
        run.wait_for_step(EVERY + 100)
        run.kill(lost)
        event = run.wait_for(lambda each: isinstance(each, ServersLost))
        code, said = run.end()
    assert code == 0, said
    assert (event.servers, event.recovery, event.reason) == ((lost,), "partial", "")
    reached, back_to = event.global_step, event.back_to
    assert back_to % EVERY == 0
    assert reached > back_to
    begun = [each.global_step for each in run.events(AttemptBegin)]
    assert begun == [0, reached]
    older = fields(run.checkpoints, reached)[RECOVERED][lost]
    assert older["global_step"] == back_to
    now, before = values(run.checkpoints, reached), values(run.checkpoints, back_to)
    assert set(now) == set(before)
    for path, value in now.items():
        if path == "global_step":
            assert value == reached
        else:
            went_back = np.array_equal(value, before[path])
            assert went_back is (path in older["variables"]), path
    assert run.newest() == STEPS
    assert RECOVERED not in fields(run.checkpoints, STEPS)
    # Also where the server died at a boundary, before the validation.
    validated = [row["global_step"] // EVERY for row in run.history() if VALIDATION_LOSS in row]
    assert validated == [1, 2, 3, 4]


def test_a_single_server_goes_back_to_the_copy_of_the_chief(dataset, tmp_path):
    every, steps = 4000, 6000
    training = {"checkpoint_every": every, "steps": steps, "strategy": "async_parameter_server"}
    config = settings(training=training, snapshot_seconds=0.1, parameter_servers=1)
    with launched(config, dataset, tmp_path) as run:
        run.wait_for_step(1000)
        run.kill("ps-0")
        event = run.wait_for(lambda each: isinstance(each, ServersLost))
        code, said = run.end()
    assert code == 0, said
    assert (event.recovery, event.reason) == ("full", "no other server has variables")
    # Later than the checkpoint at the start, and no further back than the looks of the chief.
    assert 0 < event.back_to <= event.global_step
    assert event.snapshot_age > 0
    begun = [each.global_step for each in run.events(AttemptBegin)]
    assert begun == [0, event.back_to]
    older = fields(run.checkpoints, event.back_to)[RECOVERED]["ps-0"]
    assert older["global_step"] == event.back_to
    now, before = values(run.checkpoints, event.back_to), values(run.checkpoints, 0)
    assert {path for path in now if np.array_equal(now[path], before[path])} == set()
    assert run.newest() == steps


def test_two_servers_die_at_once_and_the_third_keeps_its_values(dataset, tmp_path):
    with launched(settings(parameter_servers=3), dataset, tmp_path) as run:
        run.wait_for_step(EVERY + 100)
        lost = [run.task(name) for name in ("ps-0", "ps-2")]
        for task in lost:
            task.send_signal(signal.SIGKILL)
        event = run.wait_for(lambda each: isinstance(each, ServersLost))
        code, said = run.end()
    assert code == 0, said
    assert (event.servers, event.recovery) == (("ps-0", "ps-2"), "partial")
    older = fields(run.checkpoints, event.global_step)[RECOVERED]
    assert sorted(older) == ["ps-0", "ps-2"]
    now, before = (values(run.checkpoints, at) for at in (event.global_step, event.back_to))
    stayed = {path for path in now if not np.array_equal(now[path], before[path])}
    gone = {path for each in older.values() for path in each["variables"]}
    assert stayed - {"global_step"} == now.keys() - gone - {"global_step"}
    assert stayed > {"global_step"}
    assert run.newest() == STEPS


def test_a_chief_that_is_killed_in_a_recovery_begins_from_what_is_whole(dataset, tmp_path):
    # So many steps that no boundary is reached before the server is dead.
    every, steps = 4000, 8000
    by_parts = {"checkpoint_parts_mb": 0, "checkpoint_every": every, "steps": steps}
    with launched(settings(training=by_parts, recovery="partial"), dataset, tmp_path) as run:
        run.wait_for_step(every + 100)
        run.kill("ps-1")
        # Of parts this comes before they are written.
        saved = run.wait_for(lambda each: isinstance(each, Saved) and each.global_step % every)
        run.kill("chief-0")
        code, said = run.end()
    assert code == 0, said
    before = saved.global_step // every * every
    begun = [each.global_step for each in run.events(AttemptBegin)]
    assert begun[1] in {before, saved.global_step}
    assert run.newest() == steps

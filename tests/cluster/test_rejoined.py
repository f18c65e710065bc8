"""A parameter server dies and is started again: the same attempt goes on with it."""

from __future__ import annotations

import pytest

from tests.cluster.launched import launched
from trainer.checkpoints.contents import RECOVERED
from trainer.checkpoints.history import VALIDATION_LOSS
from trainer.checkpoints.index import list_checkpoints
from trainer.events import AttemptBegin, Restart, ServersLost
from trainer.storage import read_manifest

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

EVERY, STEPS = 400, 2000


def settings(*, training=None, **cluster):
    own = {"steps": STEPS, "checkpoint_every": EVERY, "validate_every": EVERY, "keep": 100}
    sizes = {"parameter_servers": 2, "workers": 2, "max_restarts": 3}
    return {"training": {**own, **(training or {})}, "cluster": {**sizes, **cluster}}


def lost(run, *names):
    """Kill servers; return what is said of it."""
    for task in [run.task(name) for name in names]:
        task.kill()
    return run.wait_for(lambda each: isinstance(each, ServersLost))


def require_one_attempt(run, restarts, steps=STEPS, every=EVERY):
    """Look at what the run left."""
    assert [each.global_step for each in run.events(AttemptBegin)] == [0]
    assert sorted(each.task for each in run.events(Restart)) == restarts
    assert run.newest() == steps
    checkpoints = list_checkpoints(run.checkpoints)
    assert [step for _, step in checkpoints] == list(range(0, steps + 1, every))
    assert not any(RECOVERED in read_manifest(uri).fields for uri, _ in checkpoints)
    validated = [row["global_step"] for row in run.history() if VALIDATION_LOSS in row]
    assert validated == list(range(every, steps + 1, every))


@pytest.mark.parametrize("parts_mb", [64, 0])
def test_either_server_is_joined_again(dataset, tmp_path, parts_mb):
    config = settings(training={"checkpoint_parts_mb": parts_mb})
    with launched(config, dataset, tmp_path) as run:
        run.wait_for_step(EVERY + 100)
        first = lost(run, "ps-0")
        run.wait_for_step(first.global_step + EVERY)
        second = lost(run, "ps-1")
        code, said = run.end()
    assert code == 0, said
    for name, event in (("ps-0", first), ("ps-1", second)):
        assert (event.servers, event.recovery, event.reason) == ((name,), "partial", "")
        assert event.rejoined
        assert event.back_to % EVERY == 0
        assert event.back_to <= event.global_step
    require_one_attempt(run, ["ps-0", "ps-1"])


def test_two_of_three_go_back_to_their_snapshots(dataset, tmp_path):
    every, steps = 3000, 6000
    training = {"checkpoint_every": every, "validate_every": every, "steps": steps}
    config = settings(training=training, parameter_servers=3, snapshot_seconds=0.1)
    with launched(config, dataset, tmp_path) as run:
        run.wait_for_step(1000)
        # Each has the copy of the one before: that of ps-0 is on ps-1.
        event = lost(run, "ps-0", "ps-2")
        code, said = run.end()
    assert code == 0, said
    assert (event.servers, event.recovery, event.rejoined) == (("ps-0", "ps-2"), "partial", True)
    # The copy of ps-2 was on ps-0.
    assert (event.back_to, event.snapshot_age) == (0, 0.0)
    require_one_attempt(run, ["ps-0", "ps-2"], steps=steps, every=every)


@pytest.mark.parametrize("name", ["ps-0", "ps-1"])
def test_it_goes_back_to_a_snapshot(dataset, tmp_path, name):
    every, steps = 3000, 6000
    training = {"checkpoint_every": every, "validate_every": every, "steps": steps}
    with launched(settings(training=training, snapshot_seconds=0.1), dataset, tmp_path) as run:
        run.wait_for_step(1000)
        first = lost(run, name)
        # The copies are made again, of all that there is, before the progress after the next.
        again = run.wait_for_step(first.global_step + 1)
        run.wait_for_step(again.global_step + 1)
        second = lost(run, name)
        code, said = run.end()
    assert code == 0, said
    for event in (first, second):
        assert event.rejoined
        assert event.snapshot_age > 0
        assert 0 < event.back_to <= event.global_step
    assert second.back_to > first.back_to
    require_one_attempt(run, [name, name], steps=steps, every=every)

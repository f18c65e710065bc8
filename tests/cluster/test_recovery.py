"""Tests attempts after a chief or servers die: remaining values are kept, lost values restored."""

import signal

import numpy as np
import pytest

from flotilla.trainer import storage
from flotilla.trainer.checkpoints.history import VALIDATION_LOSS
from flotilla.trainer.checkpoints.index import RECOVERED, list_checkpoints
from flotilla.trainer.cluster import lease
from flotilla.trainer.config.topology import Task
from flotilla.trainer.events import AttemptBegin, LeaseTakenOver, Restart, ServersLost
from tests.cluster.launched import launched, sections
from tests.cluster.leaving import IDS, STEPS
from tests.cluster.servers import serving

pytestmark = pytest.mark.cluster

EVERY, END = 400, 2000


@pytest.fixture
def leaving(tmp_path):
    """Return a function that starts servers, and a function that runs a chief until it dies."""

    def serve(servers):
        return serving(tmp_path, ps=servers, workers=1)

    def said(started, saved, uri="file:///run/checkpoints", **given):
        training = {"strategy": "async_parameter_server", **given.get("training", {})}
        cluster = {"parameter_servers": started.cluster.count("ps"), "workers": 1}
        spec = {"config": {"training": training, "cluster": cluster}, "uri": uri, "saved": saved}
        spec |= {"torn": given.get("torn", False), "layers": given.get("layers", 0)}
        leading = started.start_module("tests.cluster.leaving", spec)
        found = leading.next()
        leading.process.wait()
        return found

    return serve, said


@pytest.mark.slow
def test_the_next_chief_goes_on_with_what_is_there(leaving):
    serve, said = leaving
    every = [0, 1]
    with serve(2) as started:
        first = said(started, -1)
        other = said(started, 3, "file:///other/checkpoints")
        second = said(started, 3)
        third = said(started, 3, torn=True)
        fourth = said(started, 3)
        # A different optimizer has different variables, so no values are kept.
        fifth = said(started, 3, training={"optimizer": {"name": "adagrad", "learning_rate": 0.1}})
        more = said(started, 3, layers=1)
        fewer = said(started, 3)
        last = said(started, 3)
    assert [(each["found"], each["taken"]) for each in (first, other)] == [(0, []), (3, [])]
    assert (second["found"], second["taken"], second["step"]) == (STEPS, every, 2 * STEPS)
    assert second["begun"] == first["left"]
    assert second["left"] != second["begun"]
    # Every ID in the batches has exactly one row, although two chiefs assigned rows.
    assert second["metrics"]["grown"]["rows"] == IDS
    assert third["begun"] == second["left"]
    assert (fourth["found"], fourth["taken"], fourth["step"]) == (3, [], STEPS)
    for each in (fifth, more, fewer):
        assert (each["found"], each["taken"], each["step"]) == (STEPS, [], STEPS)
    assert (last["found"], last["taken"], last["step"]) == (STEPS, every, 2 * STEPS)
    assert last["begun"] == fewer["left"]
    begun = [value for path, value in fifth["begun"].items() if "accumulator" in path]
    assert begun
    assert all(np.unique(each).tolist() == [np.float32(0.1)] for each in begun)


def test_servers_that_live_keep_their_values_to_the_bit(leaving):
    serve, said = leaving
    lost = 0
    with serve(2) as started:
        first = said(started, -1)
        for work in (started.kill, started.start):
            work(Task(role="ps", index=lost))
        second = said(started, 3)
        # This time only the chief died, so the values of the restarted server are kept, too.
        third = said(started, 3)
    assert (second["found"], second["taken"]) == (STEPS, [1 - lost])
    # The step count is kept even if the server that holds it is lost.
    assert second["step"] == 2 * STEPS
    stayed = {path for path, each in first["left"].items() if second["begun"][path] == each}
    living = {path for path, each in first["devices"].items() if f"task:{1 - lost}" in each}
    assert living <= stayed
    gone = first["devices"].keys() - living
    trained = {path for path in gone if "rows" in path or "table" in path}
    assert trained
    assert trained.isdisjoint(stayed)
    assert (third["found"], third["taken"]) == (2 * STEPS, [0, 1])
    assert third["begun"] == second["left"]


def settings(*, training=None, **cluster):
    own = {"validate_every": EVERY, "keep": 100, **(training or {})}
    return sections(END, EVERY, own, **{"parameter_servers": 2, "max_restarts": 3, **cluster})


def fields(checkpoints, step):
    return storage.read_manifest(storage.join(checkpoints, f"step-{step:08d}")).fields


def validated(run):
    return [row["global_step"] // EVERY for row in run.history() if VALIDATION_LOSS in row]


@pytest.mark.slow
def test_killed_servers_a_killed_chief_and_a_killed_worker_cost_as_little_as_they_can(
    dataset, tmp_path
):
    """Only a lost server's variables go back in time; a lost chief or worker costs no steps."""
    end = END + EVERY
    # Allow more restarts, because a new attempt also restarts tasks whose memory has grown.
    config = settings(training={"checkpoint_parts_mb": 0, "steps": end}, max_restarts=9)
    lost = []
    with launched(config, dataset, tmp_path) as run:
        run.wait_for_step(EVERY + 100)
        for name in ("ps-0", "ps-1"):
            run.kill(name)
            lost.append(run.wait_for(lambda each: isinstance(each, ServersLost)))
            reached = run.wait_for_step(lost[-1].global_step + EVERY)
        servers = {name: run.task(name).pid for name in ("ps-0", "ps-1")}
        (before,) = lease.holders(run.checkpoints).values()
        run.kill("chief-0")
        attempt = run.wait_for(lambda each: isinstance(each, AttemptBegin))
        (now,) = lease.holders(run.checkpoints).values()
        assert servers == {name: run.task(name).pid for name in servers}
        run.kill("worker-1")
        code, said = run.end()
    assert code == 0, said
    # The new attempt of the chief takes the lease over from the one before.
    assert before.process != now.process
    assert before.job == now.job
    assert run.events(LeaseTakenOver) == []
    assert [each.released for each in lease.holders(run.checkpoints).values()] == [True]
    assert attempt.resumed
    assert attempt.global_step >= reached.global_step
    killed = [each.task for each in run.events(Restart) if each.cause == "signal SIGKILL"]
    assert killed == ["ps-0", "ps-1", "chief-0", "worker-1"]
    begun = [each.global_step for each in run.events(AttemptBegin)]
    assert begun == [0, *(each.global_step for each in lost), attempt.global_step]
    # An update that was in progress on a server when its worker died may also be counted.
    assert end <= run.newest() <= end + 1
    saved = [step for _, step in list_checkpoints(run.checkpoints)]
    assert saved == [*range(0, end, EVERY), run.newest()]
    require_marked(run, lost)
    # Each boundary is validated once, even if a server dies between a boundary and its validation.
    assert validated(run) == [1, 2, 3, 4, 5, 6]


def require_marked(run, lost):
    """Check that only the next checkpoint records which variables have restored values."""
    saved = {step: fields(run.checkpoints, step) for _, step in list_checkpoints(run.checkpoints)}
    marked = {step: each[RECOVERED] for step, each in saved.items() if RECOVERED in each}
    for name, event in zip(("ps-0", "ps-1"), lost, strict=True):
        assert (event.servers, event.recovery, event.reason) == ((name,), "partial", "")
        assert event.back_to % EVERY == 0
        assert event.global_step - 2 * EVERY <= event.back_to <= event.global_step
        # If the loss happened at a boundary, the next attempt saves the checkpoint of that step.
        after = max(-(-event.global_step // EVERY) * EVERY, event.back_to + EVERY)
        assert marked[after][name]["global_step"] == event.back_to
        assert marked[after][name]["variables"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("recovery", "names"), [("partial", ("ps-0", "ps-2")), ("auto", ("ps-1",))]
)
def test_synchronous_training_goes_back_as_a_whole_unless_it_may_not(
    dataset, tmp_path, recovery, names
):
    """With partial recovery, the third server keeps its values when two die at once."""
    training = {"strategy": "sync_parameter_server"}
    config = settings(training=training, recovery=recovery, parameter_servers=3, workers=1)
    with launched(config, dataset, tmp_path) as run:
        run.wait_for_step(EVERY + 100)
        for task in [run.task(name) for name in names]:
            task.send_signal(signal.SIGKILL)
        event = run.wait_for(lambda each: isinstance(each, ServersLost))
        code, said = run.end()
    assert code == 0, said
    is_partial = recovery == "partial"
    assert (event.servers, event.recovery) == (names, "partial" if is_partial else "full")
    assert is_partial or "synchronous" in event.reason
    begun = [each.global_step for each in run.events(AttemptBegin)]
    assert begun == [0, event.global_step if is_partial else event.back_to]
    assert event.back_to % EVERY == 0
    assert run.newest() == END
    assert validated(run) == [1, 2, 3, 4, 5]

"""Chiefs that die, one after the other, on the same servers: each goes on with what is there."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cluster.launched import launched
from tests.cluster.servers import serving
from tests.cluster.snapshotted import IDS, STEPS
from trainer.checkpoints.history import VALIDATION_LOSS
from trainer.checkpoints.index import list_checkpoints
from trainer.events import AttemptBegin, Restart, ServersLost

pytestmark = pytest.mark.cluster


@pytest.mark.slow
@pytest.mark.parametrize("servers", [1, 2])
def test_the_next_chief_goes_on_with_what_is_there(tmp_path, servers):
    cluster = {"parameter_servers": servers, "workers": 1}

    def config(**training):
        return {"training": {"strategy": "async_parameter_server", **training}, "cluster": cluster}

    with serving(tmp_path, ps=servers, workers=1) as started:

        def said(saved, uri="file:///run/checkpoints", *, torn=False, layers=0, **training):
            spec = {"config": config(**training), "uri": uri, "saved": saved}
            spec |= {"torn": torn, "layers": layers}
            leading = started.start_module("tests.cluster.left", spec)
            found = leading.next()
            leading.process.wait()
            return found

        first = said(-1)
        other = said(3, "file:///other/checkpoints")
        second = said(3)
        third = said(3, torn=True)
        fourth = said(3)
        # Of other variables, whose values are its own then.
        fifth = said(3, optimizer={"name": "adagrad", "learning_rate": 0.1})
        more = said(3, layers=1)
        fewer = said(3)
        last = said(3)
    assert [(each["found"], each["used"]) for each in (first, other)] == [(0, False), (3, False)]
    assert (second["found"], second["used"], second["step"]) == (STEPS, True, 2 * STEPS)
    assert second["begun"] == first["left"]
    # Who goes on with the variables has their graph too.
    assert [not each["traced"] for each in (second, third, last)] == [True] * 3
    assert all(each["traced"] for each in (first, other, fourth, fifth, more, fewer))
    assert second["left"] != second["begun"]
    # Every id of the batches has one row, although two chiefs gave them out.
    assert second["metrics"]["grown"]["rows"] == IDS
    assert third["begun"] == second["left"]
    assert (fourth["found"], fourth["used"], fourth["step"]) == (3, False, STEPS)
    assert (fifth["found"], fifth["used"], fifth["step"]) == (STEPS, False, STEPS)
    for each in (more, fewer):
        assert (each["found"], each["used"], each["step"]) == (STEPS, False, STEPS)
    assert (last["found"], last["used"], last["step"]) == (STEPS, True, 2 * STEPS)
    assert last["begun"] == fewer["left"]
    begun = [value for path, value in fifth["begun"].items() if "accumulator" in path]
    assert begun
    assert all(np.unique(each).tolist() == [np.float32(0.1)] for each in begun)


@pytest.mark.slow
def test_a_chief_that_is_killed_loses_no_step(dataset, tmp_path):
    every, steps = 500, 3000
    training = {"steps": steps, "checkpoint_every": 2000, "validate_every": every, "keep": 100}
    cluster = {"parameter_servers": 2, "workers": 2, "max_restarts": 3}
    with launched({"training": training, "cluster": cluster}, dataset, tmp_path) as run:
        run.wait_for_step(2 * every)
        run.kill("chief-0")
        attempt = run.wait_for(lambda each: isinstance(each, AttemptBegin))
        code, said = run.end()
    assert code == 0, said
    assert 2 * every <= attempt.global_step < 2000
    assert (attempt.checkpoint, attempt.resumed) == (0, True)
    assert [each.task for each in run.events(Restart)] == ["chief-0"]
    assert not run.events(ServersLost)
    assert [step for _, step in list_checkpoints(run.checkpoints)] == [0, 2000, steps]
    assert run.newest() == steps
    validated = [row["global_step"] for row in run.history() if VALIDATION_LOSS in row]
    assert [step // every for step in validated] == [1, 2, 3, 4, 5, 6]

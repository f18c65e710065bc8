"""Chiefs that die, one after the other, on the same servers: each begins with what was copied."""

from __future__ import annotations

import pytest

from tests.cluster.launched import launched
from tests.cluster.servers import serving
from tests.cluster.snapshotted import STEPS
from trainer.checkpoints.history import VALIDATION_LOSS
from trainer.checkpoints.index import list_checkpoints
from trainer.events import AttemptBegin, Restart, ServersLost

pytestmark = pytest.mark.cluster

CONFIG = {
    "training": {"strategy": "async_parameter_server"},
    "cluster": {"parameter_servers": 2, "workers": 1, "snapshot_seconds": 1},
}


def test_the_next_chief_finds_what_was_copied(tmp_path):
    with serving(tmp_path, ps=2, workers=1) as started:

        def said(saved, uri="file:///run/checkpoints", *, torn=False):
            spec = {"config": CONFIG, "uri": uri, "saved": saved, "torn": torn}
            leading = started.start_module("tests.cluster.left", spec)
            found = leading.next()
            leading.process.wait()
            return found

        first = said(None)
        other = said(3, "file:///other/checkpoints")
        second = said(3, torn=True)
        third = said(3)
    assert [(each["found"], each["used"]) for each in (first, other)] == [(0, False), (3, False)]
    # Its own were newer than the copies.
    assert first["changed"] > 0
    assert (second["found"], second["used"]) == (STEPS, True)
    assert second["begun"] == first["taken"]
    assert second["step"] == 2 * STEPS
    assert (third["found"], third["used"]) == (3, False)


@pytest.mark.slow
def test_a_chief_that_is_killed_goes_on_from_the_newest_snapshot(dataset, tmp_path):
    every, steps = 500, 3000
    training = {"steps": steps, "checkpoint_every": 2000, "validate_every": every, "keep": 100}
    cluster = {"parameter_servers": 2, "workers": 2, "max_restarts": 3, "snapshot_seconds": 0.1}
    with launched({"training": training, "cluster": cluster}, dataset, tmp_path) as run:
        # At each boundary workers rest, and one is taken before they go on.
        run.wait_for_step(2 * every)
        run.kill("chief-0")
        attempt = run.wait_for(lambda each: isinstance(each, AttemptBegin))
        code, said = run.end()
    assert code == 0, said
    assert every <= attempt.global_step < 2000
    assert (attempt.checkpoint, attempt.resumed) == (0, True)
    assert [each.task for each in run.events(Restart)] == ["chief-0"]
    assert not run.events(ServersLost)
    published = [0, attempt.global_step, 2000, steps]
    assert [step for _, step in list_checkpoints(run.checkpoints)] == published
    assert run.newest() == steps
    validated = [row["global_step"] for row in run.history() if VALIDATION_LOSS in row]
    assert [step // every for step in validated] == [1, 2, 3, 4, 5, 6]

"""Tests when a wait is a stall, and which task is named. `tests/cluster` tests real waits."""

import pytest

from flotilla.trainer import events
from flotilla.trainer.cluster.liveness import Peers
from flotilla.trainer.config.topology import Capabilities, Task
from flotilla.trainer.training.chief import StallWatch
from tests.trainer.counting import Counting, config_of

PS, ONE, TWO = (
    Task(role=role, index=index) for role, index in (("ps", 0), ("worker", 1), ("worker", 2))
)


class EndedError(Exception):
    """Raised instead of ending the process."""


@pytest.fixture
def judged(tmp_path, monkeypatch):
    """Return a function from peers to the message that ends the process, or ""."""
    path = tmp_path / "events.jsonl"
    monkeypatch.setenv(events.VARIABLE, str(path))

    def end(code):
        assert code == 138
        raise EndedError

    monkeypatch.setattr("flotilla.trainer.training.chief.os._exit", end)

    def judge(peers, *, spares=False, state="steps", moved=False, waits=2):
        strategy = Counting()
        strategy.config = config_of(stall_timeout=30)
        strategy.capabilities = Capabilities(spares_workers=spares)
        strategy.warming = state == "another graph"

        def look():
            if moved:
                watch._moved.set()
            return peers

        watch = StallWatch(strategy, look, tmp_path)
        if state != "first step":
            with watch.stepping():
                pass
        watch._moved.clear()
        if state != "validates":
            watch._stepping.set()
        try:
            for _ in range(waits):
                watch._judge()
        except EndedError:
            return (tmp_path / "termination.txt").read_text(encoding="utf-8").strip()
        return ""

    judge.events = lambda: [list(event.tasks) for event in events.read(path)]
    return judge


@pytest.mark.parametrize("state", ["steps", "validates"])
def test_one_that_does_not_answer_is_named(judged, capsys, state):
    words = judged(Peers(silent=(ONE,)), state=state)
    assert words == "no progress for 30 s: worker-1 does not answer"
    assert capsys.readouterr().err == f"flotilla: {words}\n"
    assert judged(Peers(silent=(ONE, TWO))).endswith(": worker-1, worker-2 do not answer")
    assert judged.events() == [["worker-1"], ["worker-1", "worker-2"]]


def test_a_strategy_that_spares_workers_only_says_so(judged):
    assert judged(Peers(silent=(ONE,)), spares=True, waits=1) == ""
    assert judged.events() == [["worker-1"]]
    assert judged(Peers(silent=(PS, ONE)), spares=True).endswith("ps-0, worker-1 do not answer")


def test_where_all_answer_steps_that_do_not_come_are_a_stall(judged):
    words = judged(Peers())
    assert words == (
        "no progress for 60 s: every task responds; raise training.stall_timeout if a step takes "
        "longer"
    )
    # A restarted task may not have reached its first step.
    assert not judged(Peers(), waits=1)
    assert judged(Peers(), spares=True)
    # Steps do not advance during a validation or while a graph is compiled.
    assert not judged(Peers(), state="validates")
    assert not judged(Peers(), state="first step")
    assert not judged(Peers(), state="another graph")


def test_one_that_is_gone_is_waited_for(judged):
    assert not judged(Peers(gone=(ONE,)))
    assert judged(Peers(gone=(ONE,), silent=(TWO,)))


def test_a_step_that_comes_while_others_are_asked_is_none(judged):
    assert not judged(Peers(silent=(ONE,)), moved=True)
    assert judged.events() == []

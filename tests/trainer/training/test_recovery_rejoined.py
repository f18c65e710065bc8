"""An attempt goes on with servers that come back, where it can."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest
import tensorflow as tf

from trainer.checkpoints.checkpoints import RestoredCheckpoint
from trainer.checkpoints.contents import RECOVERED
from trainer.checkpoints.part_saver import PartSaver
from trainer.checkpoints.snapshots import Copied
from trainer.cluster.liveness import Peers
from trainer.errors import UserError
from trainer.events import ServersLost
from trainer.topology import Task
from trainer.training import recovery

PS_1 = Task(role="ps", index=1)
COPIED = Copied(global_step=490, age=0.5, variables={})


@pytest.fixture
def back(lose, monkeypatch):
    """Let a lost server answer at the third look; return how an attempt meets it."""
    seen = SimpleNamespace(looks=[], assigned=[], counter=tf.Variable(0, dtype=tf.int64))
    answers = [Peers(gone=(PS_1,)), Peers(gone=(PS_1,))]

    def probe(_cluster, tasks, _timeout):
        seen.looks.append(tuple(tasks))
        return answers.pop(0) if answers else Peers()

    def restore(found, variables, **_):
        seen.assigned.append((found.global_step, tuple(variables)))

    monkeypatch.setattr(recovery.liveness, "probe", probe)
    monkeypatch.setattr(recovery, "restore", restore)
    monkeypatch.setattr(recovery, "resumed", lambda _found, variables, _training: variables)
    monkeypatch.setattr(recovery, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(recovery, "server_of", lambda _: 0)

    def rejoin(lost, others, assign):
        seen.assigned.append(set(lost))
        others(None)
        assign()

    def lost(*given, rejoin=rejoin, newest=400, parts=None, fields=None, **named):
        found = newest and RestoredCheckpoint(
            uri="file:///step", global_step=newest, folder=None, fields=fields or {}
        )
        monkeypatch.setattr(
            lose,
            "prepare",
            lambda checkpoints: checkpoints.configure_mock(
                parts=parts, **{"newest.return_value": found}
            ),
            raising=False,
        )
        return lose.lose(*given, rejoin=rejoin, **named)

    seen.lose, seen.answers = lost, answers
    return seen


def test_an_attempt_goes_on_with_a_server_that_is_back_soon(lose, back):
    (event,) = back.lose()
    assert lose.goes_on
    assert event == ServersLost(
        servers=("ps-1",), recovery="partial", global_step=500, back_to=400, rejoined=True
    )
    tasks = (("ps", 0), ("ps", 1), ("worker", 0))
    assert [[(each.role, each.index) for each in look] for look in back.looks] == [[*tasks]] * 3
    assert back.assigned == [{1}, (400, ("table",))]
    assert not lose.saved


def test_what_was_copied_needs_no_checkpoint(lose, back):
    (event,) = back.lose(copies={1: COPIED}, newest=None)
    assert lose.goes_on
    assert (event.back_to, event.snapshot_age, event.rejoined) == (490, 0.5, True)
    assert back.assigned == [{1}]


def fails(*_):
    raise tf.errors.UnavailableError(None, None, "it died again")


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ({"rejoin": fails}, "UnavailableError: it died again"),
        ({"newest": None}, "no checkpoint has what they held"),
    ],
)
def test_otherwise_what_is_left_is_saved_for_a_new_attempt(lose, back, case, reason, caplog):
    (event,) = back.lose(**case)
    assert not lose.goes_on
    assert (event.recovery, event.rejoined, event.global_step) == ("partial", False, 510)
    assert len(lose.saved) == 1
    assert reason in caplog.text


def test_a_server_that_is_not_back_soon_or_stopped_is_not_waited_for(lose, back, monkeypatch):
    back.answers[:] = [Peers(silent=(PS_1,))]
    back.lose()
    assert (lose.goes_on, len(back.looks), len(lose.saved)) == (False, 1, 1)
    monkeypatch.setattr(recovery, "RETURN_SECONDS", 0.0)
    back.lose()
    assert (lose.goes_on, len(back.looks), len(lose.saved)) == (False, 1, 2)


def test_a_server_whose_name_has_its_old_address_is_waited_for(lose, back):
    back.answers[:] = [Peers(silent=(PS_1,), cut_off=(PS_1,))] * 2
    back.lose()
    assert (lose.goes_on, len(back.looks)) == (True, 3)


def test_a_worker_that_is_away_is_waited_for_and_not_without_end(lose, back, monkeypatch):
    gone = Peers(gone=(Task(role="worker", index=0),))
    back.answers[:] = [gone]
    back.lose()
    assert (lose.goes_on, len(back.looks)) == (True, 2)
    monkeypatch.setattr(recovery.liveness, "probe", lambda *_: gone)
    monkeypatch.setattr(recovery, "RETURN_SECONDS", 0.01)
    back.lose()
    assert (lose.goes_on, len(lose.saved)) == (False, 1)


def test_who_is_to_stop_waits_for_no_server(lose, back):
    back.lose(stops=lambda: len(back.looks) == 1)
    assert (lose.goes_on, len(back.looks), len(lose.saved)) == (False, 1, 1)


def test_a_save_that_the_loss_has_ended_is_no_request_to_stop(lose, back):
    def raises():
        raise UserError("a part could not be written")

    back.lose(stops=raises)
    assert lose.goes_on


def test_nothing_is_saved_while_the_servers_may_still_be_joined(lose, back, monkeypatch):
    monkeypatch.setattr(recovery, "LIMIT_SECONDS", 0.0)
    again = threading.Event()
    (event,) = back.lose(rejoin=lambda *_: again.wait())
    again.set()
    assert (lose.goes_on, lose.saved) == (False, [])
    assert (event.recovery, event.reason) == (
        "full",
        "the servers that came back were not joined in time",
    )


def test_workers_that_do_not_end_are_not_gone_on_with(lose, back, monkeypatch):
    monkeypatch.setattr(recovery, "HALT_SECONDS", 0.0)
    again = threading.Event()
    back.lose(halt=again.wait)
    assert (lose.goes_on, back.assigned) == (False, [])
    again.set()


def test_what_a_checkpoint_has_of_an_earlier_loss_is_said(lose, back):
    earlier = {"ps-1": {"global_step": 250, "variables": ["table"]}}
    (event,) = back.lose(fields={RECOVERED: earlier})
    assert (lose.goes_on, event.back_to) == (True, 250)


def test_after_many_losses_a_new_attempt_begins(lose, back, monkeypatch):
    monkeypatch.setattr(recovery, "MOST_REJOINS", 0)
    (event,) = back.lose()
    assert (lose.goes_on, event.rejoined, len(lose.saved)) == (False, False, 1)


def test_where_all_servers_are_gone_or_full_is_wanted_none_is_joined(back):
    back.lose(gone=(0, 1, 2), copies=dict.fromkeys(range(3), COPIED))
    back.lose({"cluster": {"recovery": "full"}})
    back.lose(whole=False)
    assert back.looks == back.assigned == []


@pytest.mark.parametrize("is_busy", [False, True])
def test_no_save_needs_what_the_lost_server_had_of_an_earlier_one(lose, back, is_busy):
    parts = create_autospec(PartSaver, instance=True)
    parts.is_busy.return_value = is_busy
    back.lose(parts=parts)
    assert lose.goes_on
    assert lose.checkpoints.without_lost.called is is_busy

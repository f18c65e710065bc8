"""Why a recovery is full, and what is said of it."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import tensorflow as tf

from tests.stores.fixtures import bucket_name
from trainer.checkpoints import joined, snapshots
from trainer.checkpoints.joined import Joined
from trainer.checkpoints.remote import checkpoints_of
from trainer.checkpoints.snapshots import Copied
from trainer.config.load import parse_config
from trainer.errors import ClusterLostError, UserError
from trainer.events import ServersLost
from trainer.strategies.strategy import Strategy
from trainer.training import recovery


def said(heard):
    (event,) = heard
    return event.recovery, event.global_step, event.back_to, event.reason


def test_what_is_left_is_saved_and_that_is_said(lose):
    (event,) = lose.lose()
    assert event == ServersLost(servers=("ps-1",), recovery="partial", global_step=510, back_to=400)
    (options,) = lose.saved
    assert options["read_step"] == 500
    # A validation was of other values.
    assert options["fields"] == {"metrics": {"loss": 0.5}}
    lose.checkpoints.flush.assert_called_once_with()


@pytest.mark.parametrize(
    ("tree", "mixes", "full"),
    [
        ({"recovery": "auto"}, True, ""),
        ({"recovery": "auto"}, False, "training is synchronous"),
        ({"recovery": "partial"}, False, ""),
        ({"recovery": "full"}, True, "cluster.recovery is full"),
    ],
)
def test_what_is_configured_and_the_strategy_decide(lose, tree, mixes, full):
    (event,) = lose.lose({"cluster": tree}, mixes=mixes)
    assert event.recovery == ("full" if full else "partial")
    assert full in event.reason
    assert bool(lose.saved) is not bool(full)


def test_where_it_is_not_possible_all_go_back(lose):
    full = ("full", 500, 400)
    *found, reason = said(lose.lose({"data": {"partition": "dynamic"}}))
    assert (tuple(found), "data.partition" in reason) == (full, True)
    assert "averages" in said(lose.lose(whole=False))[3]
    assert "no other server" in said(lose.lose(gone=(0, 1, 2)))[3]
    assert not lose.saved


def test_an_operation_of_another_thread_that_fails_does_not_end_it(lose, monkeypatch):
    lines = []

    @contextmanager
    def own_line():
        lines.append("begins")
        yield
        lines.append("ends")

    def save(*_, **__):
        lines.append("saves")
        return Joined(uri="file:///step-510", global_step=510, back_to=400)

    monkeypatch.setattr(recovery, "in_own_line", own_line)
    lose.lose(save=save)
    assert lines == ["begins", "saves", "ends"]


def test_two_servers_at_once_are_both_named(lose):
    (event,) = lose.lose(gone=(2, 0))
    assert (event.servers, event.recovery) == (("ps-0", "ps-2"), "partial")


def test_near_the_end_all_go_back_so_that_no_server_ends_behind(lose):
    near = {"steps": (1000, 400)}
    assert "fewer steps are left" in said(lose.lose(**near))[3]
    assert said(lose.lose({"cluster": {"recovery": "partial"}}, **near))[0] == "partial"


def copied(step, *servers):
    return {each: Copied(global_step=step, age=0.5, variables={}) for each in servers}


def saving(step=510, back_to=490, age=0.75):
    seen = []

    def save(*_, copies, **__):
        seen.append(copies)
        return Joined(uri="file:///step", global_step=step, back_to=back_to, age=age)

    return seen, save


def test_a_snapshot_that_is_newer_than_the_checkpoint_is_taken_and_said(lose):
    seen, save = saving()
    (event,) = lose.lose(save=save, copies=copied(490, 1))
    assert seen == [copied(490, 1)]
    assert (event.recovery, event.back_to, event.snapshot_age) == ("partial", 490, 0.75)
    lose.lose(save=save, copies=copied(400, 1))
    assert seen[1:] == [{}]


def test_near_the_end_what_goes_back_a_little_is_partial_all_the_same(lose):
    _, save = saving(step=1010, back_to=990)
    near = {"save": save, "steps": (1000, 400)}
    assert said(lose.lose(**near, copies=copied(990, 1)))[0] == "partial"
    assert "fewer steps" in said(lose.lose(**near, gone=(1, 2), copies=copied(990, 1)))[3]


def test_where_no_server_is_left_all_go_back_to_the_snapshot(lose):
    _, save = saving(step=490, back_to=490)
    every = {"save": save, "gone": (0, 1, 2)}
    (event,) = lose.lose(**every, copies=copied(490, 0, 1, 2))
    assert (event.recovery, event.global_step, event.back_to) == ("full", 500, 490)
    assert (event.snapshot_age, event.reason) == (0.75, "no other server has variables")
    (event,) = lose.lose(**every, copies=copied(490, 0, 1))
    assert (event.recovery, event.back_to, event.snapshot_age) == ("full", 400, 0.0)


class Servers(Strategy):
    """One whose variables are on two servers."""

    publishes = True
    build = run = global_step = learning_rate = None

    def __init__(self):
        """Need no cluster."""

    def variables(self):
        """Return one for each server."""
        return {"a": tf.Variable(1.0), "b": tf.Variable([2.0, 3.0])}


@pytest.fixture
def copying(monkeypatch):
    """Return the snapshots of two servers, which are this process, each time one is due."""
    monkeypatch.setattr(recovery.joined, "server_of", lambda each: int(each.shape.rank))
    monkeypatch.setattr(snapshots, "server_device", lambda _: "/device:CPU:0")
    monkeypatch.setattr(snapshots.Snapshots, "is_due", lambda *_, **__: True)

    def made(seconds=1.5):
        config = parse_config({"cluster": {"snapshot_seconds": seconds}})
        return recovery.ServerSnapshots(config, Servers())

    return made


def test_their_memory_is_said_with_the_first(copying, caplog):
    copying().take_if_due(10, rests=False)
    assert "snapshot of the servers every 1.5 s needs memory: " in caplog.text
    of_each = (f"0.0 MB on ps-{n}, and 0.0 MB more there while it is copied" for n in (0, 1))
    assert ", ".join(of_each) in caplog.text


def test_without_the_key_there_are_none(copying, caplog):
    found = copying(0)
    found.take_if_due(10, rests=False)
    assert (found.of({0, 1}, 0.0), caplog.text) == ({}, "")


def test_a_lost_server_ends_the_attempt_with_what_was_copied(copying, monkeypatch):
    found = copying()
    found.take_if_due(10, rests=False)

    def gone(*_):
        raise tf.errors.UnavailableError(None, None, "ps-1 is gone")

    monkeypatch.setattr(found._made._copies[1], "take", gone)
    with pytest.raises(tf.errors.UnavailableError):
        found.take_if_due(20, rests=False)
    assert found.of({1}, 0.0)[1].global_step == 10


def test_a_snapshot_that_fails_otherwise_ends_snapshots_and_not_training(
    copying, monkeypatch, caplog
):
    found = copying()
    found.take_if_due(10, rests=False)

    def fails(*_):
        raise tf.errors.ResourceExhaustedError(None, None, "no memory is left")

    monkeypatch.setattr(found._made._copies[1], "take", fails)
    found.take_if_due(20, rests=False)
    assert "no more snapshots of the servers are taken: ResourceExhaustedError: no" in caplog.text
    found.take_if_due(30, rests=False)
    assert found.of({0, 1}, 0.0) == {}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (UserError("cannot write a checkpoint: no space left"), "no space left"),
        (ClusterLostError("ps-0: gone as well"), "ps-0: gone as well"),
        (tf.errors.UnavailableError(None, None, "a second one"), "UnavailableError: a second one"),
        (RuntimeError("a bug\nwith lines"), "RuntimeError: a bug"),
    ],
)
def test_what_fails_leaves_a_full_recovery(lose, error, reason):
    def fails(*_, **__):
        raise error

    recovery_, step, back_to, why = said(lose.lose(save=fails))
    assert (recovery_, step, back_to) == ("full", 500, 400)
    assert why.endswith(reason)


def test_what_is_published_at_the_moment_of_the_loss_is_what_all_go_back_to(lose):
    def nothing(*_, **__):
        raise joined.NothingSavedError("no step is known since the newest checkpoint")

    recovery_, step, back_to, why = said(lose.lose(save=nothing, steps=(490, 400), published=500))
    assert (recovery_, step, back_to) == ("full", 500, 500)
    assert why == "no step is known since the newest checkpoint"
    found = said(lose.lose({"cluster": {"recovery": "full"}}, published=500))
    assert found[:3] == ("full", 500, 500)
    found = said(lose.lose(save=nothing, published=UserError("the store")))
    assert found[:3] == ("full", 500, 400)


def test_workers_that_do_not_end_are_not_waited_for(lose, monkeypatch):
    monkeypatch.setattr(recovery, "HALT_SECONDS", 0.0)
    again = threading.Event()
    assert said(lose.lose(halt=again.wait))[0] == "partial"
    again.set()


def test_what_takes_too_long_is_given_up_and_publishes_nothing(lose, monkeypatch):
    monkeypatch.setattr(recovery, "LIMIT_SECONDS", 0.0)
    again = threading.Event()
    asked = {"cluster": {"recovery": "partial"}}
    heard = lose.lose(asked, mixes=False, halt=again.wait)
    assert said(heard)[::3] == ("full", "it was not done after 0 s")
    with pytest.raises(UserError, match="too late"):
        lose.checkpoints.lease.check()
    again.set()


def test_what_is_saved_too_late_is_not_found_on_this_machine_either(
    lose, monkeypatch, gcs, tmp_path
):
    bucket, again, ended = bucket_name(), threading.Event(), threading.Event()
    gcs.create_bucket(bucket)
    uri = f"gs://{bucket}/run/checkpoints"

    def save(checkpoints, *_, **__):
        remote = checkpoints_of(uri, keep=2, scratch=tmp_path, alone=True)
        again.wait(60)
        remote.lease = checkpoints.lease
        try:
            counter = tf.Variable(510, dtype=tf.int64)
            remote.save({"global_step": counter}, io_device=None, fields={})
        finally:
            ended.set()

    monkeypatch.setattr(recovery, "LIMIT_SECONDS", 0.0)
    assert said(lose.lose(save=save))[0] == "full"
    again.set()
    assert ended.wait(60)
    assert checkpoints_of(uri, keep=2, scratch=tmp_path, alone=True).newest() is None


def test_a_store_that_does_not_answer_is_no_other_error(lose):
    recovery_, step, back_to, _ = said(lose.lose(steps=(500, UserError("the store"))))
    assert (recovery_, step, back_to) == ("partial", 510, 400)


def test_nothing_that_fails_hides_the_error_of_training(lose):
    assert not lose.lose(steps=(500, RuntimeError("no listing")))


def test_where_every_server_answers_nothing_is_said(lose):
    assert not lose.lose(gone=())
    assert not lose.saved

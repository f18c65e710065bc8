"""Errands in the background: one at a time, the newest of each slot, and errors that are heard."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from trainer import storage
from trainer.checkpoints.remote import UploadQueue
from trainer.errors import UserError


class Gate:
    """An errand that is on its way until it is let through."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.let = threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.let.wait(60)


def test_nobody_waits_for_an_errand_and_settle_waits_for_all() -> None:
    outbox, gate, done = UploadQueue(), Gate(), []
    outbox.put("a", gate)
    outbox.put("b", lambda: done.append("b"))
    assert gate.begun.wait(60)
    assert done == []
    gate.let.set()
    outbox.flush()
    assert done == ["b"]


def test_of_what_waits_the_newest_is_enough() -> None:
    outbox, gate, done = UploadQueue(), Gate(), []
    outbox.put("a", gate)
    assert gate.begun.wait(60)
    for number in range(5):
        outbox.put("a", lambda number=number: done.append(number))
        outbox.put("b", lambda number=number: done.append(-number))
    gate.let.set()
    outbox.flush()
    assert done == [4, -4]


def test_never_more_than_one_is_on_its_way() -> None:
    outbox, at_once, most = UploadQueue(), [], []

    def errand() -> None:
        at_once.append(1)
        most.append(len(at_once))
        at_once.pop()

    for number in range(50):
        outbox.put(str(number), errand)
    outbox.flush()
    assert most == [1] * 50


def test_what_will_not_pass_by_itself_is_raised_at_the_next_errand() -> None:
    outbox = UploadQueue()
    outbox.put("a", failing(UserError("no permission")))
    with pytest.raises(UserError, match="no permission"):
        outbox.flush()
    with pytest.raises(UserError, match="no permission"):
        outbox.put("a", lambda: None)


def test_a_store_that_is_away_ends_nothing_and_is_tried_again_at_the_end() -> None:
    outbox, tries = UploadQueue(), []

    def errand() -> None:
        tries.append(1)
        if len(tries) == 1:
            raise storage.Unavailable("away")
        done.set()

    done = threading.Event()
    outbox.put("a", errand)
    outbox.put("b", lambda: None)
    outbox.flush()
    assert done.is_set()
    assert len(tries) == 2


def test_a_store_that_stays_away_is_one_line_at_the_end() -> None:
    outbox = UploadQueue()
    outbox.put("a", failing(storage.Unavailable("away for 300 s")))
    outbox.put("b", lambda: None)
    with pytest.raises(storage.Unavailable, match="away for 300 s"):
        outbox.flush()


def test_a_newer_errand_makes_good_what_failed() -> None:
    outbox = UploadQueue()
    gate = Gate()
    outbox.put("a", failing(storage.Unavailable("away")))
    outbox.put("b", gate)
    assert gate.begun.wait(60)
    outbox.put("a", lambda: None)
    gate.let.set()
    outbox.flush()


def test_a_bug_is_not_kept_quiet() -> None:
    outbox = UploadQueue()
    outbox.put("a", failing(ZeroDivisionError("a bug")))
    with pytest.raises(ZeroDivisionError):
        outbox.flush()


def failing(error: Exception) -> Callable[[], None]:
    def errand() -> None:
        raise error

    return errand

"""Tests of a loop in a background thread."""

import queue
import threading

import pytest

from flotilla.trainer.runtime.loop import Loop


@pytest.fixture
def loop():
    made = []

    def make(work):
        made.append(Loop(work, 0.001, name="test", failing="nothing is counted"))
        return made[-1].start()

    yield make
    for each in made:
        each.stop()
        each.join()


def test_it_calls_until_it_is_stopped(loop):
    calls = queue.SimpleQueue()
    running = loop(lambda: calls.put(threading.current_thread().name))
    assert [calls.get() for _ in range(3)] == ["test"] * 3
    assert not running.is_over
    running.stop()
    running.join()
    assert running.is_over


def test_it_ends_where_the_function_says_so(loop):
    answers = iter([None, True, False])
    running = loop(lambda: next(answers))
    running.join()
    assert running.is_over
    assert next(answers, "asked for all") == "asked for all"


def test_an_error_is_said_once_until_a_call_succeeds(loop, caplog):
    course = iter([ValueError("one"), ValueError("two"), None, ValueError("three"), False])

    def work():
        found = next(course)
        if isinstance(found, Exception):
            raise found
        return found

    loop(work).join()
    assert caplog.messages == ["nothing is counted: one", "nothing is counted: three"]

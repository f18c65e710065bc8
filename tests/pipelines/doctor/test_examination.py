"""Tests that parallel checks do not hide each other's findings or exceed their deadlines."""

import signal
import threading

import pytest

from flotilla.pipelines import doctor as examination
from flotilla.pipelines.doctor import Check, Finding, examine
from flotilla.trainer.runtime.errors import RunInterruptedError, UserError

OK = Finding("ok", "fine")


def looked(checks):
    answer = []
    found = examine(checks, lambda check, finding: answer.append((check.name, finding)))
    assert answer == [(check.name, each) for check, each in zip(checks, found, strict=True)]
    return {name: (finding.state, finding.message) for name, finding in answer}


def fine():
    return OK


def failing(error):
    def look():
        raise error

    return look


@pytest.fixture
def release():
    """Yield an event that releases the hanging checks of a test; it is set after the test."""
    event = threading.Event()
    yield event
    event.set()


class Mark:
    """What a check leaves behind; if `firm`, it cannot be removed."""

    uri = "gs://b/doctor-1"

    def __init__(self, release, *, firm=False):
        self.is_left = True
        self.stopped = threading.Event()
        self._release = release
        self._firm = firm

    def stop(self):
        self.stopped.set()

    def remove(self):
        if self._firm:
            raise PermissionError("no")
        self.is_left = False

    def hang(self):
        self._release.wait(60)
        return OK

    def wait_for_stop(self):
        self.stopped.wait(60)
        self.is_left = False
        return OK


def test_what_a_check_raises_is_a_finding_and_hides_only_what_needs_it():
    looks = {"a": failing(UserError("mend it")), "b": failing(KeyError("bug\nhere")), "c": fine}
    assert looked([Check(name=name, look=look) for name, look in looks.items()]) == {
        "a": ("fail", "mend it"),
        "b": ("fail", "the check itself failed: KeyError: 'bug\\nhere'"),
        "c": ("ok", "fine"),
    }
    rows = [
        ("a", lambda: Finding("fail", ""), ()), ("b", failing(AssertionError()), ("a",)),
        ("c", failing(AssertionError()), ("b",)), ("d", lambda: Finding("warn", ""), ()),
        ("e", fine, ("d",)),
    ]  # fmt: skip
    found = looked([Check(name=name, look=look, needs=needs) for name, look, needs in rows])
    assert [state for state, _ in found.values()] == ["fail", "skipped", "skipped", "warn", "ok"]
    assert found["c"][1] == "a required check did not succeed: b"


def test_one_that_hangs_is_given_up_and_its_command_shows_more(release):
    def hang():
        return release.wait(60) and OK

    looks = {"a": failing(UserError("")), "b": failing(KeyError()), "c": hang, "d": fine}
    checks = [
        Check(name=n, look=look, seconds=0.1 if n == "c" else 60, show="ls")
        for n, look in looks.items()
    ]
    found = examine(checks, lambda *_: None)
    assert [each.remedy for each in found] == ["ls", "ls", "ls", ""]
    assert looked(
        [
            Check(name="a", look=hang, seconds=0.2),
            Check(name="b", look=fine),
            Check(name="c", look=failing(AssertionError()), needs=("a",)),
            Check(name="d", look=fine, needs=("b",)),
        ]
    ) == {
        "a": ("fail", "the check did not finish within 0.2 s"),
        "b": ("ok", "fine"),
        "c": ("skipped", "a required check did not succeed: a"),
        "d": ("ok", "fine"),
    }


def test_checks_look_at_the_same_time():
    both = threading.Barrier(2)

    def look():
        both.wait(60)
        return OK

    found = looked([Check(name=name, look=look) for name in "ab"])
    assert {state for state, _ in found.values()} == {"ok"}


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(examination, "TIDY_SECONDS", 60.0)
    monkeypatch.setattr(examination, "ENDING_SECONDS", 0.1)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("firm", [False, True])
def test_what_a_check_that_hangs_has_left_is_removed_or_named(release, firm):
    mark = Mark(release, firm=firm)
    found = looked([Check(name="a", look=mark.hang, seconds=0.1, trace=mark)])
    assert mark.is_left == firm
    word = "; gs://b/doctor-1 may still exist; delete it" if firm else ""
    assert found["a"] == ("fail", f"the check did not finish within 0.1 s{word}")


def interrupted(check):
    """Run the examination, and interrupt it as soon as the check has started."""
    begun = threading.Event()
    look = check.look

    def announced():
        begun.set()
        return look()

    def interrupt():
        begun.wait(60)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    announcing = Check(name=check.name, look=announced, seconds=60, trace=check.trace)
    with pytest.raises(RunInterruptedError) as caught:
        looked([announcing])
    interrupting.join()
    return str(caught.value)


def test_an_interrupt_lets_a_check_tidy_up_by_itself(release):
    mark = Mark(release)
    assert interrupted(Check(name="a", look=mark.wait_for_stop, trace=mark)) == "interrupted"
    assert not mark.is_left
    assert interrupted(Check(name="a", look=lambda: release.wait(60) and OK)) == "interrupted"


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("firm", [False, True])
def test_an_interrupt_does_not_wait_for_a_check_that_hangs(release, firm):
    mark = Mark(release, firm=firm)
    said = interrupted(Check(name="a", look=mark.hang, trace=mark))
    assert said.startswith("interrupted")
    assert (mark.is_left, mark.uri in said) == (firm, firm)

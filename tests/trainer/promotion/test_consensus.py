"""Tests that all proposers get the same decision in any order of requests, even if some die."""

import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from flotilla.trainer import storage
from flotilla.trainer.promotion import consensus

URI = "file:///question"


class DiedError(BaseException):
    """Raised in a proposer that is killed."""


class Asker:
    """A proposer in its own thread, which sends one request to the store per turn."""

    def __init__(self, name, notes):
        self.name, self.answer, self.dead = name, None, False
        self.notes = notes
        self._turn, self._waits = threading.Semaphore(0), threading.Semaphore(0)
        self.thread = threading.Thread(target=self._ask, name=name)
        self.thread.start()
        self._waits.acquire()

    def _ask(self):
        try:
            self.answer = consensus.decide(URI, {"by": self.name})
        except DiedError:
            pass
        finally:
            self._waits.release()

    def wait(self):
        """Wait for the next turn; the store calls this before each request."""
        self._waits.release()
        self._turn.acquire()
        if self.dead:
            raise DiedError

    def go(self):
        self._turn.release()
        self._waits.acquire()

    def die(self):
        """Kill the proposer before its next request."""
        self.dead = True
        self.go()
        self.thread.join()


@pytest.fixture
def notes(monkeypatch):
    """Replace the store with one in memory, in which each request waits for its proposer's turn."""
    found: dict[str, bytes] = {}
    askers: dict[threading.Thread, Asker] = {}

    def wait():
        own = threading.current_thread()
        if asker := askers.get(own):
            asker.wait()

    def write(uri, data):
        wait()
        found[storage.name_of(uri)] = data

    def read(uri):
        wait()
        return found[storage.name_of(uri)]

    def names(_uri):
        wait()
        return sorted(found)

    genuine = Asker._ask

    def begin(asker):
        askers[threading.current_thread()] = asker
        genuine(asker)

    monkeypatch.setattr(Asker, "_ask", begin)
    monkeypatch.setattr(storage, "write_bytes", write)
    monkeypatch.setattr(storage, "read_bytes", read)
    monkeypatch.setattr(storage, "names", names)
    # The test, not a pause, decides when a proposer continues.
    monkeypatch.setattr(consensus, "_FIRST_PAUSE", 0.0)
    monkeypatch.setattr(consensus, "_MAX_PAUSE", 0.0)
    return found


@pytest.mark.parametrize("dying", [0, 1, 2])
def test_in_whatever_order_they_act_all_get_the_same(notes, dying):
    answers = set()
    for seed in range(60):
        dice = random.Random(seed)
        notes.clear()
        askers = [Asker(name, notes) for name in "abc"]
        for asker in dice.sample(askers, dying):
            for _ in range(dice.randrange(6)):
                asker.go() if asker.thread.is_alive() else None
            if asker.thread.is_alive():
                asker.die()
        while alive := [each for each in askers if each.thread.is_alive()]:
            # Give several turns in a row, so that a proposer is not outbid forever.
            chosen = dice.choice(alive)
            for _ in range(dice.choice((1, 2, 6))):
                if chosen.answer is None and chosen.thread.is_alive():
                    chosen.go()
            if chosen.answer is not None:
                chosen.thread.join()
        answered = [each.answer for each in askers if each.answer is not None]
        assert len(answered) >= 3 - dying
        assert all(answer == answered[0] for answer in answered), f"seed {seed}"
        answers.add(answered[0]["by"])
    assert answers == {"a", "b", "c"}, "each wins some day"


def test_who_asks_alone_gets_its_own_proposal_and_all_later_ones_get_it_too(tmp_path):
    uri = storage.uri_of(tmp_path / "question")
    assert consensus.decide(uri, {"by": "a"}) == {"by": "a"}
    assert consensus.decide(uri, {"by": "b"}) == {"by": "a"}


def test_many_threads_on_files(tmp_path):
    uri = storage.uri_of(tmp_path / "question")
    with ThreadPoolExecutor(8) as pool:
        answered = list(pool.map(lambda n: consensus.decide(uri, {"by": n})["by"], range(8)))
    assert len(set(answered)) == 1


def test_what_a_dead_one_had_accepted_is_taken_over(tmp_path):
    folder = tmp_path / "question"
    folder.mkdir()
    for word, text in (("promised", ""), ("accepted", json.dumps({"by": "dead"}))):
        (folder / f"000004-aa-{word}").write_text(text)
    (folder / "notes of somebody else").write_text("?")
    assert consensus.decide(storage.uri_of(folder), {"by": "me"}) == {"by": "dead"}


@pytest.mark.parametrize("content", [b"", b"3", b"\xff"])
def test_a_damaged_note_is_named(tmp_path, content):
    folder = tmp_path / "question"
    folder.mkdir()
    (folder / "000001-aa-accepted").write_bytes(content)
    proposal: dict[str, Any] = {"by": "me"}
    with pytest.raises(storage.Corrupt, match="000001-aa-accepted is damaged: it does not con"):
        consensus.decide(storage.uri_of(folder), proposal)

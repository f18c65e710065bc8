"""Tests several processes and threads that publish to the same place at once."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from flotilla.trainer import storage
from flotilla.trainer.storage import publishing

from .conftest import EVERY, left_over, start
from .places import content, fetched, fill, path_of

PUBLISH_AT_A_LINE = """
import sys
from pathlib import Path
from flotilla.trainer import storage
print("ready", flush=True)
sys.stdin.readline()
try:
    storage.publish(Path(sys.argv[1]), sys.argv[2], kind="x")
except storage.Conflict:
    sys.exit(3)
"""


def at_once(tasks, act):
    barrier = threading.Barrier(tasks)

    def run(number):
        barrier.wait()
        try:
            act(number)
        except storage.Conflict:
            return "conflict"
        return "done"

    with ThreadPoolExecutor(tasks) as pool:
        return list(pool.map(run, range(tasks)))


def publisher(sources, uri):
    return lambda number: storage.publish(sources[number], uri, kind="x")


@pytest.mark.parametrize(
    "place",
    ["file", *(pytest.param(each, marks=pytest.mark.slow) for each in ("gs", "s3"))],
    indirect=True,
)
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("same", [False, True])
def test_of_many_that_publish_at_once_one_wins(make, place, tmp_path, left, same):
    sources = [
        make(f"source-{n}", {"a": b"%d" % (n * (not same)), f"own-{n * (not same)}": b""})
        for n in range(6)
    ]
    for number in range(4):
        uri = storage.join(place.root, str(number))
        fill(place, uri, {"a": b"half", "left": b""} if left else {})
        ends = at_once(6, publisher(sources, uri))
        assert sorted(ends) == (["done"] * 6 if same else ["conflict"] * 5 + ["done"])
        assert fetched(uri, tmp_path) == content(sources[ends.index("done")])
        assert len(place.content(uri)) == 3
    assert left_over(tmp_path) == []


def test_two_processes_publish_at_once(make, root):
    sources = [make("one", {"a": b"1"}), make("two", {"a": b"2"})]
    uri = storage.join(root, "a")
    processes = [start(PUBLISH_AT_A_LINE, str(source), uri) for source in sources]
    for process in processes:
        process.stdout.readline()
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        process.communicate()
    assert sorted(process.returncode for process in processes) == [0, 3]
    storage.verify(uri)


@pytest.mark.parametrize("same", [False, True])
def test_another_publishes_between_the_look_and_the_rename(make, root, monkeypatch, same):
    uri = storage.join(root, "a")
    winner = make("winner", {"a": b"1"})
    loser = make("loser", {"a": b"1" if same else b"2"})

    def look(_):
        monkeypatch.undo()
        storage.publish(winner, uri, kind="x")
        return False

    monkeypatch.setattr(publishing, "is_published", look)
    if same:
        assert storage.publish(loser, uri, kind="x") == storage.read_manifest(uri)
    else:
        with pytest.raises(storage.Conflict):
            storage.publish(loser, uri, kind="x")
    assert content(path_of(uri))["a"] == b"1"
    assert left_over(path_of(root)) == []


def test_publishing_and_deleting_at_once(make, root):
    source, uri = make(), storage.join(root, "a")

    def act(number):
        for _ in range(5):
            if number % 2:
                storage.delete(uri)
            else:
                try_to_publish(source, uri)

    assert at_once(4, act) == ["done"] * 4
    storage.publish(source, uri, kind="x")
    storage.verify(uri)
    assert left_over(path_of(root)) == []


def try_to_publish(source, uri):
    try:
        storage.publish(source, uri, kind="x")
    except storage.NotPublished:
        # The winner's directory was deleted before it could be compared.
        return


@EVERY
def test_of_many_that_create_one_file_one_does(place, tmp_path):
    uri = storage.join(place.root, "a", "file")
    barrier = threading.Barrier(6)

    def create(number):
        barrier.wait()
        return storage.create_bytes(uri, b"%d" % number)

    with ThreadPoolExecutor(6) as pool:
        made = list(pool.map(create, range(6)))
    assert made.count(True) == 1
    assert place.get(uri) == b"%d" % made.index(True)
    assert storage.names(storage.join(place.root, "a")) == ["file"]
    assert storage.names(storage.join(place.root, "b")) == []
    assert left_over(tmp_path) == []

"""Writers that die at any moment: a reader sees the old state or the new one."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer import storage

from .conftest import Make, content, left_over, path_of, start

# The n-th time that Python is about to touch the file system, the process is gone.
DIE_AT_EVERY_TOUCH = """
import os, signal, sys
from pathlib import Path
from trainer import storage

action, source, root = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
TOUCHES = ("open", "os.", "shutil.", "fcntl.")

def act(uri):
    if action == "publish":
        storage.publish(source, uri, kind="x", fields={"n": 1})
    elif action == "delete":
        storage.delete(uri)
    elif action == "write":
        storage.write_bytes(uri, b"new" * 1000)
    elif action == "fetch":
        storage.fetch(root + "/published", storage.local_path(uri))

def die_after(touches):
    left = [touches]
    def hook(event, _):
        if event.startswith(TOUCHES):
            left[0] -= 1
            if left[0] == -1:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)

for number in range(500):
    uri = f"{root}/{number:03d}/it"
    child = os.fork()
    if not child:
        die_after(number)
        act(uri)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    print(uri, flush=True)
    if not status:
        break
else:
    sys.exit("it never came to its end")
"""

PUBLISH_FOR_EVER = """
import itertools, sys
from pathlib import Path
from trainer import storage
for number in itertools.count():
    uri = f"{sys.argv[2]}/step-{number:05d}"
    print(uri, flush=True)
    storage.publish(Path(sys.argv[1]), uri, kind="x", fields={"n": number})
"""

REWRITE_FOR_EVER = """
import itertools, sys
from trainer import storage
print("ready", flush=True)
for number in itertools.count():
    storage.write_bytes(sys.argv[1], b"%07d\\n" % number * 50_000)
"""

FEW = {"a": b"first", "deep/b": b"second"}
DEAD = ".it.0123456789ab.part/half"


def die(action: str, source: Path, root: str) -> list[str]:
    process = start(DIE_AT_EVERY_TOUCH, action, str(source), root)
    output, _ = process.communicate()
    assert process.returncode == 0
    uris = output.splitlines()
    assert len(uris) > 10
    return uris


def test_a_publisher_may_die_before_any_touch_of_the_disk(make: Make, root: str) -> None:
    source = make(files=FEW)
    uris = die("publish", source, root)
    seen = [storage.is_published(uri) for uri in uris]
    assert seen == sorted(seen), "published only from the rename on"
    assert seen[-1]
    assert not seen[0]
    for uri, there in zip(uris, seen, strict=True):
        if there:
            storage.verify(uri)
        else:
            assert not path_of(uri).exists()
        assert storage.publish(source, uri, kind="x", fields={"n": 1}).fields == {"n": 1}
        storage.verify(uri)
    assert left_over(path_of(root)) == []


def test_a_publisher_may_die_while_it_replaces_what_another_left(make: Make, root: str) -> None:
    source = make(files=FEW)
    for number in range(200):
        make(str(path_of(f"{root}/{number:03d}")), {"it/left": b"half", DEAD: b""})
    uris = die("publish", source, root)
    assert len(uris) < 200
    for uri in uris:
        if storage.is_published(uri):
            storage.verify(uri)
            assert "left" not in content(path_of(uri))
        storage.publish(source, uri, kind="x", fields={"n": 1})
        storage.verify(uri)
        # A publication that finds all done clears nothing; the next writer does.
        storage.write_bytes(f"{uri}-next", b"")
        assert left_over(path_of(uri).parent) == []


def test_a_deletion_may_die_at_any_touch(make: Make, root: str) -> None:
    source = make(files=FEW)
    for number in range(60):
        storage.publish(source, f"{root}/{number:03d}/it", kind="x", fields={"n": 1})
    uris = die("delete", source, root)
    assert len(uris) < 60
    seen = [storage.is_published(uri) for uri in uris]
    assert seen[0]
    assert not seen[-1]
    for uri, there in zip(uris, seen, strict=True):
        if there:
            storage.verify(uri)
        else:
            assert not path_of(uri).exists()
        storage.delete(uri)
        storage.publish(make("other", {"b": b"1"}), uri, kind="y")
    assert left_over(path_of(root)) == []


def test_a_fetch_may_die_at_any_touch(make: Make, root: str) -> None:
    source = make(files=FEW)
    storage.publish(source, f"{root}/published", kind="x")
    uris = die("fetch", source, root)
    seen = [path_of(uri).exists() for uri in uris]
    assert seen == sorted(seen), "there only from the rename on"
    assert seen[-1]
    assert not seen[0]
    for uri, there in zip(uris, seen, strict=True):
        if there:
            assert content(path_of(uri)) == FEW
        storage.fetch(f"{root}/published", path_of(uri))
        assert content(path_of(uri)) == FEW
    assert left_over(path_of(root)) == []


def test_a_writer_of_a_file_may_die_at_any_touch(make: Make, root: str) -> None:
    for number in range(60):
        storage.write_bytes(f"{root}/{number:03d}/it", b"old")
    uris = die("write", make(), root)
    assert len(uris) < 60
    found = [storage.read_bytes(uri) for uri in uris]
    assert set(found) == {b"old", b"new" * 1000}
    assert found == sorted(found, reverse=True), "new only from the rename on"
    for uri in uris:
        storage.write_bytes(uri, b"newer")
        assert storage.read_bytes(uri) == b"newer"
    assert left_over(path_of(root)) == []


@pytest.mark.parametrize("after", [1, 2, 3, 5, 8, 13])
def test_a_publisher_that_is_killed_from_outside(make: Make, root: str, after: int) -> None:
    source = make(files={f"{n:02d}": bytes([n]) * 100_000 for n in range(20)})
    process = start(PUBLISH_FOR_EVER, str(source), root)
    assert process.stdout
    begun = [process.stdout.readline().rstrip("\n") for _ in range(after)]
    process.kill()
    begun += process.communicate()[0].splitlines()
    there = storage.published(root)
    assert [uri for uri, _ in there] == begun[: len(there)]
    assert len(begun) - len(there) <= 1
    for uri, manifest in there:
        assert storage.verify(uri) == manifest
    storage.publish(source, begun[-1], kind="x", fields={"n": len(begun) - 1})
    assert left_over(path_of(root)) == []


def test_a_reader_never_sees_half_a_file(root: str) -> None:
    uri = storage.join(root, "history.jsonl")
    storage.write_bytes(uri, b"0000000\n")
    process = start(REWRITE_FOR_EVER, uri)
    assert process.stdout
    process.stdout.readline()
    try:
        sizes: set[int] = set()
        while len(sizes) < 2:
            data = storage.read_bytes(uri)
            sizes.add(len(data))
        for _ in range(50):
            lines = storage.read_bytes(uri).splitlines()
            assert len(lines) == 50_000
            assert len(set(lines)) == 1
    finally:
        process.kill()
        process.communicate()
    assert len(set(storage.read_bytes(uri).splitlines())) == 1

"""Tests publishers, readers and fetches that are killed or run concurrently."""

import os
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from flotilla.trainer import storage

from .conftest import FILES, REPOSITORY, WARNINGS, left_over, start
from .places import content, fetched, fill, path_of

PUBLISH = """
import sys
from pathlib import Path
from flotilla.trainer import storage
storage.publish(Path(sys.argv[1]), sys.argv[2], kind="x", fields={"n": sys.argv[3]})
"""


# Read VmHWM, because `ru_maxrss` starts at the memory of the parent process.
WITHIN_MEMORY = """
import re, sys
from pathlib import Path
from flotilla.trainer import storage
def most():
    return re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]
storage.is_published(sys.argv[2])
before = most()
storage.publish(Path(sys.argv[1]), sys.argv[2], kind="x")
storage.fetch(sys.argv[2], Path(sys.argv[3]))
print(most(), before)
"""


def kill_at_random(bucket, source, uri, seed):
    """Publish in a process that is killed before a randomly chosen request is answered."""
    left = [random.Random(seed).randrange(1, 14)]
    process = []
    begun, lock = threading.Event(), threading.Lock()

    def kill(_request):
        begun.wait()
        with lock:
            left[0] -= 1
            if left[0] == 0:
                process[0].kill()

    with bucket.before_requests(kill):
        process.append(start(PUBLISH, str(source), uri, str(seed)))
        begun.set()
        process[0].communicate()


def attacked(bucket, make, folder, kills):
    """Kill publishers of the same URIs, and check that readers see the whole old or new version."""
    for number in range(kills):
        uri = storage.join(bucket.root, f"step-{number // 2}")
        files = {f"{n}/f {n}.bin": b"%d of %d" % (n, number) for n in range(10)}
        source = make(f"source-{number}", files)
        was = storage.is_published(uri) and storage.read_manifest(uri)
        kill_at_random(bucket, source, uri, number)
        if storage.is_published(uri):
            manifest = storage.verify(uri)
            assert manifest == was or manifest.fields == {"n": str(number)}
            assert was or fetched(uri, folder) == files
    for step in range((kills + 1) // 2):
        uri = storage.join(bucket.root, f"step-{step}")
        if not storage.is_published(uri) and step % 2:
            storage.publish(make("last", FILES), uri, kind="x")
            assert fetched(uri, folder) == FILES
    storage.collect_garbage(bucket.root)
    named = set()
    for uri, manifest in storage.list_published(bucket.root):
        storage.verify(uri)
        name = storage.name_of(uri)
        named |= {f"{name}/{entry.stored_at}" for entry in manifest.files}
        named.add(f"{name}/MANIFEST.json")
    assert set(bucket.content(bucket.root)) == named


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "kills", [pytest.param(4, marks=pytest.mark.slow), pytest.param(50, marks=pytest.mark.long)]
)
def test_publishers_that_are_killed_leave_the_old_or_the_new(bucket, make, tmp_path, kills):
    attacked(bucket, make, tmp_path, kills)


def test_a_concurrent_upload_harms_nobody(bucket, make, tmp_path):
    uri = storage.join(bucket.root, "a")
    slow, quick = make("slow", {"x": b"slow", "y": b"1"}), make("quick", {"x": b"quick"})
    uploaded, once = threading.Event(), threading.Event()

    def opponent(request):
        if once.is_set():
            return
        if request.startswith(("POST", "PUT")):
            uploaded.set()
        elif uploaded.is_set() and "MANIFEST.json" in request:
            once.set()
            with ThreadPoolExecutor(1) as pool:
                pool.submit(storage.publish, quick, uri, kind="x").result()

    with bucket.before_requests(opponent), pytest.raises(storage.Conflict):
        storage.publish(slow, uri, kind="x")
    assert once.is_set()
    storage.verify(uri)
    assert fetched(uri, tmp_path) == {"x": b"quick"}
    assert len(bucket.content(uri)) == 2


def test_garbage_of_the_dead_goes_and_that_of_the_living_stays(bucket, make):
    uri = storage.join(bucket.root, "dead")
    source = make()
    kill_before_the_manifest(bucket, source, uri)
    storage.write_bytes(storage.join(bucket.root, "history.jsonl"), b"mine")
    fill(bucket, storage.join(bucket.root, "not ours"), {"a": b""})
    left = bucket.content(uri)
    assert left
    assert "MANIFEST.json" not in left
    removed = storage.collect_garbage(bucket.root)
    assert sorted(removed) == sorted(storage.join(uri, name) for name in left)
    assert set(bucket.content(bucket.root)) == {"history.jsonl", "not ours/a"}
    assert storage.collect_garbage(bucket.root) == []


def kill_before_the_manifest(bucket, source, uri):
    process = []
    begun, uploaded = threading.Event(), threading.Event()

    def kill(request):
        begun.wait()
        if request.startswith(("POST", "PUT")):
            uploaded.set()
        if uploaded.is_set() and "MANIFEST" in request:
            process[0].kill()

    with bucket.before_requests(kill):
        process.append(start(PUBLISH, str(source), uri, "1"))
        begun.set()
        process[0].communicate()


def test_what_a_living_process_writes_is_no_garbage(bucket, make, tmp_path):
    uri = storage.join(bucket.root, "a")
    collected = []
    busy = threading.Event()

    def collect(request):
        if request.startswith(("POST", "PUT")) and len(bucket.content(uri)) and not busy.is_set():
            busy.set()
            with ThreadPoolExecutor(1) as pool:
                collected.extend(pool.submit(storage.collect_garbage, bucket.root).result())

    with bucket.before_requests(collect):
        storage.publish(make(files={f"{n}": b"%d" % n for n in range(40)}), uri, kind="x")
    assert busy.is_set()
    assert collected == []
    assert len(fetched(uri, tmp_path)) == 40


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("place", ["file", "gs", "s3", "minio"], indirect=True)
def test_a_gigabyte_takes_less_than_200_mb_of_memory(place, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    with (source / "large").open("wb") as file:
        for _ in range(64):
            file.write(os.urandom(1 << 24))
    uri = storage.join(place.root, "a")
    command = [sys.executable, *WARNINGS, "-c", WITHIN_MEMORY, source, uri, target]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True, text=True)
    most, before = (int(kib) for kib in done.stdout.split())
    assert most < 200 << 10, f"{most >> 10} MB, {before >> 10} MB of them before"
    assert storage.read_manifest(uri).total_bytes == 1 << 30
    assert (target / "large").stat().st_size == 1 << 30


# A program that is killed before its n-th call of a file system function.
DIE_AT_EVERY_TOUCH = """
import os, signal, sys
from pathlib import Path
from flotilla.trainer import storage

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
REWRITE_FOR_EVER = """
import itertools, sys
from flotilla.trainer import storage
print("ready", flush=True)
for number in itertools.count():
    storage.write_bytes(sys.argv[1], b"%07d\\n" % number * 50_000)
"""
FEW = {"a": b"first", "deep/b": b"second"}
DEAD = ".it.0123456789ab.part/half"


def die(action, source, root):
    process = start(DIE_AT_EVERY_TOUCH, action, str(source), root)
    output, _ = process.communicate()
    assert process.returncode == 0
    uris = output.splitlines()
    assert 10 < len(uris) < 200
    return uris


def die_around_a_rename(action, source, root, is_there, *, at_first=False):
    """Return each URI, and whether it is there, which changes only once, with the rename."""
    uris = die(action, source, root)
    seen = [is_there(uri) for uri in uris]
    assert seen == sorted(seen, reverse=at_first)
    assert (seen[0], seen[-1]) == (at_first, not at_first)
    return list(zip(uris, seen, strict=True))


def test_a_publisher_may_die_before_any_touch_of_the_disk(make, root):
    source = make(files=FEW)
    for uri, there in die_around_a_rename("publish", source, root, storage.is_published):
        if there:
            storage.verify(uri)
        else:
            assert not path_of(uri).exists()
        assert storage.publish(source, uri, kind="x", fields={"n": 1}).fields == {"n": 1}
        storage.verify(uri)
    assert left_over(path_of(root)) == []


def test_a_publisher_may_die_while_it_replaces_what_another_left(make, root):
    source = make(files=FEW)
    for number in range(200):
        make(str(path_of(f"{root}/{number:03d}")), {"it/left": b"half", DEAD: b""})
    for uri in die("publish", source, root):
        if storage.is_published(uri):
            storage.verify(uri)
            assert "left" not in content(path_of(uri))
        storage.publish(source, uri, kind="x", fields={"n": 1})
        storage.verify(uri)
        # Publishing the same content again removes no orphan, but the next write does.
        storage.write_bytes(f"{uri}-next", b"")
        assert left_over(path_of(uri).parent) == []


def test_a_deletion_may_die_at_any_touch(make, root):
    source = make(files=FEW)
    for number in range(60):
        storage.publish(source, f"{root}/{number:03d}/it", kind="x", fields={"n": 1})
    found = die_around_a_rename("delete", source, root, storage.is_published, at_first=True)
    assert len(found) < 60
    for uri, there in found:
        if there:
            storage.verify(uri)
        else:
            assert not path_of(uri).exists()
        storage.delete(uri)
        storage.publish(make("other", {"b": b"1"}), uri, kind="y")
    assert left_over(path_of(root)) == []


def test_a_fetch_may_die_at_any_touch(make, root):
    source = make(files=FEW)
    storage.publish(source, f"{root}/published", kind="x")
    for uri, there in die_around_a_rename("fetch", source, root, lambda u: path_of(u).exists()):
        if there:
            assert content(path_of(uri)) == FEW
        storage.fetch(f"{root}/published", path_of(uri))
        assert content(path_of(uri)) == FEW
    assert left_over(path_of(root)) == []


def test_a_writer_of_a_file_may_die_at_any_touch(make, root):
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


def test_a_reader_never_sees_half_a_file(root):
    uri = storage.join(root, "history.jsonl")
    storage.write_bytes(uri, b"0000000\n")
    process = start(REWRITE_FOR_EVER, uri)
    process.stdout.readline()
    try:
        sizes = set()
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

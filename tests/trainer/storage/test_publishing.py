import json
import logging
import os
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainer import storage
from trainer.errors import UserError
from trainer.storage.local import FileStore
from trainer.storage.object_store import ObjectStore

from .conftest import FILES, REPOSITORY, WARNINGS, Make, content, left_over, path_of, start
from .places import BucketPlace, FilePlace, Place, fetched, fill

WHOLE = {*FILES, "MANIFEST.json"}


@pytest.fixture
def uri(place: Place) -> str:
    return storage.join(place.root, "a b")


def test_publish_and_read_back(make: Make, place: Place) -> None:
    uri = storage.join(place.root, "datasets", "digits 1")
    assert not storage.is_published(uri)
    manifest = storage.publish(make(), uri, kind="dataset", fields={"examples": 3})
    assert manifest.kind == "dataset"
    assert manifest.fields == {"examples": 3}
    assert [entry.path for entry in manifest.files] == sorted(FILES)
    assert storage.read_manifest(uri) == manifest
    assert storage.verify(uri) == manifest
    assert storage.is_published(uri)
    assert "b.txt" in storage.names(uri)
    assert "c.txt" not in storage.names(uri)
    there = place.content(uri)
    tree = json.loads(there.pop("MANIFEST.json"))
    assert tree["schema"] == 1
    assert all(entry.keys() == {"path", "bytes", "crc32c"} for entry in tree["files"])
    assert there == FILES


def test_the_checksums_are_crc32c(make: Make, uri: str) -> None:
    source = make(files={"check": b"123456789"})
    [entry] = storage.publish(source, uri, kind="x").files
    assert (entry.bytes, entry.crc32c) == (9, "e3069283")


@pytest.mark.slow
@pytest.mark.parametrize("size", [3 * 2**20 + 7, 2**23 - 1, 2**23, 2**23 + 1, 5 * 2**22 + 1])
def test_a_file_of_more_than_one_chunk(make: Make, uri: str, tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    storage.publish(make(files={"large": data}), uri, kind="x")
    assert storage.verify(uri).total_bytes == size
    assert fetched(uri, tmp_path) == {"large": data}


@pytest.mark.slow
def test_many_files(make: Make, uri: str, tmp_path: Path) -> None:
    files = {f"{n % 7}/{n:04d}": b"%d" % n for n in range(60)}
    assert len(storage.publish(make(files=files), uri, kind="x").files) == 60
    assert fetched(uri, tmp_path) == files


@pytest.mark.slow
@pytest.mark.timeout(1200)
# A stand-in for a store takes minutes for so many.
@pytest.mark.parametrize(
    "place",
    ["file", *(pytest.param(each, marks=pytest.mark.long) for each in ("gs", "s3", "minio"))],
    indirect=True,
)
def test_ten_thousand_files(make: Make, place: Place, uri: str, tmp_path: Path) -> None:
    files = {f"{n % 100}/{n:05d}": b"%d" % n for n in range(10_000)}
    assert len(storage.publish(make(files=files), uri, kind="x").files) == 10_000
    assert fetched(uri, tmp_path) == files
    storage.delete(uri)
    assert place.content(uri) == {}


def test_the_source_is_left_alone(make: Make, uri: str) -> None:
    source = make()
    storage.publish(source, uri, kind="x")
    assert content(source) == FILES


def test_the_same_again_is_a_no_op(make: Make, place: Place, uri: str) -> None:
    first = storage.publish(make(), uri, kind="x", fields={"shape": (8, 8)})
    stored = place.content(place.root)
    second = storage.publish(make("elsewhere"), uri, kind="x", fields={"shape": (8, 8)})
    assert second == first
    assert place.content(place.root) == stored
    assert stored.keys() == {f"a b/{name}" for name in WHOLE}


@pytest.mark.parametrize(
    ("files", "fields", "reason"),
    [
        ({**FILES, "b.txt": b"Second"}, {"n": 1}, "b.txt differs"),
        ({**FILES, "new": b""}, {"n": 1}, "new differs"),
        ({"b.txt": b"second"}, {"n": 1}, "a.bin differs, as 2 more do"),
        (FILES, {"n": 2, "m": 0}, "fields m, n"),
        (FILES, {}, "fields n"),
    ],
)
def test_other_content_is_a_conflict(
    make: Make, place: Place, files: dict[str, bytes], fields: dict[str, int], reason: str
) -> None:
    uri = storage.join(place.root, "a b")
    first = storage.publish(make(), uri, kind="x", fields={"n": 1})
    with pytest.raises(storage.Conflict) as error:
        storage.publish(make("other", files), uri, kind="x", fields=fields)
    assert str(error.value) == (
        f"{uri} is published already, with other content ({reason}): "
        "delete it first, or publish elsewhere"
    )
    assert storage.verify(uri) == first
    assert place.content(uri).keys() == WHOLE


def test_another_kind_is_a_conflict(make: Make, uri: str) -> None:
    storage.publish(make(), uri, kind="x")
    with pytest.raises(storage.Conflict, match="kind x and not y"):
        storage.publish(make(), uri, kind="y")


def test_what_a_dead_writer_left_is_replaced(
    make: Make, place: Place, uri: str, tmp_path: Path
) -> None:
    fill(place, uri, {"a.bin": FILES["a.bin"], "b.txt": b"half", "old": b"", "deep/old": b""})
    assert not storage.is_published(uri)
    manifest = storage.publish(make(), uri, kind="x")
    assert storage.verify(uri) == manifest
    assert fetched(uri, tmp_path) == FILES
    assert storage.read_file(uri, "b.txt") == FILES["b.txt"]
    assert len(place.content(uri)) == len(WHOLE)


def test_a_parent_of_published_directories_is_not_replaced(make: Make, place: Place) -> None:
    inner = storage.join(place.root, "runs", "one")
    storage.publish(make(), inner, kind="x")
    with pytest.raises(UserError, match=r"one.* is published below it"):
        storage.publish(make(), storage.join(place.root, "runs"), kind="x")
    assert storage.verify(inner)


def test_nothing_at_all_can_be_published(make: Make, uri: str) -> None:
    storage.publish(make(files={}), uri, kind="promotion", fields={"model": "a"})
    assert storage.verify(uri).fields == {"model": "a"}


def test_a_published_directory_can_be_published_elsewhere(make: Make, root: str, uri: str) -> None:
    one = storage.join(root, "one")
    first = storage.publish(make(), one, kind="x", fields={"n": 1})
    second = storage.publish(path_of(one), uri, kind="x", fields={"n": 1})
    assert second.same_content(first)
    assert storage.verify(uri) == second


def test_links_to_files_are_followed(make: Make, uri: str, tmp_path: Path) -> None:
    (tmp_path / "behind").write_bytes(b"linked")
    source = make(files={"a": b""})
    (source / "link").symlink_to(tmp_path / "behind")
    storage.publish(source, uri, kind="x")
    assert fetched(uri, tmp_path) == {"a": b"", "link": b"linked"}


def test_what_is_no_file_is_refused_by_name(
    make: Make, place: Place, uri: str, tmp_path: Path
) -> None:
    folder = make("with_folder_link")
    (folder / "folder link").symlink_to(tmp_path)
    pipe = make("with_pipe")
    os.mkfifo(pipe / "a pipe")
    broken = make("with_broken")
    (broken / "broken").symlink_to("nowhere")
    for source, message in [
        (folder, "folder link: a link to a folder"),
        (pipe, "a pipe: neither a file nor a folder"),
        (broken, "broken: No such file"),
        (tmp_path / "absent", "absent: No such file"),
        (tmp_path / "with_pipe" / "b.txt", "b.txt: Not a directory"),
    ]:
        with pytest.raises(UserError, match=message):
            storage.publish(source, uri, kind="x")
    assert place.content(place.root) == {}


def test_a_name_that_is_not_utf_8_is_refused_by_name(make: Make, uri: str) -> None:
    source = make()
    (source / os.fsdecode(b"bad\xff")).write_bytes(b"")
    with pytest.raises(UserError, match=r"bad\\udcff.*its name is not UTF-8"):
        storage.publish(source, uri, kind="x")


def test_what_a_dead_fetch_left_is_not_published(make: Make, uri: str) -> None:
    source = make(files={"a": b"", "sub/.shards.0123456789ab.part/half": b""})
    manifest = storage.publish(source, uri, kind="x")
    assert [entry.path for entry in manifest.files] == ["a"]


def test_a_missing_manifest_is_said(place: Place, uri: str) -> None:
    fill(place, uri, FILES)
    for absent in (uri, storage.join(place.root, "nowhere"), storage.join(uri, "b.txt")):
        assert not storage.is_published(absent)
        for action in (storage.read_manifest, storage.verify):
            with pytest.raises(storage.NotPublished) as error:
                action(absent)
            assert str(error.value).startswith(f"{absent} is not published")


@pytest.mark.parametrize("path", ["../up", "/root", "a/../../up", "", ".", "a//b"])
def test_no_uri_leads_out_of_its_root(place: Place, uri: str, path: str) -> None:
    for action in (storage.join, storage.read_file):
        with pytest.raises(UserError):
            action(uri, path)
    assert place.content(place.root) == {}


def test_garbage_is_none_where_nobody_died(make: Make, place: Place, uri: str) -> None:
    storage.publish(make(), uri, kind="x")
    storage.write_bytes(storage.join(place.root, "history.jsonl"), b"")
    fill(place, storage.join(place.root, "mine"), {"a": b"", "deep/b": b""})
    before = place.content(place.root)
    assert storage.collect_garbage(place.root) == []
    assert place.content(place.root) == before


PUBLISH = """
import sys
from pathlib import Path
from trainer import storage
storage.publish(Path(sys.argv[1]), sys.argv[2], kind="x", fields={"n": sys.argv[3]})
"""


# `ru_maxrss` would begin with what the process that starts this one has taken.
WITHIN_MEMORY = """
import re, sys
from pathlib import Path
from trainer import storage
def most():
    return re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]
storage.is_published(sys.argv[2])
before = most()
storage.publish(Path(sys.argv[1]), sys.argv[2], kind="x")
storage.fetch(sys.argv[2], Path(sys.argv[3]))
print(most(), before)
"""


def kill_at_random(bucket: BucketPlace, source: Path, uri: str, seed: int) -> None:
    """Publish in a process that is killed before a random one of its requests is answered."""
    left = [random.Random(seed).randrange(1, 14)]
    process: list[subprocess.Popen[str]] = []
    begun, lock = threading.Event(), threading.Lock()

    def kill(_request: str) -> None:
        begun.wait()
        with lock:
            left[0] -= 1
            if left[0] == 0:
                process[0].kill()

    bucket.plan.before = kill
    try:
        process.append(start(PUBLISH, str(source), uri, str(seed)))
        begun.set()
        process[0].communicate()
    finally:
        begun.set()
        bucket.plan.before = None


def attacked(bucket: BucketPlace, make: Make, folder: Path, kills: int) -> None:
    """Kill publications of other content to the same URIs; readers see the old or the new."""
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
    for uri, manifest in storage.published(bucket.root):
        storage.verify(uri)
        name = storage.name_of(uri)
        named |= {f"{name}/{entry.stored_at}" for entry in manifest.files}
        named.add(f"{name}/MANIFEST.json")
    assert set(bucket.content(bucket.root)) == named


@pytest.mark.slow
def test_a_publisher_that_is_killed_leaves_the_old_or_the_new(
    bucket: BucketPlace, make: Make, tmp_path: Path
) -> None:
    attacked(bucket, make, tmp_path, kills=4)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_fifty_publishers_that_are_killed(bucket: BucketPlace, make: Make, tmp_path: Path) -> None:
    attacked(bucket, make, tmp_path, kills=50)


@pytest.mark.slow
@pytest.mark.parametrize("same", [False, True])
def test_publishers_at_once_have_one_winner_and_all_know(
    bucket: BucketPlace, make: Make, tmp_path: Path, same: bool
) -> None:
    sources = [make(f"s-{n}", {"a": b"%d" % (n * (not same)), f"b{n * (not same)}": b""})
               for n in range(4)]  # fmt: skip
    for number in range(3):
        uri = storage.join(bucket.root, f"step-{number}")
        if number == 1:
            fill(bucket, uri, {"a": b"half", "left": b""})
        barrier = threading.Barrier(len(sources))

        def act(source: Path, uri: str = uri, barrier: threading.Barrier = barrier) -> str:
            barrier.wait()
            try:
                storage.publish(source, uri, kind="x")
            except storage.Conflict:
                return "conflict"
            return "done"

        with ThreadPoolExecutor(len(sources)) as pool:
            ends = list(pool.map(act, sources))
        expected = ["done"] * 4 if same else ["conflict"] * 3 + ["done"]
        assert sorted(ends) == expected
        winner = sources[ends.index("done")]
        assert fetched(uri, tmp_path) == {p.name: p.read_bytes() for p in winner.iterdir()}
        assert len(bucket.content(uri)) == 3


def test_a_concurrent_upload_harms_nobody(bucket: BucketPlace, make: Make, tmp_path: Path) -> None:
    uri = storage.join(bucket.root, "a")
    slow, quick = make("slow", {"x": b"slow", "y": b"1"}), make("quick", {"x": b"quick"})
    uploaded, once = threading.Event(), threading.Event()

    def opponent(request: str) -> None:
        if once.is_set():
            return
        if request.startswith(("POST", "PUT")):
            uploaded.set()
        elif uploaded.is_set() and "MANIFEST.json" in request:
            once.set()
            with ThreadPoolExecutor(1) as pool:
                pool.submit(storage.publish, quick, uri, kind="x").result()

    bucket.plan.before = opponent
    try:
        with pytest.raises(storage.Conflict):
            storage.publish(slow, uri, kind="x")
    finally:
        bucket.plan.before = None
    assert once.is_set()
    storage.verify(uri)
    assert fetched(uri, tmp_path) == {"x": b"quick"}
    assert len(bucket.content(uri)) == 2


def test_garbage_of_the_dead_goes_and_that_of_the_living_stays(
    bucket: BucketPlace, make: Make
) -> None:
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


def kill_before_the_manifest(bucket: BucketPlace, source: Path, uri: str) -> None:
    process: list[subprocess.Popen[str]] = []
    begun, uploaded = threading.Event(), threading.Event()

    def kill(request: str) -> None:
        begun.wait()
        if request.startswith(("POST", "PUT")):
            uploaded.set()
        if uploaded.is_set() and "MANIFEST" in request:
            process[0].kill()

    bucket.plan.before = kill
    process.append(start(PUBLISH, str(source), uri, "1"))
    begun.set()
    process[0].communicate()
    bucket.plan.before = None


def test_what_a_living_process_writes_is_no_garbage(
    bucket: BucketPlace, make: Make, tmp_path: Path
) -> None:
    uri = storage.join(bucket.root, "a")
    collected: list[str] = []
    busy = threading.Event()

    def collect(request: str) -> None:
        if request.startswith(("POST", "PUT")) and len(bucket.content(uri)) and not busy.is_set():
            busy.set()
            with ThreadPoolExecutor(1) as pool:
                collected.extend(pool.submit(storage.collect_garbage, bucket.root).result())

    bucket.plan.before = collect
    try:
        storage.publish(make(files={f"{n}": b"%d" % n for n in range(40)}), uri, kind="x")
    finally:
        bucket.plan.before = None
    assert busy.is_set()
    assert collected == []
    assert len(fetched(uri, tmp_path)) == 40


@pytest.mark.long
@pytest.mark.timeout(1200)
# The client of `minio` is that of `s3`.
@pytest.mark.parametrize(
    "place",
    [
        "file",
        pytest.param("gs", marks=pytest.mark.long),
        "s3",
        pytest.param("minio", marks=pytest.mark.long),
    ],
    indirect=True,
)
def test_a_gigabyte_takes_less_than_200_mb_of_memory(place: Place, tmp_path: Path) -> None:
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


_flip = st.tuples(
    st.sampled_from(["a.bin", "b.txt", "ü/é"]), st.integers(0, 2**16), st.integers(0, 7)
)


@pytest.mark.slow
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=30,
)
@given(_flip)
def test_one_flipped_bit_is_found_and_named(
    make: Make, place: Place, uri: str, flip: tuple[str, int, int]
) -> None:
    name, position, bit = flip
    manifest = storage.publish(make(), uri, kind="x")
    data = bytearray(FILES[name])
    data[position % len(data)] ^= 1 << bit
    place.put(storage.join(uri, name), bytes(data))
    with pytest.raises(
        storage.Corrupt, match=r"has crc32c [0-9a-f]{8} \(expected [0-9a-f]{8}\)"
    ) as e:
        storage.verify(uri)
    assert name in str(e.value)
    place.put(storage.join(uri, name), FILES[name])
    assert storage.verify(uri) == manifest


def test_damage_of_other_kinds_is_named(make: Make, place: Place, uri: str) -> None:
    storage.publish(make(), uri, kind="x")
    file = storage.join(uri, "b.txt")
    place.put(file, b"secon")
    with pytest.raises(storage.Corrupt, match=r"b.txt has 5 bytes \(expected 6\); delete it"):
        storage.verify(uri)
    place.remove(file)
    with pytest.raises(storage.Corrupt, match=r"b.txt is missing \(expected 6 bytes\)"):
        storage.verify(uri)


def test_folders_and_files_in_each_others_place(make: Make, root: str) -> None:
    uri = storage.join(root, "a")
    storage.publish(make(files={"b.txt": b"1", "deep/file": b"1"}), uri, kind="x")
    (path_of(uri) / "deep" / "file").unlink()
    (path_of(uri) / "deep").rmdir()
    (path_of(uri) / "deep").write_bytes(b"")
    with pytest.raises(storage.Corrupt, match="deep/file is missing"):
        storage.verify(uri)
    (path_of(uri) / "b.txt").unlink()
    (path_of(uri) / "b.txt").mkdir()
    with pytest.raises(UserError, match="there is a folder where a file is needed"):
        storage.verify(uri)


def test_one_file_is_read_and_checked(make: Make, place: Place, uri: str) -> None:
    storage.publish(make(), uri, kind="x")
    for name, data in FILES.items():
        assert storage.read_file(uri, name) == data
    place.put(storage.join(uri, "more"), b"")
    with pytest.raises(storage.Missing, match="holds no more"):
        storage.read_file(uri, "more")
    with pytest.raises(storage.Missing, match=r"holds no b\.tx; did you mean 'b\.txt'\?"):
        storage.read_file(uri, "b.tx")
    place.put(storage.join(uri, "b.txt"), b"Second")
    with pytest.raises(storage.Corrupt, match=r"b\.txt has crc32c"):
        storage.read_file(uri, "b.txt")
    place.remove(storage.join(uri, "b.txt"))
    with pytest.raises(storage.Corrupt, match=r"b\.txt is missing"):
        storage.read_file(uri, "b.txt")
    with pytest.raises(storage.NotPublished):
        storage.read_file(place.root, "b.txt")


def test_files_that_no_manifest_names_do_not_matter(make: Make, place: Place, uri: str) -> None:
    manifest = storage.publish(make(), uri, kind="x")
    place.put(storage.join(uri, "more"), b"")
    assert storage.verify(uri) == manifest


def test_a_damaged_manifest_is_neither_absent_nor_replaced(
    make: Make, place: Place, uri: str
) -> None:
    storage.publish(make(), uri, kind="x")
    place.put(storage.join(uri, "MANIFEST.json"), b"{")
    assert storage.is_published(uri)
    for action in (storage.read_manifest, storage.verify):
        with pytest.raises(storage.Corrupt, match=r"MANIFEST\.json is damaged"):
            action(uri)
    with pytest.raises(storage.Corrupt):
        storage.publish(make(), uri, kind="x")
    storage.delete(uri)
    storage.publish(make(), uri, kind="x")
    storage.verify(uri)


@pytest.fixture
def uri_published(make: Make, place: Place) -> str:
    uri_published = storage.join(place.root, "published")
    storage.publish(make(), uri_published, kind="x", fields={"n": 1})
    return uri_published


def test_it_brings_all_files_and_nothing_else(uri_published: str, tmp_path: Path) -> None:
    target = tmp_path / "new" / "ö ö"
    assert storage.fetch(uri_published, target) == storage.read_manifest(uri_published)
    assert content(target) == FILES
    assert left_over(tmp_path) == []


def test_only_picks_by_path(uri_published: str, tmp_path: Path) -> None:
    manifest = storage.fetch(
        uri_published, tmp_path / "a", only=lambda path: path.endswith((".bin", "é"))
    )
    assert content(tmp_path / "a").keys() == {"a.bin", "ü/é"}
    assert len(manifest.files) == len(FILES)
    storage.fetch(uri_published, tmp_path / "a", only=lambda path: path == "b.txt")
    assert content(tmp_path / "a").keys() == {"a.bin", "b.txt", "ü/é"}
    storage.fetch(uri_published, tmp_path / "none", only=lambda _: False)
    assert (tmp_path / "none").is_dir()


def test_a_relative_folder(
    uri_published: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    storage.fetch(uri_published, Path("here"))
    assert content(tmp_path / "here") == FILES


def test_an_empty_folder_is_filled_and_an_empty_one_published(
    uri_published: str, make: Make, place: Place, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    storage.fetch(uri_published, tmp_path / "empty")
    assert content(tmp_path / "empty") == FILES
    nothing = storage.join(place.root, "nothing")
    storage.publish(make("none", {}), nothing, kind="x")
    storage.fetch(nothing, tmp_path / "of nothing")
    assert (tmp_path / "of nothing").is_dir()


def test_what_is_right_is_kept_and_the_rest_is_mended(
    uri_published: str, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore if isinstance(place, FilePlace) else ObjectStore
    target = tmp_path / "a"
    storage.fetch(uri_published, target)
    (target / "b.txt").write_bytes(b"broken")
    (target / "deep/er/c d.txt").unlink()
    (target / "mine").write_bytes(b"not theirs")
    before = (target / "a.bin").stat()
    brought = []
    real = store.download

    def download(self: Any, source: str, to: Path) -> None:
        brought.append(source)
        real(self, source, to)

    monkeypatch.setattr(store, "download", download)
    storage.fetch(uri_published, target)
    assert content(target) == {**FILES, "mine": b"not theirs"}
    assert (target / "a.bin").stat() == before
    wanted = [storage.join(uri_published, name) for name in ("b.txt", "deep/er/c d.txt")]
    assert sorted(brought) == sorted(wanted)
    storage.fetch(uri_published, target)
    assert len(brought) == 2


@pytest.mark.slow
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=20,
)
@given(st.tuples(st.sampled_from(["a.bin", "ü/é"]), st.integers(0, 2**16), st.integers(0, 7)))
def test_a_flipped_bit_at_the_source_never_arrives(
    uri_published: str, place: Place, tmp_path: Path, flip: tuple[str, int, int]
) -> None:
    name, position, bit = flip
    data = bytearray(FILES[name])
    data[position % len(data)] ^= 1 << bit
    place.put(storage.join(uri_published, name), bytes(data))
    with pytest.raises(storage.Corrupt, match=name):
        storage.fetch(uri_published, tmp_path / "fresh")
    assert not (tmp_path / "fresh").exists()
    place.put(storage.join(uri_published, name), FILES[name])


def test_a_failure_leaves_the_folder_as_it_was(
    uri_published: str, place: Place, tmp_path: Path
) -> None:
    target = tmp_path / "a"
    target.mkdir()
    (target / "mine").write_bytes(b"x")
    place.remove(storage.join(uri_published, "ü/é"))
    with pytest.raises(storage.Corrupt, match="ü/é is missing"):
        storage.fetch(uri_published, target)
    assert content(target) == {"mine": b"x"}
    assert left_over(tmp_path) == []


def test_a_copy_that_goes_wrong_on_the_way_is_found(
    uri_published: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def truncate(_: object, __: str, target: Path) -> None:
        target.write_bytes(b"")

    for store in (FileStore, ObjectStore):
        monkeypatch.setattr(store, "download", truncate)
    with pytest.raises(storage.Corrupt, match=r"has 0 bytes \(expected \d+\)"):
        storage.fetch(uri_published, tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_nothing_published(place: Place, tmp_path: Path) -> None:
    with pytest.raises(storage.NotPublished):
        storage.fetch(place.root, tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_manifest_that_leads_out_of_the_folder_writes_nothing(
    uri_published: str, place: Place, tmp_path: Path
) -> None:
    manifest = storage.join(uri_published, "MANIFEST.json")
    place.put(manifest, place.get(manifest).replace(b'"b.txt"', b'"../escaped"'))
    with pytest.raises(storage.Corrupt, match=r"'\.\./escaped' is not a path below"):
        storage.fetch(uri_published, tmp_path / "in" / "a")
    assert not (tmp_path / "in").exists()


@pytest.mark.parametrize(
    ("in_the_way", "reason"),
    [("a", "Not a directory"), ("parent", "there is a file where a folder is needed")],
)
def test_a_file_in_the_way(
    uri_published: str, tmp_path: Path, in_the_way: str, reason: str
) -> None:
    (tmp_path / in_the_way).write_bytes(b"mine")
    target = tmp_path / "parent" / "a" if in_the_way == "parent" else tmp_path / "a"
    with pytest.raises(UserError, match=f"cannot fetch .*{reason}"):
        storage.fetch(uri_published, target)
    assert (tmp_path / in_the_way).read_bytes() == b"mine"
    assert left_over(tmp_path) == []


def test_a_folder_in_a_files_place(uri_published: str, tmp_path: Path) -> None:
    (tmp_path / "a" / "b.txt" / "mine").mkdir(parents=True)
    with pytest.raises(UserError, match="there is a folder where a file is needed"):
        storage.fetch(uri_published, tmp_path / "a")
    assert left_over(tmp_path) == []


def test_another_fetch_that_is_done_first_is_no_error(
    uri_published: str, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore if isinstance(place, FilePlace) else ObjectStore
    real = store.download

    def download(self: Any, source: str, to: Path) -> None:
        monkeypatch.setattr(store, "download", real)
        storage.fetch(uri_published, tmp_path / "a")
        real(self, source, to)

    monkeypatch.setattr(store, "download", download)
    storage.fetch(uri_published, tmp_path / "a")
    assert content(tmp_path / "a") == FILES
    assert left_over(tmp_path) == []


def test_an_error_while_it_appears_is_reported(
    uri_published: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(source: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted", str(source), None, str(target))

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(UserError, match="not permitted; make it accessible to this user"):
        storage.fetch(uri_published, tmp_path / "a")
    assert left_over(tmp_path) == []


def test_what_a_dead_fetch_has_brought_is_not_fetched_again(
    bucket: BucketPlace, make: Make, tmp_path: Path
) -> None:
    uri_published = storage.join(bucket.root, "published")
    storage.publish(make(), uri_published, kind="x")
    dead = ".a.0123456789ab.part"
    make(dead, {"a.bin": FILES["a.bin"], "b.txt": b"half", "of another": b""})
    make(".a.b.0123456789ab.part", {"of another": b""})
    bucket.plan.requests.clear()
    storage.fetch(uri_published, tmp_path / "a")
    assert content(tmp_path / "a") == FILES
    assert not any("a.bin" in request for request in bucket.plan.requests)
    assert any("b.txt" in request for request in bucket.plan.requests)
    assert left_over(tmp_path) == []


def test_published_lists_by_name_and_kind(make: Make, place: Place) -> None:
    root = place.root
    for name, kind in [("step-9", "checkpoint"), ("step-10", "checkpoint"), ("Ü 1", "model")]:
        storage.publish(make(), storage.join(root, name), kind=kind, fields={"name": name})
    fill(place, root, {"history.jsonl": b"", "half/a": b"", ".hidden/MANIFEST.json": b"{}"})
    assert [m.fields["name"] for _, m in storage.published(root)] == ["step-10", "step-9", "Ü 1"]
    assert [uri for uri, _ in storage.published(root, "checkpoint")] == [
        storage.join(root, "step-10"),
        storage.join(root, "step-9"),
    ]
    assert storage.published(root, "dataset") == []


def test_the_newest_is_found_by_manifests(make: Make, place: Place) -> None:
    assert storage.newest(place.root) is None
    for name, kind in [("b", "x"), ("a", "x"), ("c", "y")]:
        uri = storage.join(place.root, name)
        manifest = storage.publish(make(), uri, kind=kind, fields={"name": name})
        assert storage.newest(place.root) == (uri, manifest)
    found = storage.newest(place.root, "x")
    assert found
    assert found[0] == storage.join(place.root, "a")
    storage.delete(storage.join(place.root, "a"))
    found = storage.newest(place.root, "x")
    assert found
    assert found[0] == storage.join(place.root, "b")


def test_published_of_nothing(place: Place) -> None:
    assert storage.published(place.root) == []


def test_published_of_a_file(root: str, make: Make) -> None:
    make(str(path_of(root)), {"file": b""})
    with pytest.raises(UserError, match=r"cannot list .*file: Not a directory"):
        storage.published(storage.join(root, "file"))


def test_published_passes_over_what_it_cannot_read_and_says_so(
    make: Make, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    root = place.root
    for name in ("a", "b", "c"):
        storage.publish(make(), storage.join(root, name), kind="x")
    place.put(uri_below(root, "a"), b"torn")
    newer = place.get(uri_below(root, "b")).replace(b'"schema": 1', b'"schema": 2')
    place.put(uri_below(root, "b"), newer)
    with caplog.at_level(logging.WARNING):
        assert [uri for uri, _ in storage.published(root)] == [storage.join(root, "c")]
    assert sorted(record.getMessage().split(" (")[0] for record in caplog.records) == [
        f"passed over: {storage.join(root, 'a')}: MANIFEST.json is damaged",
        f"passed over: {storage.join(root, 'b')}: MANIFEST.json has schema 2 and this version "
        "reads 1: use the version that wrote it, or make it again",
    ]


def uri_below(root: str, name: str) -> str:
    return storage.join(root, name, "MANIFEST.json")


def test_delete_takes_all_and_may_be_repeated(make: Make, place: Place) -> None:
    root = place.root
    uri, other = storage.join(root, "a"), storage.join(root, "ab")
    storage.publish(make(), uri, kind="x")
    storage.publish(make(), other, kind="x")
    storage.delete(uri)
    storage.delete(uri)
    storage.delete(storage.join(root, "never", "was"))
    assert {path.partition("/")[0] for path in place.content(root)} == {"ab"}
    storage.publish(make("new", {"n": b""}), uri, kind="y")


def test_delete_of_a_file(place: Place) -> None:
    storage.write_bytes(storage.join(place.root, "file"), b"1")
    storage.delete(storage.join(place.root, "file"))
    assert place.content(place.root) == {}


def test_delete_of_a_link(make: Make, root: str) -> None:
    kept = make("kept")
    path_of(root).mkdir()
    (path_of(root) / "link").symlink_to(kept)
    storage.delete(storage.join(root, "link"))
    assert list(path_of(root).iterdir()) == []
    assert content(kept) == FILES


def test_bytes_are_written_read_and_replaced(place: Place) -> None:
    uri = storage.join(place.root, "a b", "history.jsonl")
    with pytest.raises(
        storage.Missing, match=r"there is nothing at (file:///|gs://|s3://|minio://)"
    ):
        storage.read_bytes(uri)
    for data in (b"", b"one\n", b"two\n" * 1000, b"\0\xff"):
        storage.write_bytes(uri, data)
        assert storage.read_bytes(uri) == data
    assert place.content(place.root).keys() == {"a b/history.jsonl"}


def test_bytes_below_a_file_are_missing(place: Place) -> None:
    uri = storage.join(place.root, "file")
    storage.write_bytes(uri, b"")
    with pytest.raises(storage.Missing):
        storage.read_bytes(storage.join(uri, "below"))

"""Tests that full disks, limits and endless responses are reported and leave no partial file."""

import errno
import os
import shutil
import threading
from pathlib import Path

import pytest
from botocore import exceptions as boto

from flotilla.trainer import storage
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.storage import gcs, object_store, s3, store
from flotilla.trainer.storage.errors import StoreUnavailable, report_errors
from flotilla.trainer.storage.store import ChangedError, DamagedInTransitError, list_pages
from flotilla.trainer.storage.uri import Endpoint, find_endpoint, locate
from tests.stores.fixtures import bucket_name

from .conftest import left_over, start
from .places import BucketPlace, content, path_of

PUBLISH_WITHIN_A_LIMIT = """
import resource, sys
from pathlib import Path
from flotilla.trainer import storage
from flotilla.trainer.runtime.errors import UserError
source, uri, limit = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
try:
    storage.publish(Path(source), uri, kind="x")
except UserError as error:
    print(error)
try:
    storage.write_bytes(uri + "-text", bytes(2 * int(limit)))
except UserError as error:
    print(error)
try:
    storage.fetch(uri + "-other", Path(source + "-fetched"))
except UserError as error:
    print(error)
"""


def failing(number):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    return fail


def test_a_limit_on_files_that_the_system_enforces(make, root, tmp_path):
    uri = storage.join(root, "a")
    source = make(files={"small": b"1", "large": bytes(40_000)})
    storage.publish(source, uri + "-other", kind="x")
    process = start(PUBLISH_WITHIN_A_LIMIT, str(source), uri, "20000")
    output, _ = process.communicate()
    assert process.returncode == 0
    lines = output.splitlines()
    assert len(lines) == 3
    actions = (f"cannot publish {source}", "cannot write", "cannot fetch")
    for line, action in zip(lines, actions, strict=True):
        assert line.startswith(action)
        assert line.endswith(
            "File too large; raise the file size limit (ulimit -f), or use another file system"
        )
    assert [path.name for path in path_of(root).iterdir()] == ["a-other"]
    assert not (tmp_path / "source-fetched").exists()
    assert left_over(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "number"),
    [("os.fsync", errno.ENOSPC), ("shutil.copyfile", errno.EDQUOT), ("os.rename", errno.EIO)],
)
def test_a_disk_that_fails_while_publishing(make, root, monkeypatch, name, number):
    source, uri = make(), storage.join(root, "a")
    old = storage.join(root, "old")
    manifest = storage.publish(source, old, kind="checkpoint")
    with monkeypatch.context() as patch:
        patch.setattr(name, failing(number))
        with pytest.raises(UserError, match=os.strerror(number)) as error:
            storage.publish(source, uri, kind="x")
    assert str(error.value).startswith(f"cannot publish {source} to {uri}: ")
    if number != errno.EIO:
        assert str(error.value).endswith(
            "free some space, or set storage.root to a location with more"
        )
    assert storage.list_published(root) == [(old, manifest)]
    assert storage.verify(old)
    assert left_over(path_of(root)) == []
    assert not path_of(uri).exists()
    storage.publish(source, uri, kind="x")
    storage.verify(uri)


@pytest.mark.parametrize(("module", "name"), [(os, "fsync"), (os, "replace")])
def test_a_disk_that_is_full_while_a_file_is_replaced(root, monkeypatch, module, name):
    uri = storage.join(root, "a")
    storage.write_bytes(uri, b"old")
    with monkeypatch.context() as patch:
        patch.setattr(module, name, failing(errno.ENOSPC))
        with pytest.raises(UserError, match="No space left on device"):
            storage.write_bytes(uri, b"new")
    assert content(path_of(root)) == {"a": b"old"}
    assert left_over(path_of(root)) == []


def test_all_is_on_the_disk_before_it_shows(make, root, monkeypatch):
    synced = []
    before = []
    real_sync, real_rename = os.fsync, os.rename

    def sync(descriptor):
        synced.append(os.fstat(descriptor).st_ino)
        real_sync(descriptor)

    def rename(source, target):
        before.extend(synced)
        real_rename(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", rename)
    uri = storage.join(root, "a")
    storage.publish(make(), uri, kind="x")
    there = path_of(uri)
    assert {path.stat().st_ino for path in [there, *there.rglob("*")]} == set(before)
    assert synced[len(before) :] == [there.parent.stat().st_ino]


def test_a_copy_that_differs_from_its_source_is_not_published(make, root, monkeypatch):
    real = shutil.copyfile

    def copy(source, target):
        real(source, target)
        if target.name == "a.bin":
            target.write_bytes(b"wrong")

    monkeypatch.setattr(shutil, "copyfile", copy)
    uri = storage.join(root, "a")
    with pytest.raises(UserError, match=r"a\.bin changed during the copy, or the copy is damaged"):
        storage.publish(make(), uri, kind="x")
    assert list(path_of(root).iterdir()) == []


def test_a_source_that_vanishes_is_reported(make, root, monkeypatch):
    source = make()
    real = shutil.copyfile

    def copy(one, two):
        shutil.rmtree(source, ignore_errors=True)
        real(one, two)

    monkeypatch.setattr(shutil, "copyfile", copy)
    with pytest.raises(UserError, match=r"cannot publish .*a\.bin: No such file"):
        storage.publish(source, storage.join(root, "a"), kind="x")


@pytest.mark.parametrize("below", [(), ("sub",), ("sub", "sub")])
def test_a_file_in_the_folders_place(make, root, below):
    path_of(root).write_bytes(b"mine")
    uri = storage.join(root, *below)
    remedy = "there is a file where a folder is expected; move it away"
    with pytest.raises(UserError, match=f"cannot publish .*{remedy}"):
        storage.publish(make(), uri, kind="x")
    if below:
        with pytest.raises(UserError, match=f"cannot write .*{remedy}"):
            storage.write_bytes(uri, b"")
    assert path_of(root).read_bytes() == b"mine"


def test_a_folder_in_the_files_place(make, root):
    uri = storage.join(root, "a")
    storage.publish(make(), uri, kind="x")
    remedy = "there is a folder where a file is expected; move it away"
    with pytest.raises(UserError, match=f"cannot write .*{remedy}"):
        storage.write_bytes(uri, b"")
    with pytest.raises(UserError, match=f"cannot read .*{remedy}"):
        storage.read_bytes(uri)
    assert storage.verify(uri)


def test_no_permission(make, root, monkeypatch):
    source = make()
    monkeypatch.setattr(Path, "mkdir", failing(errno.EACCES))
    with pytest.raises(UserError, match="Permission denied; make it accessible to this user"):
        storage.publish(source, storage.join(root, "a"), kind="x")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space", b"/a/\xff"), "cannot x: /a/\\udcff: No space; free"),
        (OSError("odd"), "cannot x: odd"),
        (OSError(), "cannot x: OSError"),
        (OSError(errno.EIO, "I/O error", 7), "cannot x: I/O error"),
        (OSError(errno.EIO, "I/O error", "/hidden", None, "/asked"), "cannot x: /asked: I/O"),
    ],
)
def test_errors_are_one_line(error, message):
    with pytest.raises(UserError) as caught, report_errors("x"):
        raise error
    assert str(caught.value).startswith(message)
    assert caught.value.__cause__ is error


def test_other_errors_pass_unchanged():
    with pytest.raises(ZeroDivisionError), report_errors("x"):
        raise ZeroDivisionError
    with pytest.raises(storage.Missing), report_errors("x"):
        raise storage.Missing


def transient(error):
    return isinstance(error, TimeoutError)


def test_a_request_that_goes_on_for_ever_ends_with_the_deadline(monkeypatch):
    monkeypatch.setenv(store.VARIABLE, "0.1")
    monkeypatch.setattr(store, "LEAST_SECONDS", 0.05)
    free, asked = threading.Event(), store.Retry()
    with pytest.raises(StoreUnavailable, match=r"for 0\.1 s \(no complete response arrived\)"):
        asked.call("s3://b", lambda: asked.within_deadline(free.wait), transient)
    free.set()


def test_an_error_of_the_request_is_raised_as_it_is():
    def refuse():
        raise KeyError("x")

    with pytest.raises(KeyError):
        store.Retry().within_deadline(refuse)


def test_a_byte_now_and_then_is_no_progress(clock):
    asked = store.Retry()
    for _ in range(10):
        clock.passed += 60
        asked.progress(100)
    assert asked._seconds_left() == pytest.approx(store.DEADLINE - 600)
    asked.progress(store.PROGRESS_BYTES)
    assert asked._seconds_left() == pytest.approx(store.DEADLINE)


@pytest.mark.parametrize(
    ("page", "tokens"),
    [(["entry"], ["a", "a"]), (["entry"], ["a", "b", "a"]), ([], map(str, range(2000)))],
)
def test_a_listing_whose_token_comes_again_or_whose_pages_are_empty_ends(page, tokens):
    left = iter(tokens)
    with pytest.raises(DamagedInTransitError, match="does not end"):
        list(list_pages(lambda _: (page, next(left))))


class Repeating:
    """A client of S3 or Google Cloud Storage whose listing never ends."""

    prefixes: tuple[str, ...] = ()
    next_page_token = "again"

    def __getattr__(self, _operation):
        return lambda **_: {"IsTruncated": True, "NextContinuationToken": "again"}

    def list_blobs(self, *_, **__):
        return self

    @property
    def pages(self):
        return iter(())


@pytest.mark.parametrize("kind", [s3.S3Bucket, gcs.GcsBucket])
def test_neither_store_lists_for_ever(kind, monkeypatch):
    monkeypatch.setattr(kind, "_client", Repeating())
    made = kind("b", *([Endpoint()] if kind is s3.S3Bucket else []), lambda request: request())
    for listed in (made.walk, made.names):
        with pytest.raises(DamagedInTransitError):
            list(listed("a/"))


def test_only_the_uploads_that_our_writer_has_marked_are_aborted(make, request, monkeypatch):
    place = BucketPlace(request.getfixturevalue("s3"), f"s3://{bucket_name()}/team")
    uri, bucket = storage.join(place.root, "model"), locate(place.root).bucket
    client = s3.client(os.getpid(), find_endpoint(locate(uri)))
    foreign = locate(storage.join(place.root, "other-tool", "backup.tar")).key
    client.create_multipart_upload(Bucket=bucket, Key=foreign)

    def killed(*_):
        raise boto.ClientError({}, "abort")

    def changed(*_):
        raise ChangedError

    source = make(files={"large": bytes((8 << 20) + 1)})
    with monkeypatch.context() as patch:
        patch.setattr(s3.S3Bucket, "_abort", killed)
        patch.setattr(s3.S3Bucket, "_parts", changed)
        with pytest.raises(UserError):
            storage.publish(source, uri, kind="x")

    def uploads():
        found = client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])
        return [each["Key"] for each in found]

    assert sorted(uploads()) == [f"{locate(uri).key}/large", foreign]
    # The writer still runs, so its upload is not garbage.
    assert storage.collect_garbage(place.root) == []
    monkeypatch.setattr(object_store, "is_gone", lambda _: True)
    (mark,) = storage.collect_garbage(place.root)
    assert mark.endswith(".flotilla-upload")
    assert uploads() == [foreign]
    assert place.content(place.root) == {}
    storage.publish(source, uri, kind="x")
    # A successful upload leaves no mark.
    assert sorted(place.content(uri)) == ["MANIFEST.json", "large"]

"""Tests that a probe reports what a storage location lacks, and leaves no file."""

import threading
from contextlib import contextmanager, suppress

import pytest

from flotilla.trainer import storage
from flotilla.trainer.storage import store
from flotilla.trainer.storage.probe import Probe, Unfit
from tests.stores.faults import Fault
from tests.stores.fixtures import bucket_name


@pytest.fixture
def without_retries(monkeypatch):
    monkeypatch.setattr("flotilla.trainer.storage.probe.SECONDS", 0.3)


def unfit(probe):
    with pytest.raises(Unfit) as caught:
        probe.examine()
    return caught.value


def test_what_is_there_stays(place):
    other = storage.join(place.root, "other")
    place.put(other, b"mine")
    probe = Probe(place.root)
    assert probe.uri != Probe(place.root).uri
    probe.examine()
    assert not probe.is_left
    assert place.content(place.root) == {"other": b"mine"}


def test_folders_that_were_made_go_again(tmp_path):
    (tmp_path / "a").mkdir()
    Probe(storage.uri_of(tmp_path / "a" / "b" / "c")).examine()
    assert list(tmp_path.rglob("*")) == [tmp_path / "a"]


def test_a_folder_that_somebody_uses_meanwhile_stays(tmp_path):
    probe = Probe(storage.uri_of(tmp_path / "a" / "b"))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "other").touch()
    probe.examine()
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "a", tmp_path / "a" / "other"]


def test_a_file_in_the_place_of_a_folder(tmp_path):
    (tmp_path / "a").write_text("x")
    error = unfit(Probe(storage.uri_of(tmp_path / "a" / "b")))
    assert (error.trouble, error.actions[0]) == ("FILES", "write")
    assert (tmp_path / "a").read_text() == "x"


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_a_bucket_that_is_not_there(scheme, request):
    request.getfixturevalue("gcs" if scheme == "gs" else "s3")
    error = unfit(Probe(f"{scheme}://{bucket_name()}/k"))
    assert (error.trouble, error.actions) == ("NO_BUCKET", ("write",))


@pytest.mark.parametrize("method", ["POST|PUT", "GET", "DELETE"])
def test_a_permission_that_is_missing(bucket, method):
    for each in method.split("|"):
        bucket.plan.add(Fault(403, method=each, times=99))
    error = unfit(Probe(bucket.root))
    expected = {"POST|PUT": ("write",), "GET": ("read", "list"), "DELETE": ("delete",)}
    assert (error.trouble, error.actions) == ("DENIED", expected[method])
    assert len(bucket.content(bucket.root)) == (method == "DELETE")


@pytest.mark.usefixtures("without_retries")
def test_a_store_that_is_not_there_is_not_waited_for(bucket, caplog):
    bucket.plan.add(Fault("drop", times=10**6))
    probe = Probe(bucket.root)
    error = unfit(probe)
    assert (error.trouble, error.actions) == ("SILENT", ("write", "delete"))
    # The probe cannot know whether its file was written.
    assert probe.is_left
    assert caplog.records == []


@pytest.mark.usefixtures("without_retries")
def test_what_was_written_is_removed_when_the_answer_was_lost(bucket):
    for method in ("POST", "PUT"):
        bucket.plan.add(Fault("lose", method=method, times=10**6))
    probe = Probe(bucket.root)
    assert unfit(probe).actions == ("write",)
    assert (probe.is_left, bucket.content(bucket.root)) == (False, {})


def test_a_short_trouble_is_passed_over(bucket):
    bucket.plan.add(Fault(503, times=2))
    Probe(bucket.root).examine()
    assert bucket.content(bucket.root) == {}


def test_a_probe_that_is_stopped_removes_what_it_wrote(bucket):
    probe = Probe(bucket.root)
    asked = []

    def before(request):
        asked.append(request.split()[0])
        probe.stop()

    with bucket.before_requests(before):
        probe.examine()
    assert "GET" not in asked
    assert (probe.is_left, bucket.content(bucket.root)) == (False, {})


@contextmanager
def held_up(bucket, *methods):
    """Delay the first request with one of these methods until the block ends.

    Yield an event that is set when this request arrives.
    """
    waiting, free = threading.Event(), threading.Event()

    def before(request):
        if request.startswith(methods) and not waiting.is_set():
            waiting.set()
            free.wait(60)

    try:
        with bucket.before_requests(before):
            yield waiting
    finally:
        free.set()


def test_another_thread_may_remove_it(bucket):
    probe = Probe(bucket.root)

    def examine():
        # The check fails because the probe's file has been deleted.
        with suppress(Unfit):
            probe.examine()

    working = threading.Thread(target=examine)
    with held_up(bucket, "GET") as waiting:
        working.start()
        assert waiting.wait(60)
        probe.remove()
        assert (probe.is_left, bucket.content(bucket.root)) == (False, {})
    working.join()
    assert bucket.content(bucket.root) == {}


def test_what_arrives_after_it_was_removed_is_not_forgotten(bucket):
    probe = Probe(bucket.root)
    working = threading.Thread(target=probe.examine)
    with held_up(bucket, "POST", "PUT") as waiting:
        working.start()
        assert waiting.wait(60)
        probe.stop()
        probe.remove()
        assert probe.is_left
    working.join()
    assert (probe.is_left, bucket.content(bucket.root)) == (False, {})


def test_retries_come_back():
    before = store.Retry()._seconds
    with store.shorter_retry(1.0):
        assert store.Retry()._seconds == 1.0
    assert store.Retry()._seconds == before == store.DEADLINE

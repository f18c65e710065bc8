"""Checkpoints in an object store: training never waits for it, and no saved checkpoint is lost."""

import json
import threading
from contextlib import nullcontext, suppress

import pytest

from flotilla.trainer import events, storage
from flotilla.trainer.checkpoints.checkpoints import (
    Checkpoints,
    RemoteCheckpoints,
    open_checkpoints,
)
from flotilla.trainer.checkpoints.history import read_history
from flotilla.trainer.checkpoints.index import list_checkpoints
from flotilla.trainer.cluster.lease import Lease, LeaseLostError, NoLease, holders, lease_uri
from flotilla.trainer.events import CheckpointPassedOver
from flotilla.trainer.runtime.errors import ClusterLostError, RunInterruptedError, UserError
from tests.stores.faults import Fault
from tests.stores.fixtures import bucket_name
from tests.trainer.checkpoints.test_checkpoints import restored, save, variables

ROW = {"global_step": 1500, "loss": 0.5, "seconds": 1.0}


@pytest.fixture
def server(gcs):
    return gcs


@pytest.fixture
def uri(server):
    bucket = bucket_name()
    server.create_bucket(bucket)
    return f"gs://{bucket}/run/checkpoints"


@pytest.fixture
def of(uri, tmp_path):
    """Return a function that opens a task's checkpoints. Each `machine` has its own disk."""

    def _of(machine="chief-0", keep=3, fingerprint="", alone=True):
        scratch = tmp_path / machine
        kept = open_checkpoints(
            uri, keep=keep, scratch=scratch, fingerprint=fingerprint, alone=alone
        )
        made.append(kept)
        return kept

    made = []
    yield _of
    # Finish the uploads of all attempts before the fake store stops.
    for kept in made:
        with suppress(UserError, ZeroDivisionError), kept.flush_at_end():
            pass


@pytest.fixture
def blocked(of, server):
    """Delay write requests. Yield an event that ends the delay, and one that a request sets."""
    assert of
    free, came = threading.Event(), threading.Event()

    def before(request):
        if request.startswith(("POST", "PUT")):
            came.set()
            assert free.wait(60)

    server.plan.before = before
    yield free, came
    free.set()
    server.plan.before = None


def save_and_end(kept, step, end=None):
    with kept.flush_at_end():
        save(kept, step)
        if end:
            raise end


def steps(uri):
    return [step for _, step in list_checkpoints(uri)]


def test_a_file_system_needs_no_upload_queue(tmp_path):
    root = storage.uri_of(tmp_path)
    kept = open_checkpoints(root, keep=3, scratch=tmp_path, fingerprint="", alone=True)
    assert type(kept) is Checkpoints


def test_what_is_saved_is_published_when_the_block_is_left(of, uri):
    kept = of()
    with kept.flush_at_end():
        at = save(kept, 1500, strategy="counting")
        kept.history.begin([ROW])
    assert at == storage.join(uri, "step-00001500")
    assert storage.verify(at).fields["strategy"] == "counting"
    assert read_history(uri) == [ROW]
    found = of("another machine").newest()
    assert (found.uri, found.global_step) == (at, 1500)
    assert restored(found)["global_step"] == 1500


def test_saving_does_not_wait_for_the_store(of, uri, blocked):
    free, came = blocked
    kept = of()
    with kept.flush_at_end():
        for step in range(1, 6):
            save(kept, step)
            assert came.wait(60)
        assert steps(uri) == []
        free.set()
    # The first checkpoint was being uploaded, and the newest replaced the others in the queue.
    assert steps(uri) == [1, 5]


def test_what_was_not_published_is_found_on_this_machine_and_published(of, uri, monkeypatch):
    first = of()
    # The attempt is killed before anything is uploaded.
    monkeypatch.setattr(first, "_queue", lambda _name: None)
    save(first, 10)
    second = of()
    with second.flush_at_end():
        found = second.newest()
        assert found.global_step == 10
        assert restored(found)["global_step"] == 10
        assert second.last == storage.join(uri, "step-00000010")
    assert storage.verify(storage.join(uri, "step-00000010"))
    assert of("another machine").newest().global_step == 10


def test_tasks_side_by_side_take_only_what_all_of_them_can_find(of, blocked):
    kept = of()
    save(kept, 10)
    assert of(alone=False).newest() is None
    blocked[0].set()
    save_and_end(kept, 20)
    assert of(alone=False).newest().global_step == 20
    assert of("another machine", alone=False).newest().global_step == 20


def test_the_oldest_go_and_what_was_published_does_not_stay_here(of, uri, tmp_path):
    kept = of(keep=2)
    for step in (1, 2, 3, 4):
        save_and_end(kept, step)
    assert steps(uri) == [3, 4]
    assert not list((tmp_path / "chief-0" / "unpublished").glob("step-*"))


def test_a_flipped_bit_is_passed_over_and_said(of, uri, server, tmp_path, monkeypatch):
    monkeypatch.setenv(events.VARIABLE, str(tmp_path / "events.jsonl"))
    kept = of()
    for step in (1, 2):
        save_and_end(kept, step)
    bucket, _, key = uri.partition("://")[2].partition("/")
    for name in ("variables.index", "variables.data-00000-of-00001"):
        at = f"{key}/step-00000002/{name}"
        content = bytearray(server.content(bucket, at))
        content[len(content) // 2] ^= 1
        whole = server.content(bucket, at)
        server.replace(bucket, at, bytes(content))
        found = of().newest()
        assert found.global_step == 1
        happened = list(events.read(tmp_path / "events.jsonl"))
        passed = [each for each in happened if isinstance(each, CheckpointPassedOver)][-1]
        assert passed.uri.endswith("step-00000002")
        assert name in passed.reason
        server.replace(bucket, at, whole)
    server.replace(bucket, f"{key}/step-00000002/variables.index", b"other")
    again = of()
    with again.flush_at_end():
        again.newest()
        save(again, 2)
    assert of().newest().global_step == 2


def test_a_store_that_is_away_for_a_while_does_not_end_training(
    of, uri, server, monkeypatch, tmp_path
):
    monkeypatch.setenv("FLOTILLA_STORAGE_DEADLINE", "0.2")
    monkeypatch.setenv(events.VARIABLE, str(tmp_path / "events.jsonl"))
    kept = of()
    with kept.flush_at_end():
        server.plan.add(Fault(503, times=10_000))
        save(kept, 1)
        kept.uploads._change.acquire()
        kept.uploads._wait()
        kept.uploads._change.release()
        save(kept, 2)
        server.plan.clear()
    assert steps(uri) == [2]
    kinds = [type(each) for each in events.read(tmp_path / "events.jsonl")]
    assert events.UploadFailed in kinds


def test_past_the_deadline_the_last_checkpoint_is_missed_in_one_line(of, server, monkeypatch):
    monkeypatch.setenv("FLOTILLA_STORAGE_DEADLINE", "0.2")
    kept = of()
    server.plan.add(Fault(503, times=10_000))
    with pytest.raises(storage.Unavailable) as error:
        save_and_end(kept, 1)
    assert "has not been available for 0.2 s" in str(error.value)
    server.plan.clear()
    assert of().newest().global_step == 1


def test_the_end_of_a_block_is_reported_unchanged(of, uri):
    for step, end in enumerate((UserError("diverged"), RunInterruptedError("asked to end")), 1):
        kept = of()
        with pytest.raises(type(end)) as error:
            save_and_end(kept, step, end)
        assert error.value is end
        assert steps(uri)[-1] == step


@pytest.mark.usefixtures("blocked")
def test_an_attempt_that_begins_again_does_not_wait(of):
    kept = of()
    with pytest.raises(ClusterLostError):
        save_and_end(kept, 1, ClusterLostError("gone"))
    assert of().newest().global_step == 1


@pytest.mark.slow
@pytest.mark.parametrize("error", [UserError, storage.Unavailable, OSError])
def test_logs_that_cannot_be_uploaded_end_no_training(of, uri, monkeypatch, caplog, error):
    kept = of()
    kept.logs.mkdir(parents=True)
    (kept.logs / "events.1").write_bytes(b"figures")
    real = storage.write_bytes

    def write(place, data):
        if "/logs/" in place:
            raise error("no more room for logs")
        real(place, data)

    monkeypatch.setattr(storage, "write_bytes", write)
    for step in (1, 2, 3):
        save_and_end(kept, step)
    assert steps(uri) == [1, 2, 3]
    said = [each for each in caplog.messages if "no more room for logs" in each]
    assert said == ["the TensorBoard logs cannot be uploaded: no more room for logs"]


def test_logs_go_with_a_checkpoint(of, uri):
    kept = of()
    kept.logs.mkdir(parents=True)
    (kept.logs / "events.1").write_bytes(b"figures")
    save_and_end(kept, 1)
    assert storage.read_bytes(storage.join(uri, "logs", "events.1")) == b"figures"


def test_a_bug_in_the_background_ends_training(of, monkeypatch):
    kept = of()

    def bug(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(RemoteCheckpoints, "note_published", bug)
    with pytest.raises(ZeroDivisionError), kept.flush_at_end():
        kept.save(variables(1), io_device=None, fields={})


class Checked(NoLease):
    """A lease that is lost at its n-th check."""

    def __init__(self, lost_at):
        self._left = lost_at

    def check(self):
        self._left -= 1
        if self._left <= 0:
            raise LeaseLostError("taken over")


@pytest.mark.parametrize(
    ("lost_at", "stored"), [(1, "of the other"), (2, "of the other"), (9, "mine")]
)
def test_only_the_holder_of_the_lease_replaces_a_checkpoint(of, uri, lost_at, stored):
    """The lease is checked again after an upload, which may have taken long."""
    other, kept = of("another machine"), of()
    with other.flush_at_end():
        save(other, 10, strategy="of the other")
    kept.lease = Checked(lost_at)
    expected = pytest.raises(LeaseLostError) if stored != "mine" else nullcontext()
    with expected, kept.flush_at_end():
        save(kept, 10, strategy="mine")
    assert storage.verify(storage.join(uri, "step-00000010")).fields["strategy"] == stored


def test_who_lost_the_lock_publishes_nothing_more(of, uri, server):
    held = Lease(uri, "digits-1")
    held.acquire()
    kept = of()
    kept.lease = held
    save_and_end(kept, 100)
    assert steps(uri) == [100]
    for number in holders(uri):
        storage.delete(lease_uri(uri, number))
    before = server.plan.requests[:]
    with pytest.raises(LeaseLostError, match="run digits-1 stops writing"):
        save_and_end(kept, 200)
    assert steps(uri) == [100]
    after = server.plan.requests[len(before) :]
    assert not [each for each in after if each.startswith(("PUT", "POST", "DELETE"))]
    with pytest.raises(LeaseLostError):
        kept.history.begin([ROW])


def test_what_the_evaluator_measured_is_asked_for_in_the_background(of, uri, server):
    kept = of()
    row = {"global_step": 5, "created": "x", "validation_loss": 0.5}
    storage.write_bytes(storage.join(uri, "validation.jsonl"), f"{json.dumps(row)}\n".encode())
    asked, answered = threading.Event(), threading.Event()

    def before(request):
        if "validation.jsonl" in request:
            asked.set()
            assert answered.wait(60)

    server.plan.before = before
    try:
        assert kept.read_validations() == []
        assert asked.wait(60)
        assert kept.read_validations() == []
    finally:
        answered.set()
        server.plan.before = None
    with kept.flush_at_end():
        pass
    assert kept.read_validations() == [row]


def test_training_goes_on_where_the_evaluator_cannot_be_asked(of, server, monkeypatch, caplog):
    kept = of()
    monkeypatch.setenv("FLOTILLA_STORAGE_DEADLINE", "0.2")
    server.plan.add(Fault(503, path="validation.jsonl", times=-1))
    try:
        with kept.flush_at_end():
            assert kept.read_validations() == []
    finally:
        server.plan.clear()
    assert "has not been available" in caplog.text

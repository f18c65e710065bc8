"""Tests checkpoints that are saved by parts, one part per server."""

import errno
import gc
import os
import threading
import weakref
from contextlib import contextmanager

import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer import storage
from flotilla.trainer.checkpoints.checkpoints import restore
from flotilla.trainer.checkpoints.index import contents
from flotilla.trainer.cluster.lease import LeaseLostError, NoLease
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.storage import store
from tests.stores.faults import Fault
from tests.trainer.checkpoints.by_parts import (
    ON_FIRST,
    SHAPES,
    in_bucket,
    opened,
    room_for,
    saved,
    two_servers,
    variables,
)

__all__ = ["in_bucket", "two_servers"]


def require_restored(found, servers, value):
    """Restore a checkpoint, and check that each of its values is `value`; return its step."""
    fresh = variables(0, 0.0)
    restore(found, fresh, io_device=None, servers=servers)
    for path, shape in SHAPES.items():
        np.testing.assert_array_equal(fresh[path], np.full(shape, value))
    return int(fresh["global_step"])


def test_each_server_writes_a_file_of_what_it_holds(tmp_path, two_servers):
    made = saved(tmp_path, two_servers, variables(10))
    manifest = storage.verify(made.last)
    assert [each.path for each in manifest.files] == [
        "variables.data-00000-of-00002",
        "variables.data-00001-of-00002",
        "variables.index",
    ]
    found = contents(made.uri)
    assert (found.global_step, len(found.parts)) == (10, 2)
    assert found.variables[ON_FIRST].rows == 1000
    assert found.variables[ON_FIRST].bytes == 16_000
    assert {path: each.part for path, each in found.variables.items()} == {
        ON_FIRST: 0,
        "global_step": 0,
        "model/dense/kernel": 1,
        "optimizer/m": 1,
    }
    assert storage.names(made.uri) == ["step-00000010"]
    assert [each.name for each in (tmp_path / "checkpoints").iterdir()] == ["step-00000010"]
    assert not list((tmp_path / "servers/parts").glob("*part*"))


def test_tensorflow_itself_reads_it(tmp_path, two_servers):
    made = saved(tmp_path, two_servers, variables(10, 3.5))
    reader = tf.train.load_checkpoint(f"{storage.local_path(made.last)}/variables")
    key = next(each for each in reader.get_variable_to_shape_map() if "table" in each)
    np.testing.assert_array_equal(reader.get_tensor(key), np.full([1000, 4], 3.5))


@pytest.mark.parametrize(
    ("by_parts", "read_by_parts"), [(False, True), (True, False), (True, True)]
)
def test_either_form_is_read_either_way(tmp_path, two_servers, by_parts, read_by_parts):
    made = opened(tmp_path, two_servers if by_parts else None)
    with made.flush_at_end():
        made.save(variables(10, 2.0), io_device=None, fields={})
    again = opened(tmp_path, two_servers if read_by_parts else None)
    found = again.newest()
    assert (found.global_step, found.apart) == (10, read_by_parts)
    assert require_restored(found, again.servers, 2.0) == 10


def test_servers_that_do_not_answer_leave_it_to_the_chief(tmp_path, two_servers):
    made = saved(tmp_path, two_servers, variables(10, 2.0))
    two_servers._are_ready = False
    found = opened(tmp_path, two_servers).newest()
    assert found.apart
    require_restored(found, two_servers, 2.0)
    made.save(variables(20), io_device=None, fields={})
    assert (contents(made.uri).global_step, len(contents(made.uri).parts)) == (20, 1)


def test_what_is_updated_after_a_save_is_not_in_it(tmp_path, two_servers):
    held = variables(10, 1.0)
    # TensorFlow copies variables with row lookups immediately, and others at their next update.
    held[ON_FIRST].scatter_add(tf.IndexedSlices(tf.zeros([1, 4]), [0]))
    made = opened(tmp_path, two_servers)
    with made.flush_at_end():
        made.save(held, io_device=None, fields={})
        for path in held.keys() - {"global_step"}:
            held[path].assign_add(tf.ones_like(held[path]))
        held[ON_FIRST].scatter_add(tf.IndexedSlices(tf.ones([1, 4]), [0]))
    require_restored(made.newest(), two_servers, 1.0)


def test_a_damaged_part_is_passed_over_by_name(tmp_path, two_servers, caplog):
    made = saved(tmp_path, two_servers, variables(10))
    save_steps(made, 20)
    part = storage.local_path(made.last) / "variables.data-00001-of-00002"
    part.write_bytes(part.read_bytes()[:-1] + b"!")
    again = opened(tmp_path, two_servers)
    assert again.newest().global_step == 10
    assert "variables.data-00001-of-00002 has crc32c" in caplog.text
    save_steps(again, 20)
    assert opened(tmp_path, two_servers).newest().global_step == 20


def test_what_is_not_finite_is_not_published(tmp_path, two_servers):
    made = saved(tmp_path, two_servers, variables(10))
    broken = variables(20)
    broken["optimizer/m"].assign(tf.fill([4, 2], float("nan")))
    made.save(broken, io_device=None, fields={})
    with pytest.raises(UserError, match=r"optimizer/m is not finite at global step 20.*00010\)"):
        made.parts.settle()
    with pytest.raises(UserError, match="optimizer/m is not finite"):
        made.require()
    assert storage.names(made.uri) == ["step-00000010"]


@pytest.mark.parametrize("error", [tf.errors.ResourceExhaustedError, tf.errors.UnavailableError])
def test_what_fails_keeps_no_value_on_a_server(tmp_path, two_servers, monkeypatch, error):
    held = []

    def save(tensors, **_):
        held.extend(map(weakref.ref, tensors))
        raise error(None, None, "parts/x; it is so")

    monkeypatch.setattr(tf.raw_ops, "SaveV2", save)
    made = opened(tmp_path, two_servers)
    made.save(variables(10), io_device=None, fields={})
    with pytest.raises(UserError, match="it is so"):
        made.parts.settle()
    gc.collect()
    # The object graph, a string, may remain in memory, but no value of a variable may.
    kept = [each() for each in held if each() is not None]
    assert len(held) > 2
    assert [each for each in kept if each.dtype.is_floating] == []


def failing(number, kind, times):
    """Return a replacement for TensorFlow's save, which fails several times on the second part."""
    tried = []

    def save(prefix, save=tf.raw_ops.SaveV2, **named):
        if prefix.endswith("part-1") and len(tried) < times:
            tried.append(prefix)
            raise kind(None, None, f"{prefix}.index; {os.strerror(number)} [Op:SaveV2]")
        return save(prefix=prefix, **named)

    return tried, save


def test_a_folder_that_does_not_answer_for_a_while_is_written_again(
    tmp_path, two_servers, monkeypatch
):
    tried, save = failing(errno.ESTALE, tf.errors.UnknownError, times=3)
    monkeypatch.setattr(store, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(store, "MAX_PAUSE", 0.02)
    monkeypatch.setattr(tf.raw_ops, "SaveV2", save)
    made = saved(tmp_path, two_servers, variables(10, 2.0))
    assert len(tried) == 3
    require_restored(made.newest(), two_servers, 2.0)


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, tf.errors.ResourceExhaustedError),
        (errno.EROFS, tf.errors.PermissionDeniedError),
        (errno.EFBIG, tf.errors.OutOfRangeError),
    ],
)
def test_what_does_not_pass_by_itself_is_tried_once(
    tmp_path, two_servers, monkeypatch, number, kind
):
    tried, save = failing(number, kind, times=9)
    monkeypatch.setattr(tf.raw_ops, "SaveV2", save)
    made = opened(tmp_path, two_servers)
    made.save(variables(10), io_device=None, fields={})
    with pytest.raises(UserError, match=f"{os.strerror(number)}; free some space") as error:
        made.parts.settle()
    assert not isinstance(error.value, storage.Unavailable)
    assert len(tried) == 1


def test_a_server_that_cannot_publish_says_why(tmp_path, two_servers, monkeypatch):
    def refuse(*_):
        raise UserError("no space on the disk of the server")

    made = saved(tmp_path, two_servers, variables(10))
    monkeypatch.setattr(storage, "add_file", refuse)
    with pytest.raises(UserError, match="no space on the disk of the server"):
        save_steps(made, 20)
    assert storage.names(made.uri) == ["step-00000010"]


@pytest.mark.parametrize("of", ["parts", "whole"])
def test_a_chief_whose_disk_is_full_says_so(tmp_path, two_servers, monkeypatch, of):
    made = opened(tmp_path, two_servers)

    def add_small(save, add_small=made.parts._add_small):
        # The index of a part may fit even if the index of the whole checkpoint does not.
        largest = max(len(each.index) * 3 // 4 for each in save.replies.values())
        with room_for(largest if of == "whole" else 0):
            return add_small(save)

    monkeypatch.setattr(made.parts, "_add_small", add_small)
    expected = {"parts": "cannot save file:.*: File too large; raise", "whole": "cannot write a ch"}
    with pytest.raises(UserError, match=expected[of]):
        save_steps(made, 10)
    assert storage.names(made.uri) == []


def test_no_place_for_a_draft_is_one_line(tmp_path, two_servers):
    (tmp_path / "checkpoints").write_text("a file in the way")
    made = opened(tmp_path, two_servers)
    made.save(variables(10), io_device=None, fields={})
    with pytest.raises(UserError, match=r"cannot write next to .*; there is a file where a folder"):
        made.flush()


def test_retention_holds_for_parts(tmp_path, two_servers):
    made = opened(tmp_path, two_servers)
    for step in (10, 20, 30):
        save_steps(made, step)
    assert storage.names(made.uri) == ["step-00000020", "step-00000030"]


def test_few_bytes_are_written_by_the_chief(tmp_path, two_servers):
    made = opened(tmp_path, None)
    made.enable_parts(two_servers, 10**6)
    made.save(variables(10), io_device=None, fields={})
    assert len(contents(made.uri).parts) == 1


def save_steps(made, *steps):
    with made.flush_at_end():
        for step in steps:
            made.save(variables(step, float(step)), io_device=None, fields={})


def left(tmp_path):
    """Return the files of parts in the servers' folders, without replies."""
    found = (tmp_path / "servers/parts").rglob("*.*")
    return [each.name for each in found if each.parent.name != "replies"]


def test_servers_upload_and_fetch_their_own_parts(in_bucket, tmp_path):
    made = in_bucket()
    save_steps(made, 10)
    assert len(contents(made.uri).parts) == 2
    assert left(tmp_path) == ["ready.json"]
    again = in_bucket("another")
    found = again.newest()
    assert found.apart
    assert sorted(each.name for each in found.folder.iterdir()) == ["variables.index"]
    require_restored(found, again.servers, 10.0)
    assert left(tmp_path) == ["ready.json"]
    # A process without servers reads the whole checkpoint.
    whole = storage.fetch(found.uri, tmp_path / "whole")
    assert sum(each.bytes for each in whole.files) == contents(found.uri).bytes


def saved_during_an_upload(made, gcs, *steps):
    """Save the first checkpoint, and the others during its upload."""
    with uploading(made, gcs, steps[0]) as free, made.flush_at_end():
        for step in steps[1:]:
            made.save(variables(step), io_device=None, fields={})
        made.parts.settle()
        free.set()


@contextmanager
def uploading(made, gcs, step):
    """Save one checkpoint, whose upload continues once the event is set."""
    free, came = threading.Event(), threading.Event()

    def before(request):
        if request.startswith(("POST", "PUT")):
            came.set()
            assert free.wait(60)

    gcs.plan.before = before
    try:
        made.save(variables(step), io_device=None, fields={})
        assert came.wait(60)
        yield free
    finally:
        free.set()
        gcs.plan.before = None


def test_training_does_not_wait_for_uploads_of_which_the_newest_counts(in_bucket, gcs, tmp_path):
    made = in_bucket()
    saved_during_an_upload(made, gcs, 10, 20, 30)
    assert storage.names(made.uri) == ["step-00000010", "step-00000030"]
    assert left(tmp_path) == ["ready.json"]


def test_parts_that_are_replaced_go_while_another_one_is_uploaded(in_bucket, gcs, tmp_path):
    made = in_bucket()
    with made.flush_at_end(), uploading(made, gcs, 10) as free:
        for step in (20, 30, 40):
            made.save(variables(step), io_device=None, fields={})
        made.parts.settle()
        there = [each for each in left(tmp_path) if ".data-" in each]
        free.set()
    # Only the files of step 10, whose upload is in progress, and of step 40 remain.
    assert len(there) == 2 * 2
    assert storage.names(made.uri) == ["step-00000010", "step-00000040"]


@pytest.mark.parametrize(
    ("kind", "reason", "remedy"),
    [
        (tf.errors.UnknownError, errno.EIO, "look for disk errors in the system log"),
        (tf.errors.AbortedError, errno.ESTALE, "mount the file system again"),
        (
            tf.errors.DeadlineExceededError,
            errno.ETIMEDOUT,
            "check whether the file system responds",
        ),
        (tf.errors.FailedPreconditionError, errno.EBUSY, "free some space there"),
    ],
)
def test_a_save_that_cannot_be_written_leaves_nothing_with_the_servers(  # noqa: PLR0913, PLR0917
    in_bucket, tmp_path, monkeypatch, kind, reason, remedy
):
    said = os.strerror(reason)

    def save(prefix, save=tf.raw_ops.SaveV2, **named):
        if not prefix.endswith("part-1"):
            return save(prefix=prefix, **named)
        (tmp_path / "servers" / f"{prefix}.data-00000-of-00001.tempstate7").write_bytes(b"values")
        raise kind(None, None, f"{prefix}.data-00000-of-00001.tempstate7; {said} [Op:SaveV2]")

    monkeypatch.setenv("FLOTILLA_STORAGE_DEADLINE", "0.1")
    monkeypatch.setattr(tf.raw_ops, "SaveV2", save)
    made = in_bucket()
    made.save(variables(10), io_device=None, fields={})
    line = rf"^cannot write a checkpoint to ps-1 \(.*/servers/parts\): {said}; {remedy}"
    with pytest.raises(UserError, match=line):
        made.flush()
    assert left(tmp_path) == ["ready.json"]


def test_what_could_not_be_removed_from_a_server_is_removed_later(
    in_bucket, gcs, tmp_path, two_servers, monkeypatch
):
    refused = []

    def ask(server, request, ask=two_servers.ask):
        if request.action == "discard" and not refused:
            refused.append(request.prefix)
            raise storage.Unavailable("the server does not answer")
        return ask(server, request)

    monkeypatch.setattr(two_servers, "ask", ask)
    made = in_bucket()
    # The files of steps 20 and 30 are replaced before their upload.
    saved_during_an_upload(made, gcs, 10, 20, 30, 40)
    assert len(refused) == 1
    assert storage.names(made.uri) == ["step-00000010", "step-00000040"]
    assert left(tmp_path) == ["ready.json"]


@pytest.mark.parametrize("history", ["as ever", "refused"])
def test_a_save_that_fails_does_not_stop_an_upload(in_bucket, gcs, monkeypatch, history):
    made = in_bucket()
    with uploading(made, gcs, 10) as free:

        def flush(flush=made.uploads.flush):
            free.set()
            flush()

        def put(slot, *called, put=made.uploads.put):
            if (slot, history) == ("history", "refused"):
                raise UserError("an upload has failed for good")
            put(slot, *called)

        monkeypatch.setattr(made.uploads, "flush", flush)
        monkeypatch.setattr(made.uploads, "put", put)
        made.save(variables(20, float("nan")), io_device=None, fields={})
        with pytest.raises(UserError, match="is not finite at global step 20"):
            made.flush()
        assert storage.names(made.uri) == ["step-00000010"]


def test_one_that_fails_while_a_newer_one_is_saved_is_removed(in_bucket, tmp_path, monkeypatch):
    made = in_bucket()

    def refuse(*_, add_file=storage.add_file):
        monkeypatch.setattr(storage, "add_file", add_file)
        made.save(variables(20), io_device=None, fields={})
        made.parts.settle()
        raise storage.Unavailable("the store does not answer")

    monkeypatch.setattr(storage, "add_file", refuse)
    save_steps(made, 10)
    assert storage.names(made.uri)[-1] == "step-00000020"
    assert left(tmp_path) == ["ready.json"]


def test_parts_of_an_attempt_that_died_are_in_no_other_checkpoint(in_bucket, tmp_path):
    made = in_bucket()
    save_steps(made, 10)
    uri = storage.join(made.uri, "step-00000020")
    # A server has uploaded its part, and the chief was killed before it wrote the manifest.
    orphan = tmp_path / "orphan"
    orphan.write_bytes(b"of an attempt that died")
    with storage.draft(uri) as draft:
        storage.add_file(draft, orphan, "variables.data-00000-of-00002")
    again = in_bucket("another")
    assert again.newest().global_step == 10
    save_steps(again, 20)
    manifest = storage.verify(uri)
    named = sorted(each.stored_at for each in manifest.files)
    assert storage.names(uri) == sorted([*named, "MANIFEST.json"])
    require_restored(in_bucket("third").newest(), again.servers, 20.0)


def test_a_commit_whose_answer_was_lost_is_no_conflict(in_bucket, gcs):
    made = in_bucket()
    save_steps(made, 10)
    lost = Fault("lose", method="POST", every=4)
    gcs.plan.add(lost)
    save_steps(made, 20)
    assert lost.times == 0
    assert in_bucket("another").newest().global_step == 20


def test_an_attempt_that_lost_the_lease_publishes_nothing(in_bucket):
    class Lost(NoLease):
        def check(self):
            raise LeaseLostError("taken over")

    made = in_bucket()
    made.lease = Lost()
    with pytest.raises(LeaseLostError):
        save_steps(made, 10)
    assert storage.names(made.uri) == []

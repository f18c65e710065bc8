"""Checkpoints by parts in an object store: each server uploads its own."""

from __future__ import annotations

import errno
import os
import threading
from contextlib import contextmanager

import numpy as np
import pytest
import tensorflow as tf

from tests.stores.faults import Fault
from tests.trainer.checkpoints.by_parts import ON_FIRST, SHAPES, in_bucket, two_servers, variables
from trainer import storage
from trainer.checkpoints.checkpoints import restore
from trainer.checkpoints.contents import contents
from trainer.cluster.lease import LeaseLostError, NoLease
from trainer.errors import UserError

__all__ = ["in_bucket", "two_servers"]


def saved(made, *steps):
    with made.flushed():
        for step in steps:
            made.save(variables(step, float(step)), io_device=None, fields={})


def left(tmp_path):
    """Return the files of parts with the servers, but for answers that are read."""
    found = (tmp_path / "servers/parts").rglob("*.*")
    return [each.name for each in found if each.parent.name != "replies"]


def test_servers_upload_and_fetch_their_own_parts(in_bucket, tmp_path):
    made = in_bucket()
    saved(made, 10)
    assert len(contents(made.uri).parts) == 2
    assert left(tmp_path) == ["ready.json"]
    again = in_bucket("another")
    found = again.newest()
    assert found.apart
    # The chief has what is not data.
    assert sorted(each.name for each in found.folder.iterdir()) == ["variables.index"]
    fresh = variables(0, 0.0)
    restore(found, fresh, io_device=None, servers=again.servers)
    for path, shape in SHAPES.items():
        np.testing.assert_array_equal(fresh[path], np.full(shape, 10.0))
    assert left(tmp_path) == ["ready.json"]
    # A process without servers reads all of it.
    whole = storage.fetch(found.uri, tmp_path / "whole")
    assert sum(each.bytes for each in whole.files) == contents(found.uri).bytes


def saved_during_an_upload(made, gcs, *steps):
    """Save the first, and the others while it is uploaded."""
    with uploading(made, gcs, steps[0]) as free, made.flushed():
        for step in steps[1:]:
            made.save(variables(step), io_device=None, fields={})
        made.parts.settle()
        free.set()


@contextmanager
def uploading(made, gcs, step):
    """Save one, whose upload goes on when the event is set."""
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
    with made.flushed(), uploading(made, gcs, 10) as free:
        for step in (20, 30, 40):
            made.save(variables(step), io_device=None, fields={})
        made.parts.settle()
        there = [each for each in left(tmp_path) if ".data-" in each]
        free.set()
    # Those of 10, which is uploaded, and of 40.
    assert len(there) == 2 * 2
    assert storage.names(made.uri) == ["step-00000010", "step-00000040"]


@pytest.mark.parametrize(
    ("kind", "reason", "remedy"),
    [
        (tf.errors.ResourceExhaustedError, errno.ENOSPC, "free some space there"),
        (tf.errors.PermissionDeniedError, errno.EROFS, "free some space there"),
        (tf.errors.UnknownError, errno.EIO, "look for errors of that disk"),
        (tf.errors.AbortedError, errno.ESTALE, "mount it again there"),
        (tf.errors.DeadlineExceededError, errno.ETIMEDOUT, "look whether its file system answers"),
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
    # Those of 20 and 30 are replaced before they are uploaded.
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
    saved(made, 10)
    assert storage.names(made.uri)[-1] == "step-00000020"
    assert left(tmp_path) == ["ready.json"]


def test_parts_of_an_attempt_that_died_are_in_no_other_checkpoint(in_bucket, tmp_path):
    made = in_bucket()
    saved(made, 10)
    uri = storage.join(made.uri, "step-00000020")
    # A server has uploaded, and the chief was killed before the manifest.
    orphan = tmp_path / "orphan"
    orphan.write_bytes(b"of an attempt that died")
    with storage.draft(uri) as draft:
        storage.add_file(draft, orphan, "variables.data-00000-of-00002")
    again = in_bucket("another")
    assert again.newest().global_step == 10
    saved(again, 20)
    manifest = storage.verify(uri)
    named = sorted(each.stored_at for each in manifest.files)
    assert storage.names(uri) == sorted([*named, "MANIFEST.json"])
    found = in_bucket("third").newest()
    fresh = variables(0, 0.0)
    restore(found, fresh, io_device=None, servers=again.servers)
    np.testing.assert_array_equal(fresh[ON_FIRST], np.full(SHAPES[ON_FIRST], 20.0))


def test_a_commit_whose_answer_was_lost_is_no_conflict(in_bucket, gcs):
    made = in_bucket()
    saved(made, 10)
    # Two parts, the index, and the manifest.
    lost = Fault("lose", method="POST", every=4)
    gcs.plan.add(lost)
    saved(made, 20)
    assert lost.times == 0
    assert in_bucket("another").newest().global_step == 20


def test_an_attempt_that_lost_the_lease_publishes_nothing(in_bucket):
    class Lost(NoLease):
        def check(self):
            raise LeaseLostError("taken over")

    made = in_bucket()
    made.lease = Lost()
    with pytest.raises(LeaseLostError):
        saved(made, 10)
    assert storage.names(made.uri) == []

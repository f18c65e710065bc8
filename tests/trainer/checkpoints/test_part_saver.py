"""Checkpoints that each server writes a part of."""

from __future__ import annotations

import errno
import gc
import os
import weakref

import numpy as np
import pytest
import tensorflow as tf

from tests.trainer.checkpoints.by_parts import (
    ON_FIRST,
    opened,
    room_for,
    saved,
    two_servers,
    variables,
)
from trainer import storage
from trainer.checkpoints.checkpoints import restore
from trainer.checkpoints.contents import contents
from trainer.errors import UserError
from trainer.storage import retry
from trainer.storage.errors import PASSING

__all__ = ["two_servers"]


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
    # Nothing is left next to it, nor with the servers.
    assert storage.names(made.uri) == ["step-00000010"]
    assert [each.name for each in (tmp_path / "checkpoints").iterdir()] == ["step-00000010"]
    assert not list((tmp_path / "servers/parts").glob("*part*"))


def test_tensorflow_itself_reads_it(tmp_path, two_servers):
    made = saved(tmp_path, two_servers, variables(10, 3.5))
    reader = tf.train.load_checkpoint(f"{storage.local_path(made.last)}/variables")
    key = next(each for each in reader.get_variable_to_shape_map() if "table" in each)
    np.testing.assert_array_equal(reader.get_tensor(key), np.full([1000, 4], 3.5))


@pytest.mark.parametrize("by_parts", [False, True])
@pytest.mark.parametrize("read_by_parts", [False, True])
def test_either_form_is_read_either_way(tmp_path, two_servers, by_parts, read_by_parts):
    made = opened(tmp_path, two_servers if by_parts else None)
    with made.flushed():
        made.save(variables(10, 2.0), io_device=None, fields={})
    again = opened(tmp_path, two_servers if read_by_parts else None)
    found = again.newest()
    assert (found.global_step, found.apart) == (10, read_by_parts)
    fresh = variables(0, 0.0)
    restore(found, fresh, io_device=None, servers=again.servers)
    assert int(fresh["global_step"]) == 10
    for path in fresh.keys() - {"global_step"}:
        np.testing.assert_array_equal(fresh[path], np.full(fresh[path].shape, 2.0))


def test_servers_that_do_not_answer_leave_it_to_the_chief(tmp_path, two_servers):
    made = saved(tmp_path, two_servers, variables(10, 2.0))
    two_servers._are_ready = False
    found = opened(tmp_path, two_servers).newest()
    assert found.apart
    fresh = variables(0, 0.0)
    restore(found, fresh, io_device=None, servers=two_servers)
    np.testing.assert_array_equal(fresh[ON_FIRST], np.full([1000, 4], 2.0))
    fresh["global_step"].assign(20)
    made.save(fresh, io_device=None, fields={})
    assert (contents(made.uri).global_step, len(contents(made.uri).parts)) == (20, 1)


def test_what_is_updated_after_a_save_is_not_in_it(tmp_path, two_servers):
    held = variables(10, 1.0)
    # TensorFlow copies at once what was looked up by rows, and all else at its next update.
    held[ON_FIRST].scatter_add(tf.IndexedSlices(tf.zeros([1, 4]), [0]))
    made = opened(tmp_path, two_servers)
    with made.flushed():
        made.save(held, io_device=None, fields={})
        for path in held.keys() - {"global_step"}:
            held[path].assign_add(tf.ones_like(held[path]))
        held[ON_FIRST].scatter_add(tf.IndexedSlices(tf.ones([1, 4]), [0]))
    fresh = variables(0, 0.0)
    restore(made.newest(), fresh, io_device=None, servers=two_servers)
    for path in fresh.keys() - {"global_step"}:
        np.testing.assert_array_equal(fresh[path], np.ones(fresh[path].shape))


def test_a_damaged_part_is_passed_over_by_name(tmp_path, two_servers, caplog):
    made = saved(tmp_path, two_servers, variables(10))
    with made.flushed():
        made.save(variables(20), io_device=None, fields={})
    part = storage.local_path(made.last) / "variables.data-00001-of-00002"
    part.write_bytes(part.read_bytes()[:-1] + b"!")
    again = opened(tmp_path, two_servers)
    assert again.newest().global_step == 10
    assert "variables.data-00001-of-00002 has crc32c" in caplog.text
    # The one that was passed over is replaced.
    with again.flushed():
        again.save(variables(20), io_device=None, fields={})
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
    # The graph of objects is a constant, and of no server's variables.
    kept = [each() for each in held if each() is not None]
    assert len(held) > 2
    assert [each for each in kept if each.dtype.is_floating] == []


def failing(number, kind, times):
    """Return what saves in the place of TensorFlow: the second part fails so often."""
    tried = []

    def save(prefix, save=tf.raw_ops.SaveV2, **named):
        if prefix.endswith("part-1") and len(tried) < times:
            tried.append(prefix)
            raise kind(None, None, f"{prefix}.index; {os.strerror(number)} [Op:SaveV2]")
        return save(prefix=prefix, **named)

    return tried, save


@pytest.mark.parametrize("number", sorted(PASSING))
def test_a_folder_that_does_not_answer_for_a_while_is_written_again(
    tmp_path, two_servers, monkeypatch, number
):
    tried, save = failing(number, tf.errors.UnknownError, times=3)
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(retry, "MAX_PAUSE", 0.02)
    monkeypatch.setattr(tf.raw_ops, "SaveV2", save)
    made = saved(tmp_path, two_servers, variables(10, 2.0))
    assert len(tried) == 3
    fresh = variables(0, 0.0)
    restore(made.newest(), fresh, io_device=None, servers=two_servers)
    np.testing.assert_array_equal(fresh["optimizer/m"], np.full([4, 2], 2.0))


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, tf.errors.ResourceExhaustedError),
        (errno.EDQUOT, tf.errors.ResourceExhaustedError),
        (errno.EROFS, tf.errors.PermissionDeniedError),
        (errno.EACCES, tf.errors.PermissionDeniedError),
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
    with pytest.raises(UserError, match="no space on the disk of the server"), made.flushed():
        made.save(variables(20), io_device=None, fields={})
    assert storage.names(made.uri) == ["step-00000010"]


@pytest.mark.parametrize("of", ["parts", "whole"])
def test_a_chief_whose_disk_is_full_says_so(tmp_path, two_servers, monkeypatch, of):
    made = opened(tmp_path, two_servers)

    def add_small(save, add_small=made.parts._add_small):
        # The index of a part may fit, and that of the whole not.
        largest = max(len(each.index) * 3 // 4 for each in save.replies.values())
        with room_for(largest if of == "whole" else 0):
            return add_small(save)

    monkeypatch.setattr(made.parts, "_add_small", add_small)
    expected = {"parts": "cannot save file:.*: File too large; raise", "whole": "cannot write a ch"}
    with pytest.raises(UserError, match=expected[of]), made.flushed():
        made.save(variables(10), io_device=None, fields={})
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
        with made.flushed():
            made.save(variables(step), io_device=None, fields={})
    assert storage.names(made.uri) == ["step-00000020", "step-00000030"]


def test_few_bytes_are_written_by_the_chief(tmp_path, two_servers):
    made = opened(tmp_path, None)
    made.by_parts(two_servers, 10**6)
    made.save(variables(10), io_device=None, fields={})
    assert len(contents(made.uri).parts) == 1

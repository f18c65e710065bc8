"""What the chief asks servers for, and restores on them."""

from __future__ import annotations

import errno

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
from trainer.checkpoints import part_server
from trainer.checkpoints.checkpoints import restore
from trainer.checkpoints.part_server import Request
from trainer.checkpoints.servers import Layout, PartServers
from trainer.errors import UserError

__all__ = ["two_servers"]


def test_only_servers_in_folders_of_their_own_are_ready(two_servers):
    assert PartServers(1, None).are_ready()
    # The second has the folder of the first.
    assert not PartServers(two_servers.count, None).are_ready()


@pytest.mark.usefixtures("two_servers")
def test_a_part_that_a_dead_chief_has_left_goes_before_another_one_writes(tmp_path):
    left = tmp_path / "servers/parts/0123456789ab-part-0.data-00000-of-00001"
    left.write_bytes(b"values")
    found = PartServers(1, None)
    assert found.are_ready()
    assert not left.exists()
    left.write_bytes(b"of this one")
    assert found.are_ready()
    assert left.exists()


def test_a_server_whose_disk_is_full_is_not_lost(two_servers, monkeypatch):
    write = tf.io.write_file
    monkeypatch.setattr(tf.io, "write_file", lambda _, data: write("/dev/full", data))
    with pytest.raises(UserError, match=r"^cannot write a checkpoint to ps-1: No space left on d"):
        two_servers.ask(1, Request(action="discard", prefix="parts/x"))


def test_a_chief_whose_disk_is_full_says_so(tmp_path):
    with (
        room_for(0),
        pytest.raises(UserError, match=r"^cannot write a checkpoint to /.*: File too"),
    ):
        Layout.of(("model/table",), None, tmp_path)


def test_what_a_server_cannot_do_is_an_error_here(two_servers):
    with pytest.raises(UserError, match="is not published"):
        two_servers.ask(0, Request(action="fetch", uri="file:///nowhere", prefix="parts/x"))


def test_a_server_without_room_for_its_answer_is_asked_again(tmp_path, two_servers, monkeypatch):
    full = []

    def write(*args, write=part_server._write):
        full.append(1)
        if len(full) <= 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(*args)

    monkeypatch.setattr(part_server, "_write", write)
    made = opened(tmp_path, two_servers)
    with made.flushed():
        made.save(variables(10), io_device=None, fields={})
    assert storage.names(made.uri) == ["step-00000010"]


def test_a_misfit_names_the_variable(tmp_path, two_servers):
    made = saved(tmp_path, two_servers, variables(10))
    found = made.newest()
    with pytest.raises(UserError, match=r"it has no model/other"):
        restore(found, {"model/other": tf.Variable(0.0)}, io_device=None, servers=two_servers)
    shape = r"model/table is float32 \[1000, 4\] there and float32 \[9, 4\] here"
    with pytest.raises(UserError, match=shape):
        restore(
            found, {ON_FIRST: tf.Variable(tf.zeros([9, 4]))}, io_device=None, servers=two_servers
        )

"""Tests the chief's requests to servers, and restored values on the servers."""

import errno
import os
import subprocess
from functools import partial

import pytest
import tensorflow as tf

from flotilla.trainer import storage
from flotilla.trainer.checkpoints import part_saver, part_server
from flotilla.trainer.checkpoints.checkpoints import restore
from flotilla.trainer.checkpoints.part_saver import PartServers
from flotilla.trainer.checkpoints.part_server import PartServer, Reply, Request
from flotilla.trainer.runtime.errors import ClusterLostError, UserError
from flotilla.trainer.storage import store
from flotilla.trainer.storage.errors import PASSING
from tests.trainer.checkpoints.by_parts import ON_FIRST, opened, saved, two_servers, variables

__all__ = ["two_servers"]


@pytest.fixture
def short_pauses(monkeypatch):
    monkeypatch.setattr(store, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(store, "MAX_PAUSE", 0.02)


@pytest.fixture
def short_deadline(monkeypatch):
    monkeypatch.setenv(store.VARIABLE, "0.1")


def test_only_servers_in_folders_of_their_own_are_ready(two_servers):
    assert PartServers(1, None).are_ready()
    # The second server uses the folder of the first, whose `ready.json` names `ps-0`.
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
    line = r"^cannot write a checkpoint to ps-1 \(.*/servers/parts/requests\): No space left on d"
    with pytest.raises(UserError, match=line):
        two_servers.ask(1, Request(action="discard", prefix="parts/x"))


@pytest.mark.usefixtures("short_deadline")
def test_a_server_whose_disk_is_damaged_is_not_lost(two_servers):
    # Writing to /proc/self/mem fails with EIO, for which TensorFlow has no error type.
    line = r"^cannot write a checkpoint to ps-1 \(/proc/self\): Input/output error; look for disk"
    with pytest.raises(storage.Unavailable, match=line):
        two_servers._write(1, "/proc/self/mem", "x")


@pytest.mark.parametrize("number", sorted(PASSING))
@pytest.mark.usefixtures("short_pauses")
def test_files_that_do_not_answer_for_a_while_are_asked_again(
    two_servers, monkeypatch, caplog, number
):
    failed = dict.fromkeys(["write_file", "read_file"], 0)

    def failing(name, act):
        def operation(path, *args):
            if failed[name] < 2:
                failed[name] += 1
                said = f"{path}; {os.strerror(number)} [Op:WriteFile]"
                raise tf.errors.UnavailableError(None, None, said)
            return act(path, *args)

        return operation

    for name in failed:
        monkeypatch.setattr(tf.io, name, failing(name, getattr(tf.io, name)))
    assert two_servers.ask(1, Request(action="discard", prefix="parts/x")) == Reply()
    assert failed == {"write_file": 2, "read_file": 2}
    assert caplog.text.count(f"{os.strerror(number)}; ") == 4
    assert "retrying in" in caplog.text


@pytest.mark.usefixtures("short_pauses")
def test_a_request_that_came_although_its_write_failed_is_done_once(two_servers, monkeypatch):
    done, discard, write = [], part_server._ACTIONS["discard"], tf.io.write_file

    def counted(folder, request):
        done.append(request.prefix)
        return discard(folder, request)

    def write_and_fail(path, data):
        write(path, data)
        if not done:
            # The request file exists until it is answered and deleted.
            while tf.io.gfile.exists(path):
                pass
            said = f"{path}; {os.strerror(errno.ETIMEDOUT)} [Op:WriteFile]"
            raise tf.errors.DeadlineExceededError(None, None, said)

    monkeypatch.setitem(part_server._ACTIONS, "discard", counted)
    monkeypatch.setattr(tf.io, "write_file", write_and_fail)
    two_servers.ask(1, Request(action="discard", prefix="parts/x"))
    # Wait until the second request has also been answered.
    while os.listdir(part_server.REQUESTS):
        pass
    assert done == ["parts/x"]


@pytest.mark.usefixtures("short_deadline")
def test_what_a_server_cannot_read_is_one_line(two_servers, monkeypatch, tmp_path):
    def damaged(path):
        raise tf.errors.UnknownError(None, None, f"{path}; Input/output error [Op:ReadFile]")

    monkeypatch.setattr(tf.io, "read_file", damaged)
    line = rf"^cannot read a checkpoint from ps-1 \({tmp_path}/servers/parts\): Input/output error"
    with pytest.raises(storage.Unavailable, match=line):
        two_servers._read(1, part_server.READY)


@pytest.mark.parametrize(
    "message",
    [
        "",
        "Socket closed",
        "failed to connect to all addresses; last error: UNKNOWN: Connection refused",
        # The new folder of a restarted server contains no requests.
        "parts/requests/a.json; No such file or directory",
    ],
)
def test_a_server_that_is_gone_is_lost(two_servers, monkeypatch, message):
    def gone(*_):
        raise tf.errors.UnavailableError(None, None, message)

    monkeypatch.setattr(tf.io, "write_file", gone)
    with pytest.raises(ClusterLostError, match="ps-1"):
        two_servers._write(1, "parts/requests/a.json", "x")


READ_ONLY = (
    r"^cannot write a checkpoint to ps-1 \(.*/servers/parts\): Read-only file system; "
    "free some space there, or make it writable$"
)


def test_a_server_that_can_write_no_answer_at_all_is_one_line(two_servers, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    def write(path, data, write=tf.io.write_file):
        if path == part_server.PROBE:
            raise tf.errors.PermissionDeniedError(None, None, f"{path}; Read-only file system")
        write(path, data)

    monkeypatch.setattr(part_saver, "PROBE_SECONDS", 0.0)
    monkeypatch.setattr(part_server, "_write", refuse)
    monkeypatch.setattr(part_server.os, "replace", refuse)
    monkeypatch.setattr(tf.io, "write_file", write)
    with pytest.raises(UserError, match=READ_ONLY):
        two_servers.ask(1, Request(action="discard", prefix="parts/x"))


@pytest.fixture
def remount(tmp_path, two_servers):  # noqa: ARG001
    """Return a function that makes the folder of the servers, and of this process, read-only."""
    folder = str(tmp_path / "servers")
    if subprocess.run(["mount", "--bind", folder, folder], check=False).returncode:
        pytest.skip("needs the right to mount")
    os.chdir(folder)
    yield partial(subprocess.run, ["mount", "-o", "remount,bind,ro", folder], check=True)
    os.chdir(tmp_path)
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_disk_that_becomes_read_only_while_a_server_is_asked_is_one_line(
    two_servers, monkeypatch, remount
):
    def action(*_):
        remount()
        return Reply()

    monkeypatch.setattr(part_saver, "PROBE_SECONDS", 0.0)
    monkeypatch.setitem(part_server._ACTIONS, "discard", action)
    with pytest.raises(UserError, match=READ_ONLY):
        two_servers.ask(1, Request(action="discard", prefix="parts/x"))
    with pytest.raises(UserError, match=r"ps-0 \(.*/servers/parts/requests\): Read-only file sys"):
        two_servers.ask(0, Request(action="begin"))


def test_a_server_whose_folder_cannot_be_written_leaves_it_to_the_chief(tmp_path, caplog):
    (tmp_path / "parts").write_text("a file in the way")
    PartServer(tmp_path, "ps-0").start()
    # Threads of the servers of other tests may still log.
    (said,) = (each for each in caplog.records if str(tmp_path) in each.getMessage())
    assert said.getMessage().startswith(f"ps-0 cannot write to {tmp_path}/parts: ")
    assert not said.exc_info


@pytest.mark.parametrize("text", ["", "{", "[]", '{"task": "ps-1"}'])
@pytest.mark.usefixtures("two_servers")
def test_what_is_no_word_of_a_server_is_no_server(tmp_path, text):
    (tmp_path / "servers" / part_server.READY).write_text(text)
    assert not PartServers(1, None).are_ready()


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
    with made.flush_at_end():
        made.save(variables(10), io_device=None, fields={})
    assert storage.names(made.uri) == ["step-00000010"]


def test_a_misfit_names_the_variable(tmp_path, two_servers):
    made = saved(tmp_path, two_servers, variables(10))
    found = made.newest()
    with pytest.raises(UserError, match=r"it has no model/other"):
        restore(found, {"model/other": tf.Variable(0.0)}, io_device=None, servers=two_servers)
    shape = r"model/table is float32 \[1000, 4\] in the checkpoint, not float32 \[9, 4\]"
    with pytest.raises(UserError, match=shape):
        restore(
            found, {ON_FIRST: tf.Variable(tf.zeros([9, 4]))}, io_device=None, servers=two_servers
        )

import errno
import fcntl
import os
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from flotilla.trainer import storage
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.storage.local import is_staging, locked, staging

from .conftest import left_over, start

HOLD = """
import sys
from pathlib import Path
from flotilla.trainer.storage.local import staging
with staging(Path(sys.argv[1]), "held") as stage:
    (stage / "half").write_bytes(b"1")
    print(stage, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_it_is_hidden_and_gone_at_the_end_or_after_an_error(tmp_path, error):
    with suppress(ZeroDivisionError), staging(tmp_path / "new", "näme") as stage:
        assert stage.parent == tmp_path / "new"
        assert stage.name.startswith(".näme.")
        assert is_staging(stage.name)
        (stage / "a").mkdir()
        if error:
            raise error
    assert list((tmp_path / "new").iterdir()) == []


def test_what_was_renamed_stays(tmp_path):
    with staging(tmp_path, "a") as stage:
        os.rename(stage, tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("name", ["a", ".a.part", ".a.0123.part", "a.0123456789ab.part", ".git"])
def test_other_names_are_not_ours(name, tmp_path):
    (tmp_path / name).mkdir()
    with staging(tmp_path, "x"):
        pass
    assert (tmp_path / name).is_dir()


def test_a_dead_makers_folder_is_cleared_away_and_a_living_ones_is_not(tmp_path):
    process = start(HOLD, str(tmp_path))
    held = Path(process.stdout.readline().rstrip("\n"))
    with staging(tmp_path, "mine") as mine, staging(tmp_path, "held"):
        assert (held / "half").exists()
        assert mine.exists()
    process.kill()
    process.communicate()
    assert (held / "half").exists()
    with staging(tmp_path, "other"):
        assert not held.exists()


def test_a_file_or_link_of_that_name_is_left_alone(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / ".a.0123456789ab.part").write_bytes(b"")
    (tmp_path / ".b.0123456789ab.part").symlink_to(tmp_path / "kept")
    with staging(tmp_path, "x"):
        pass
    assert len(list(tmp_path.iterdir())) == 3


def test_a_folder_that_is_swept_before_it_is_locked_is_made_anew(tmp_path, monkeypatch):
    real = os.open
    swept = []

    def sweep_first(path, flags):
        if len(swept) < 2 and is_staging(Path(path).name):
            swept.append(path)
            if len(swept) == 1:
                os.rmdir(path)
                return real(path, flags)
            descriptor = real(path, flags)
            os.rmdir(path)
            return descriptor
        return real(path, flags)

    monkeypatch.setattr(os, "open", sweep_first)
    with staging(tmp_path, "a") as stage:
        assert stage.exists()
        assert stage not in swept
    assert len(swept) == 2


def test_a_lock_keeps_others_out_until_it_ends(tmp_path):
    order = []
    waiting = threading.Event()

    def wait():
        waiting.set()
        with locked(tmp_path):
            order.append("second")

    thread = threading.Thread(target=wait)
    with locked(tmp_path):
        thread.start()
        waiting.wait()
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_a_lock_ends_with_its_holder_although_a_child_has_its_descriptor(tmp_path):
    with locked(tmp_path):
        descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)


def fail_to_lock(monkeypatch, number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", fail)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EBADF, errno.ENOTSUP])
def test_a_file_system_without_locks_will_do(tmp_path, monkeypatch, number):
    fail_to_lock(monkeypatch, number)
    (tmp_path / ".dead.0123456789ab.part").mkdir()
    with staging(tmp_path, "a") as stage, locked(tmp_path):
        assert stage.exists()
    assert [path.name for path in left_over(tmp_path)] == [".dead.0123456789ab.part"]


def test_another_error_of_a_lock_is_an_error(tmp_path, monkeypatch):
    fail_to_lock(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="Input/output error"), locked(tmp_path):
        pass


@pytest.fixture
def stranger(tmp_path):
    """Return a folder that a user with only read permission has locked."""
    folder = tmp_path / "runs"
    folder.mkdir()
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield folder
    os.close(descriptor)


def test_publishing_asks_for_no_lock_that_a_stranger_may_have(stranger, make):
    uri = storage.uri_of(stranger / "new")
    storage.publish(make(), uri, kind="x")
    storage.write_bytes(storage.uri_of(stranger / "file"), b"1")
    assert storage.verify(uri)
    assert left_over(stranger) == []


def test_the_lock_of_a_stranger_is_waited_for_with_words_and_an_end(stranger, make, clock, caplog):
    uri = storage.uri_of(stranger / "new")
    (stranger / "new").mkdir()
    (stranger / "new" / "unpublished").touch()
    for act in (lambda: storage.publish(make(), uri, kind="x"), lambda: storage.delete(uri)):
        clock.passed = 0.0
        caplog.clear()
        with pytest.raises(UserError, match=f"waited 15 s for the lock of {stranger}, which proc"):
            act()
        assert clock.passed == pytest.approx(15, abs=0.1)
        (said,) = caplog.messages
        assert f"process {os.getpid()} of the user" in said
        assert "waiting up to 5 s more for" in said
    assert (stranger / "new" / "unpublished").exists()
    assert left_over(stranger) == []


def test_a_stage_that_a_stranger_has_locked_is_left_for_another(tmp_path, monkeypatch):
    real = os.open
    strangers = []

    def lock_first(path, flags):
        if is_staging(Path(path).name) and not strangers:
            strangers.append(real(path, flags))
            fcntl.flock(strangers[0], fcntl.LOCK_EX)
        return real(path, flags)

    monkeypatch.setattr(os, "open", lock_first)
    with staging(tmp_path, "a") as stage:
        assert left_over(tmp_path) == [stage]
    os.close(strangers[0])


def test_a_removal_deletes_after_it_has_unlocked_the_parent(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    deleted = []

    def delete(path, **_):
        descriptor = os.open(tmp_path, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(descriptor)
        deleted.extend(each.name for each in path.iterdir())

    monkeypatch.setattr("shutil.rmtree", delete)
    storage.delete(storage.uri_of(tmp_path / "a"))
    assert deleted == ["a"]

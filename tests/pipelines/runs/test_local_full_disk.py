"""A run that failed on a disk that is full says so, although nobody could write it down."""

from __future__ import annotations

import subprocess
from contextlib import suppress

import pytest

from pipelines.runs.local import with_full_disk
from pipelines.runs.outcome import RunResult

FAILED = RunResult(status="failed", exit_code=1, message="train_model: killed", steps=())


@pytest.fixture
def disk(tmp_path):
    """A disk of one megabyte."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_disk_is_named(disk):
    with (disk / "filler").open("wb", buffering=0) as filler, suppress(OSError):
        while True:
            filler.write(b"." * 4096)
    answer = with_full_disk(FAILED, disk)
    assert answer.message == f"train_model: killed; there is no space left at {disk}"
    assert (answer.status, answer.exit_code) == ("failed", 1)
    done = RunResult(status="done", exit_code=0, message="", steps=())
    assert with_full_disk(done, disk) == done


def test_a_disk_with_room_is_no_reason(disk):
    assert with_full_disk(FAILED, disk) == FAILED

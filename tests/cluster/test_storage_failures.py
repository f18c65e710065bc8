"""Tests a cluster whose checkpoint storage is full or unreachable."""

import shutil
import subprocess
from contextlib import suppress

import pytest

from flotilla.trainer.cluster import local
from flotilla.trainer.cluster.launcher import Job
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.events import AttemptBegin, CheckpointPublished, Restart
from flotilla.trainer.runtime.errors import TransientError
from tests.cluster.launched import launched, run_to_end
from tests.stores.faults import Fault
from tests.stores.fixtures import bucket_name

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

EVERY = 100


def settings_of_disk(steps):
    training = {"strategy": "single", "steps": steps, "checkpoint_every": EVERY, "keep": 9}
    return {"training": {**training, "validate_every": 0}}


@pytest.fixture
def small_disk(tmp_path):
    """Mount a file system of one megabyte as the checkpoint folder."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(folder):
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 10, 1):
            with suppress(OSError):
                while True:
                    file.write(b"." * size)
    assert not shutil.disk_usage(folder).free
    return filler


def test_a_full_disk_ends_with_one_line_and_training_goes_on_when_there_is_room(
    dataset, tmp_path, small_disk
):
    with launched(settings_of_disk(10**7), dataset, tmp_path) as run:
        run.wait_for(lambda e: isinstance(e, CheckpointPublished) and e.global_step >= EVERY)
        filler = fill(small_disk)
        code, said = run.end()
        last = run.newest()
    assert code == 1
    assert said.count("\n") == 1
    assert "No space left on device" in said
    assert not run.events(Restart)
    filler.unlink()
    again = run_to_end(settings_of_disk(last + EVERY), dataset, tmp_path)
    assert [event.global_step for event in again.events(AttemptBegin)] == [last]
    assert again.newest() == last + EVERY


def test_a_store_that_is_out_for_too_long_is_a_failure_that_may_pass(
    dataset, tmp_path, monkeypatch, s3
):
    monkeypatch.setenv("FLOTILLA_STORAGE_DEADLINE", "0.5")
    s3.plan.add(Fault(503, times=10**6))
    job = Job(
        config=parse_config(settings_of_disk(EVERY)),
        dataset=dataset,
        checkpoints=f"s3://{bucket_name()}/run",
        workdir=tmp_path / "cluster",
    )
    with pytest.raises(TransientError, match=r"has not been available .* \(chief-0, log "):
        local.launch(job)

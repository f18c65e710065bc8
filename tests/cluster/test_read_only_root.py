"""Training where only the working folder and the temporary one can be written, as in a pod."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from trainer import events, storage
from trainer.checkpoints.index import newest_checkpoint

pytestmark = pytest.mark.cluster

# A mount namespace of its own, in which all that is mounted is read-only but the folder $1, the
# memory of the machine, and the kernel's own file systems.
READ_ONLY = r"""
mount --bind "$1" "$1" && mount -t tmpfs tmpfs /dev/shm || exit 77
while read -r _ place _; do
    case "$place" in "$1"|/proc|/proc/*|/dev|/dev/*|/sys|/sys/*) ;;
    *) mount -o remount,bind,ro "$(printf %b "$place")" || exit 77 ;;
    esac
done < /proc/self/mounts
cd "$1" && shift && exec "$@"
"""
UNSHARED = ["unshare", "--mount", "--propagation", "private", "sh", "-c", READ_ONLY, "sh"]


@pytest.fixture
def folder(tmp_path):
    """A folder that can be written where nothing else can; skips where that needs permissions."""
    refused = f"! touch {ROOT}/probe 2>/dev/null && ! touch {tmp_path.parent}/probe 2>/dev/null"
    probe = [*UNSHARED, str(tmp_path), "sh", "-c", f"touch probe && {refused}"]
    try:
        ended = subprocess.run(probe, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no `unshare`")
    if ended.returncode in (1, 77):
        pytest.skip(f"no mount namespace: {ended.stderr.decode().strip()}")
    assert ended.returncode == 0
    assert (tmp_path / "probe").exists()
    (tmp_path / "tmp").mkdir()
    return tmp_path


@pytest.mark.slow
def test_all_tasks_train_and_publish(folder, dataset):
    training = {"steps": 100, "checkpoint_every": 50, "validate_every": 0}
    checkpoints = storage.uri_of(folder / "checkpoints")
    job = {
        "config": {"training": training, "cluster": {"workers": 2, "evaluator": True}},
        "dataset": dataset,
        "checkpoints": checkpoints,
        "workdir": str(folder / "cluster"),
    }
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HOME": "/absent",
        "TMPDIR": str(folder / "tmp"),
        # Keras imports matplotlib where it is installed, which it is not in the image.
        "MPLCONFIGDIR": str(folder / "tmp"),
        events.VARIABLE: str(folder / "events.jsonl"),
    }
    (folder / "events.jsonl").touch()
    launch = [sys.executable, "-m", "tests.cluster.launch", str(folder / "job.json")]
    ended = subprocess.run(
        [*UNSHARED, str(folder), *launch],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    assert newest_checkpoint(checkpoints)[1] == 100
    logs = {path.parent.name: path.read_text() for path in (folder / "cluster").glob("*/log.txt")}
    assert set(logs) == {"chief-0", "ps-0", "worker-0", "worker-1", "evaluator-0"}
    for task, text in logs.items():
        assert "Read-only file system" not in text, task

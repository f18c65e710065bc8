"""Tests `flotilla run` with its root in an object store: the run is blessed, resumed and read."""

import json
import shutil
import subprocess
import sys

import pytest

from flotilla.trainer import storage
from flotilla.trainer.events import AttemptBegin
from tests.pipelines.called import call, setting
from tests.stores.faults import Fault
from tests.stores.fixtures import bucket_name

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1200)]

FEW = setting(
    training__steps=200,
    training__checkpoint_every=50,
    gate__min__accuracy=0.5,
    evaluation__baseline="none",
)
# Reads everything as another machine would, from the object store and the URIs alone.
READ_ALL = """
import json, sys
from pathlib import Path
from flotilla.trainer import storage
from flotilla.trainer.checkpoints.index import list_checkpoints
root, run, model = sys.argv[1:4]
checkpoints = storage.join(root, run, "checkpoints")
manifests = [storage.fetch(uri, Path(f"step-{step}")) for uri, step in
             list_checkpoints(checkpoints)]
kind = storage.fetch(model, Path("model")).kind
names = sorted(path.name for path in Path("model").iterdir())
steps = [manifest.fields["global_step"] for manifest in manifests]
print(json.dumps({"kind": kind, "names": names, "steps": steps}))
"""


@pytest.fixture(params=["gs", pytest.param("s3", marks=pytest.mark.long)])
def server(request):
    return request.getfixturevalue("gcs" if request.param == "gs" else "s3")


@pytest.fixture
def root(server, request):
    bucket = bucket_name()
    server.create_bucket(bucket)
    return f"{request.node.callspec.params['server']}://{bucket}/a root"


def read_elsewhere(root, called, folder):
    folder.mkdir()
    command = [sys.executable, "-c", READ_ALL, root, called.answer["run_id"]]
    command.append(called.answer["artifacts"]["model"])
    return json.loads(subprocess.run(command, cwd=folder, capture_output=True, check=True).stdout)


def test_it_is_blessed_and_read_from_the_store_alone(root, server, tmp_path):
    server.plan.add(Fault(503, every=40, times=20), Fault("drop", every=61, times=10))
    called = call("run", tmp_path / "runs", *FEW, *setting(storage__root=root), cwd=tmp_path)
    server.plan.clear()
    assert called.code == 0, called.err + called.log
    assert called.answer["status"] == "blessed"
    assert all(uri.startswith(root) for uri in called.answer["artifacts"].values())
    run = storage.join(root, called.answer["run_id"])
    assert storage.read_bytes(storage.join(run, "checkpoints", "history.jsonl"))
    assert b"blessed" in storage.read_bytes(called.answer["artifacts"]["report"])
    shutil.rmtree(tmp_path / "runs")
    found = read_elsewhere(root, called, tmp_path / "elsewhere")
    assert found["kind"] == "model"
    assert "serving" in found["names"]
    assert found["steps"][-1] == 200
    assert any(each.startswith("events.") for each in logs(server, root))
    collected = call("gc", tmp_path / "runs", *setting(storage__root=root), cwd=tmp_path)
    assert (collected.code, collected.answer["removed"]) == (0, [])


def logs(server, root):
    bucket = root.split("/")[2]
    return [key.rpartition("/")[2] for key in server.keys(bucket) if "/logs/" in key]


@pytest.mark.long
def test_a_run_is_resumed_from_the_store(root, tmp_path):
    first = call("train", tmp_path / "runs", *FEW, *setting(storage__root=root), cwd=tmp_path)
    assert first.code == 0, first.err + first.log
    # The local files of all tasks are lost.
    shutil.rmtree(first.folder / "cluster")
    more = setting(training__steps=260, storage__root=root)
    again = call(
        "train", tmp_path / "runs", *more, "--resume", first.answer["run_id"], cwd=tmp_path
    )
    assert again.code == 0, again.err + again.log
    assert again.answer["global_step"] == 260
    first, second = again.events(AttemptBegin)
    assert (first.resumed, first.global_step) == (False, 0)
    assert (second.resumed, second.global_step) == (True, 200)

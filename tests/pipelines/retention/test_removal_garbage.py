"""`flotilla gc`: expired locks go, and those that are held stay."""

from __future__ import annotations

import json

import pytest

from components.records.record import recorded
from components.records.step_record import publish_config, read
from pipelines.cli import app
from pipelines.retention.removal import collect
from tests.stores.fixtures import bucket_name
from trainer import storage
from trainer.cluster.lease import ABANDONED_SECONDS, LEASE_SECONDS, Lease, holders, lease_uri, time


@pytest.fixture(params=["file", "gs", "s3"])
def root(request, tmp_path):
    """A storage root, for every client."""
    if request.param == "file":
        return storage.uri_of(tmp_path / "root")
    server = request.getfixturevalue("gcs" if request.param == "gs" else "s3")
    bucket = bucket_name()
    server.create_bucket(bucket)
    return f"{request.param}://{bucket}/root"


def locked(root, run, ago=0.0):
    uri = storage.join(root, run, "checkpoints")
    held = Lease(uri, run)
    if ago:
        held = Lease(uri, run, lambda: time.time() - ago)
    held.acquire()
    return uri


def test_the_records_of_a_run_on_a_cluster_stay(root, capsys):
    at = storage.join(root, "0b7c")
    with recorded("train_model", at):
        locked(root, "0b7c", ago=LEASE_SECONDS + ABANDONED_SECONDS)
        publish_config(at, "{}")
    assert app.called(["gc", "--json", "--set", f"storage.root={root}"]) == 0
    removed = json.loads(capsys.readouterr().out.splitlines()[-1])["removed"]
    assert removed
    assert all("/checkpoints/.lock" in uri for uri in removed)
    assert [each.step for each in read(at, well=True)] == ["train_model"]
    assert storage.read_bytes(storage.join(at, "config.json")) == b"{}"


def test_expired_locks_are_removed_and_named(root, capsys, tmp_path):
    expired, held = (
        locked(root, "digits-1", ago=LEASE_SECONDS + ABANDONED_SECONDS),
        locked(root, "digits-2"),
    )
    storage.write_bytes(storage.join(root, "digits-1", "report.html"), b"kept")
    words = ["gc", "--workdir", str(tmp_path / "runs"), "--json"]
    assert app.called([*words, "--set", f"storage.root={root}"]) == 0
    place = lease_uri(expired, 1)
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1])["removed"] == [place]
    assert err.splitlines() == [f"removed {place}", f"1 left-overs removed below {root}"]
    assert holders(expired) == {}
    assert [each.run for each in holders(held).values()] == ["digits-2"]
    assert "report.html" in storage.names(storage.join(root, "digits-1"))


def test_finished_parts_of_a_forsaken_preparation_are_removed(root, tmp_path):
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "train.records").write_bytes(b"record")
    old, going_on = (storage.join(root, "preparing", name) for name in ("digits-1", "digits-2"))
    for folder, number in ((old, "000000"), (going_on, "000000"), (going_on, "000001")):
        storage.publish(tmp_path / "part", storage.join(folder, number), kind="part")
    for folder in (old, going_on):
        place = storage.join(folder, "000000", "MANIFEST.json")
        tree = json.loads(storage.read_bytes(place))
        tree["created"] = "2020-01-01T00:00:00.000Z"
        storage.write_bytes(place, json.dumps(tree).encode())
    assert collect(root) == (old,)
    assert storage.names(old) == []
    assert storage.names(going_on) == ["000000", "000001"]

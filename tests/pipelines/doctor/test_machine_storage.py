"""Tests that the check of `storage.root` reports what is missing with a fix, and leaves no file."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from flotilla.pipelines import doctor as examination
from flotilla.pipelines.doctor.machine import signatures
from tests.pipelines.doctor.conftest import content
from tests.stores.faults import Fault
from tests.stores.fixtures import bucket_name


@pytest.fixture(autouse=True)
def alone():
    """Wait for abandoned checks, which would otherwise send requests to the next test's store."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if thread.name == "storage" or "_removed" in thread.name:
            thread.join()


@pytest.fixture(params=["gs", "s3"])
def store(request):
    server = request.getfixturevalue("gcs" if request.param == "gs" else "s3")
    name = bucket_name()
    server.create_bucket(name)
    server.scheme, server.bucket = request.param, name
    server.root = f"{request.param}://{name}/flotilla"
    return server


@pytest.fixture
def examined(doctor, store):
    """Return a function that examines the store; the state and message, and the remedy."""

    def examine(root="", failed=True):
        report = doctor(f"storage.root={root or store.root}")
        assert report.failed() == (["storage"] if failed else [])
        assert "retrying" not in report.err
        return report["storage"]["message"], report["storage"]["remedy"]

    return examine


def test_a_bucket_that_can_be_used_and_one_that_is_not_there(examined, store):
    said = f"wrote, read, listed and deleted a test file below {store.root}"
    assert examined(failed=False)[0] == said
    assert store.keys(store.bucket) == []
    name = f"{store.scheme}://{store.bucket}-not"
    said, remedy = examined(f"{name}/flotilla")
    assert said == f"there is no bucket {name}"
    commands = {"gs": f"gcloud storage buckets create {name}", "s3": f"aws s3 mb {name}"}
    assert remedy.startswith(commands[store.scheme])


def test_no_permission(examined, store):
    store.plan.add(Fault(403, times=10**6))
    said, remedy = examined()
    assert said.startswith(f"no permission to write below {store.root}")
    roles = {"gs": "--role=roles/storage.objectAdmin", "s3": "aws iam put-user-policy"}
    assert roles[store.scheme] in remedy


def test_what_may_not_be_deleted_is_named(examined, store):
    store.plan.add(Fault(403, method="DELETE", times=10**6))
    said, _ = examined()
    [key] = store.keys(store.bucket)
    probe = f"{store.scheme}://{store.bucket}/{key}"
    assert f"{probe} could not be deleted; delete it" in said


def test_an_unreachable_store(examined, store, monkeypatch):
    monkeypatch.setattr("flotilla.trainer.storage.probe.SECONDS", 0.3)
    store.plan.add(Fault("drop", times=10**6))
    assert f"{store.scheme}://{store.bucket} does not answer" in examined()[0]


@pytest.mark.slow
def test_a_store_that_hangs_costs_no_more_than_its_deadline(examined, store, monkeypatch):
    monkeypatch.setattr("flotilla.pipelines.doctor.checks.STORAGE_SECONDS", 3.0)
    store.plan.add(Fault("silence", method="GET", times=1, seconds=9.0))
    said, remedy = examined()
    assert said == "the check did not finish within 3 s"
    assert remedy.split()[0] in ("gcloud", "aws")
    assert store.keys(store.bucket) == []


@pytest.mark.slow
def test_what_hangs_with_what_it_wrote_is_named(examined, store, monkeypatch):
    monkeypatch.setattr("flotilla.pipelines.doctor.checks.STORAGE_SECONDS", 0.5)
    monkeypatch.setattr(examination, "TIDY_SECONDS", 0.5)
    store.plan.add(Fault("silence", times=10**6, seconds=3.0))
    said, _ = examined()
    assert "the check did not finish within 0.5 s" in said
    assert f"{store.root}/doctor-" in said
    assert said.endswith("may still exist; delete it")


def test_no_credentials(doctor, s3, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    root = f"s3://{bucket_name()}/k?endpoint={s3.url}&region=a-{bucket_name()}"
    found = doctor(f"storage.root={root}")["storage"]
    assert "or no credentials are set" in found["message"]
    assert found["remedy"] == "aws sts get-caller-identity"


@pytest.mark.parametrize(
    ("root", "check"), [("gs://bucket?endpoint=x", "configuration"), ("s3://B!/k", "storage")]
)
def test_a_root_that_is_none_or_has_a_secret(doctor, root, check):
    assert doctor(f"storage.root={root}").failed() == [check]
    report = doctor("storage.root=minio://b/k?secret=hush")
    assert (report.code, "storage.root" in report.answer["message"]) == (2, True)
    assert "hush" not in str(report)


def test_a_local_folder_is_left_as_it_was_or_cannot_be_written(doctor, tmp_path):
    before = content(tmp_path)
    for settings in ((), (f"storage.root=file://{tmp_path}/a/b",)):
        assert doctor(*settings)["storage"]["state"] == "ok"
    assert content(tmp_path) == before
    (tmp_path / "file").touch()
    report = doctor(f"storage.root=file://{tmp_path}/file/below")
    assert report.failed() == ["storage"]
    assert "cannot write" in report["storage"]["message"]
    assert report["storage"]["remedy"].startswith(f"ls -ld {tmp_path}/file/below")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_removes_the_probe(gcs, tmp_path, number):
    name = bucket_name()
    gcs.create_bucket(name)
    program = (
        "import sys; sys.argv[0] = 'flotilla'; "
        "from flotilla.pipelines.cli.__main__ import main; main()"
    )
    words = ["doctor", "--json", "--set", f"storage.root=gs://{name}/k"]
    process = subprocess.Popen(
        [sys.executable, "-c", program, *words], cwd=tmp_path, stdout=-1, stderr=-1, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    gcs.plan.add(Fault("silence", method="GET", path=name, times=1, seconds=4.0))
    sent = []

    def before(request):
        # The probe file is written, and is now being read.
        if request.startswith("GET") and name in request and not sent:
            # Send the signal only once, because a second signal for a parallel request would kill
            # this process.
            sent.append(number)
            process.send_signal(number)

    gcs.plan.before = before
    try:
        out, err = process.communicate(timeout=300)
    finally:
        gcs.plan.before = None
        process.kill()
    assert (process.returncode, err) == (130, "flotilla: interrupted\n")
    assert '"status": "interrupted"' in out.splitlines()[-1]
    assert gcs.keys(name) == []


def test_signatures_are_checked_where_a_key_is_named(tmp_path, monkeypatch):
    found = signatures(tmp_path.as_uri(), "digits")
    assert (found.state, found.message) == ("ok", "")
    monkeypatch.setenv("FLOTILLA_VERIFYING_KEY", str(tmp_path / "absent.pub"))
    found = signatures(tmp_path.as_uri(), "digits")
    assert found.state == "fail"
    assert "FLOTILLA_VERIFYING_KEY: cannot read" in found.message

"""What the evaluator has measured reaches training in an object store without being waited for."""

from __future__ import annotations

import json
import threading

import pytest

from tests.stores.faults import Fault
from tests.stores.fixtures import bucket_name
from trainer import storage
from trainer.checkpoints.remote import checkpoints_of


@pytest.fixture
def uri(gcs):
    bucket = bucket_name()
    gcs.create_bucket(bucket)
    return f"gs://{bucket}/run/checkpoints"


@pytest.fixture
def kept(uri, tmp_path):
    return checkpoints_of(uri, keep=3, scratch=tmp_path / "chief-0", alone=True)


def test_what_the_evaluator_measured_is_asked_for_in_the_background(kept, uri, gcs):
    row = {"global_step": 5, "created": "x", "validation_loss": 0.5}
    storage.write_bytes(storage.join(uri, "validation.jsonl"), f"{json.dumps(row)}\n".encode())
    asked, answered = threading.Event(), threading.Event()

    def before(request):
        if "validation.jsonl" in request:
            asked.set()
            assert answered.wait(60)

    gcs.plan.before = before
    try:
        assert kept.measured() == []
        assert asked.wait(60)
        assert kept.measured() == []
    finally:
        answered.set()
        gcs.plan.before = None
    with kept.flushed():
        pass
    assert kept.measured() == [row]


def test_training_goes_on_where_the_evaluator_cannot_be_asked(kept, gcs, monkeypatch, caplog):
    monkeypatch.setenv("FLOTILLA_STORAGE_DEADLINE", "0.2")
    gcs.plan.add(Fault(503, path="validation.jsonl", times=-1))
    try:
        with kept.flushed():
            assert kept.measured() == []
    finally:
        gcs.plan.clear()
    assert "has not been available" in caplog.text

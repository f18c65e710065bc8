"""Tests that a running stage writes its progress to its record."""

import json
import threading

from flotilla.components.records import record as module
from flotilla.components.records.record import record_stage
from flotilla.components.records.step_record import PublishedRecord
from flotilla.trainer import events, storage
from flotilla.trainer.events import WorkProgress


def written(at):
    return json.loads(storage.read_bytes(storage.join(at, "steps", "prepare_data.json")))


def test_a_stage_that_goes_on_says_how_far_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PROGRESS_SECONDS", 0.01)
    seen, write = threading.Event(), PublishedRecord.progress

    def progress(record, metrics):
        write(record, metrics)
        seen.set()

    monkeypatch.setattr(PublishedRecord, "progress", progress)
    at = storage.uri_of(tmp_path)
    with record_stage("prepare_data", at) as record:
        events.emit(WorkProgress(what="reading", unit="rows", done=3, total=4, share=0.75))
        assert seen.wait(10)
        found = written(at)
        record.output.done("gs://b/d", {"train": 4})
    assert (found["status"], found["ended"]) == ("running", None)
    assert found["metrics"] == {
        "progress": "reading: 75 %  3/4 rows", "share": 0.75, "seconds_left": -1.0,
    }  # fmt: skip
    assert written(at)["metrics"] == {"train": 4}

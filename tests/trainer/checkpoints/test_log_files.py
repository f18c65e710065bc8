"""Tests that a run's TensorBoard files are uploaded as they grow."""

from flotilla.trainer import storage
from flotilla.trainer.checkpoints.log_files import LogFiles


def test_logs_keep_their_folders_and_only_what_has_grown_goes_again(tmp_path, monkeypatch):
    folder, sent = tmp_path / "logs", []
    monkeypatch.setattr(storage, "write_bytes", lambda place, data: sent.append((place, data)))
    files = LogFiles(folder, "gs://b/logs")
    files.upload()
    (folder / "run" / "train").mkdir(parents=True)
    (folder / "events.0").write_bytes(b"of an older version")
    (folder / "run" / "train" / "events.1").write_bytes(b"one")
    files.upload()
    assert sorted(sent) == [
        ("gs://b/logs/events.0", b"of an older version"),
        ("gs://b/logs/run/train/events.1", b"one"),
    ]
    sent.clear()
    (folder / "run" / "train" / "events.1").write_bytes(b"one, two")
    files.upload()
    assert sent == [("gs://b/logs/run/train/events.1", b"one, two")]

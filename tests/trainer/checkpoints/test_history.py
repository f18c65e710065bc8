"""The rows of `history.jsonl`: whole, in order, and cut back to the checkpoint by a new attempt."""

from __future__ import annotations

import json

import pytest

from trainer import storage
from trainer.checkpoints.history import HISTORY_FILE, History, read_history
from trainer.errors import UserError


def row(step, **metrics):
    return {"global_step": step, "loss": 1 / step, "seconds": step / 10, **metrics}


@pytest.fixture
def uri(tmp_path):
    return storage.uri_of(tmp_path / "check points")


def lines(uri):
    text = (storage.local_path(uri) / HISTORY_FILE).read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def test_a_run_that_has_not_begun_has_no_rows(uri):
    assert read_history(uri) == []
    empty = History(uri, start=0)
    assert empty.rows == []
    assert empty.seconds() == 0.0


def test_each_row_is_in_the_file_at_once(uri):
    growing = History(uri, start=0)
    for count, step in enumerate((10, 20, 30), start=1):
        growing.add(row(step))
        assert lines(uri) == read_history(uri) == growing.rows
        assert len(growing.rows) == count
    assert growing.seconds() == 3.0


def test_the_file_is_all_that_is_left(uri):
    History(uri, start=0).add(row(10))
    assert [path.name for path in storage.local_path(uri).iterdir()] == [HISTORY_FILE]


def test_a_new_attempt_continues_rows_and_time(uri):
    first = History(uri, start=0)
    first.add(row(10))
    first.add(row(20, validation_loss=0.5))
    second = History(uri, start=20)
    assert second.rows == first.rows
    assert second.seconds() == 2.0
    second.add(row(30))
    assert [each["global_step"] for each in read_history(uri)] == [10, 20, 30]


@pytest.mark.parametrize(("start", "kept"), [(0, []), (9, []), (10, [10]), (25, [10, 20])])
def test_what_came_after_the_checkpoint_is_made_again(uri, start, kept):
    first = History(uri, start=0)
    for step in (10, 20, 30):
        first.add(row(step))
    second = History(uri, start=start)
    assert [each["global_step"] for each in second.rows] == kept
    assert second.seconds() == (kept[-1] / 10 if kept else 0.0)
    # Until the new attempt has a row of its own the old file stays complete.
    assert len(read_history(uri)) == 3
    second.add(row(99))
    assert [each["global_step"] for each in read_history(uri)] == [*kept, 99]


def test_metrics_keep_their_exact_values(uri):
    exact = row(3, validation_accuracy=0.1 + 0.2, learning_rate=1e-7)
    History(uri, start=0).add(exact)
    assert read_history(uri) == [exact]


@pytest.mark.parametrize(
    "damaged",
    ["", "{", '{"global_step": 20, "lo', "null", "[]", "17", '{"loss": 1.0, "seconds": 2.0}',
     '{"global_step": "now", "seconds": 2.0}', '{"global_step": 20, "seconds": null}', "\ufffd",
     '{"global_step": "20", "seconds": 2.0}', "[" * 100_000],
    ids=range(12),
)  # fmt: skip
def test_one_damaged_line_hides_no_other_and_ends_no_training(uri, caplog, damaged):
    whole = [json.dumps(row(step)) for step in (10, 30)]
    text = "\n".join([whole[0], damaged, whole[1], ""])
    storage.write_bytes(storage.join(uri, HISTORY_FILE), text.encode())
    assert [each["global_step"] for each in read_history(uri)] == [10, 30]
    assert caplog.text.count("history.jsonl: line 2\n") == 1
    continued = History(uri, start=30)
    continued.add(row(40))
    assert [each["global_step"] for each in lines(uri)] == [10, 30, 40]


def test_a_file_in_the_place_of_the_folder_is_said_in_one_line(uri):
    storage.local_path(uri).write_text("in the way")
    with pytest.raises(UserError, match="there is a file where a folder is needed"):
        History(uri, start=0).add(row(10))

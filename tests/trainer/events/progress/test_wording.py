"""Tests how progress is worded."""

import pytest

from flotilla.trainer.events import WorkProgress
from flotilla.trainer.events.progress.wording import format_line


@pytest.mark.parametrize(
    ("event", "line"),
    [
        ({"done": 43_000_000, "total": 1_000_000_000, "unit": "bytes", "share": 0.043},
         "uploading: 4 %  43/1,000 MB"),
        ({"done": 9_500, "total": 12_000, "unit": "bytes", "share": 0.79, "rate": 400.0},
         "uploading: 79 %  9.5/12 kB  400 B/s"),
        ({"seconds": 42.0}, "uploading: 42 s"),
        ({"done": 3, "total": 5, "unit": "tasks", "detail": "worker-1 has no node"},
         "uploading: 3/5 tasks  worker-1 has no node"),
        ({"seconds": 42.0, "is_over": True}, "uploading: done, 42 s"),
        ({"share": 0.9999, "done": 9, "unit": "rows", "rate": 0.5},
         "uploading: 99 %  9 rows  0.5 rows/s"),
    ],
)  # fmt: skip
def test_a_line_has_what_is_known(event, line):
    assert format_line(WorkProgress(what="uploading", **event)) == line

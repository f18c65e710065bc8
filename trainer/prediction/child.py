"""A prediction in a process of its own: the request is a file, and what is going on another one.

TensorFlow is loaded in this process alone, and whatever it says stays out of the rows.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import IO

from trainer.errors import UserError
from trainer.json_records import from_tree, parse, tree_of
from trainer.prediction.predict import predict
from trainer.prediction.request import Request

EVENTS = "events.jsonl"
# Seconds between two lines that say how many rows there are.
_PAUSE = 0.2


def answer(request: Path, workdir: Path) -> None:
    """Answer the request of a file; lines in `EVENTS` below `workdir` say how far it is.

    A line has `rows`, `note`, or as the last one `summary`.

    Raises:
        UserError: see `predict`.
    """
    wanted = from_tree(Request, parse(request.read_text(encoding="utf-8")))
    if wanted is None:
        raise UserError(f"{request} is no request of this version")
    with (workdir / EVENTS).open("a", encoding="utf-8") as file:
        reported = _Reported(file)
        try:
            found = tree_of(predict(wanted, reported))
        except BrokenPipeError:
            found = {"closed": True}
        _write(file, {"summary": found})


class _Reported:
    """Writes what a prediction tells, rows only now and then."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._last = 0.0

    def __call__(self, rows: int, note: str) -> None:
        now = time.monotonic()
        if note:
            _write(self._file, {"note": note})
        elif now - self._last > _PAUSE:
            self._last = now
            _write(self._file, {"rows": rows})


def _write(file: IO[str], tree: object) -> None:
    file.write(json.dumps(tree) + "\n")
    file.flush()

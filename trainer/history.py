"""The course of a training run: the rows of `history.jsonl` beside the checkpoints.

The file is written whole and swapped in, so that a reader never meets half a row. A life that
resumes drops the rows after its checkpoint: they are about to be made again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from trainer import storage

FILE = "history.jsonl"


class History:
    """Rows by global step; each has at least `global_step` and `seconds`."""

    def __init__(
        self,
        uri: str,
        *,
        start: int,
        write: Callable[[str, bytes], None] = storage.write_bytes,
    ) -> None:
        """Read the rows up to global step `start` from below the checkpoints' `uri`."""
        self._uri = storage.join(uri, FILE)
        self._write = write
        self.rows = [row for row in read(uri) if row["global_step"] <= start]

    def add(self, row: dict[str, Any]) -> None:
        """Append one row of finite figures."""
        self.rows.append(row)
        text = "".join(json.dumps(each) + "\n" for each in self.rows)
        self._write(self._uri, text.encode())

    def seconds(self) -> float:
        """Return the seconds of training so far, over all lives."""
        return float(self.rows[-1]["seconds"]) if self.rows else 0.0


def read(uri: str) -> list[dict[str, Any]]:
    """Return the rows below the checkpoints' `uri`; none when training has not begun."""
    try:
        text = storage.read_bytes(storage.join(uri, FILE)).decode()
    except storage.Missing:
        return []
    return [json.loads(line) for line in text.splitlines()]

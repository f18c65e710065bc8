"""The history of a run, as rows next to its checkpoints.

`history.jsonl` is the chief's: one row for each inner loop. A new attempt drops the rows after its
checkpoint, as it repeats those steps. `validation.jsonl` is the evaluator's: one row a checkpoint,
identified by its global step and the time at which it was published. Each file has one writer and
is replaced by an atomic write, so that a reader never sees half a row.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from trainer import storage
from trainer.storage import Manifest

HISTORY_FILE = "history.jsonl"
VALIDATIONS_FILE = "validation.jsonl"
VALIDATION_LOSS = "validation_loss"
log = logging.getLogger(__name__)


class History:
    """Rows by global step; each has at least `global_step` and `seconds`."""

    def __init__(
        self, uri: str, *, start: int, write: Callable[[str, bytes], None] = storage.write_bytes
    ) -> None:
        """Read the rows up to global step `start` from below the checkpoints' `uri`."""
        self._uri = storage.join(uri, HISTORY_FILE)
        self._write = write
        self.rows = [row for row in read_history(uri) if row["global_step"] <= start]

    def add(self, row: dict[str, Any]) -> None:
        """Append one row of finite numbers."""
        self.rows.append(row)
        text = "".join(json.dumps(each) + "\n" for each in self.rows)
        self._write(self._uri, text.encode())

    def seconds(self) -> float:
        """Return the seconds of training so far, over all attempts."""
        return float(self.rows[-1]["seconds"]) if self.rows else 0.0


def read_history(uri: str) -> list[dict[str, Any]]:
    """Return the rows below the checkpoints' `uri`; none when training has not begun.

    A line that is no such row is skipped with a warning: a damaged file must not end training.
    """
    place = storage.join(uri, HISTORY_FILE)
    rows = []
    for number, line in enumerate(_lines(place), start=1):
        if row := _row(line):
            rows.append(row)
        else:
            log.warning("passed over: line %d of %s is no row of a history", number, place)
    return rows


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    # The latter of junk that is nested too deep.
    except (ValueError, RecursionError):
        return None
    timed = isinstance(row, dict) and isinstance(row.get("seconds"), int | float)
    return row if timed and isinstance(row.get("global_step"), int) else None


class Validations:
    """The rows of one run, by global step."""

    def __init__(self, uri: str) -> None:
        """Continue the rows below the checkpoints' `uri`."""
        self._uri = storage.join(uri, VALIDATIONS_FILE)
        self._rows = {row["global_step"]: row for row in read_validations(uri)}

    def has(self, manifest: Manifest) -> bool:
        """Say whether exactly this checkpoint was measured."""
        row = self._rows.get(manifest.fields["global_step"], {})
        return bool(row.get("created") == manifest.created)

    def add(self, manifest: Manifest, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Record the finite metrics of a checkpoint; return its row."""
        step = int(manifest.fields["global_step"])
        named = {f"validation_{name}": value for name, value in metrics.items()}
        row = {"global_step": step, "created": manifest.created, **named}
        self._rows[step] = row
        text = "".join(f"{json.dumps(self._rows[each])}\n" for each in sorted(self._rows))
        storage.write_bytes(self._uri, text.encode())
        return row


def read_validations(uri: str) -> list[dict[str, Any]]:
    """Return the rows below the checkpoints' `uri` by global step; none without an evaluator.

    A line that is no such row is skipped: a damaged file must not end training.
    """
    rows = []
    for line in _lines(storage.join(uri, VALIDATIONS_FILE)):
        with suppress(ValueError, TypeError, KeyError):
            row = json.loads(line)
            int(row["global_step"]), str(row["created"]), float(row[VALIDATION_LOSS])
            rows.append(row)
    return rows


def _lines(uri: str) -> list[str]:
    try:
        return storage.read_bytes(uri).decode(errors="replace").splitlines()
    except storage.Missing:
        return []


def merge_validations(
    history: Iterable[Mapping[str, Any]], rows: Iterable[Mapping[str, Any]]
) -> list[Any]:
    """Merge the evaluator's metrics into the rows of a history, by global step."""
    by_step: dict[int, dict[str, Any]] = {}
    for row in (*history, *rows):
        by_step.setdefault(row["global_step"], {}).update(row)
    return [by_step[step] for step in sorted(by_step)]

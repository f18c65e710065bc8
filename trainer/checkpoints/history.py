"""The history of a run, as rows next to its checkpoints.

`history.jsonl` is the chief's: one row for each inner loop. A new attempt drops the rows after its
checkpoint, as it repeats those steps. `validation.jsonl` is the evaluator's: one row a checkpoint,
identified by its global step and the time at which it was published; of two of one step the later
one counts. Where there is no evaluator, the chief writes to it what it measures of a checkpoint
that is published already. So each file has one writer; see `trainer.checkpoints.rows`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from trainer import storage
from trainer.checkpoints.rows import RowFile, read_rows, row_file
from trainer.json_records import is_number
from trainer.storage import Manifest

HISTORY_FILE = "history.jsonl"
VALIDATIONS_FILE = "validation.jsonl"
# What the names of the metrics of a validation begin with in a row.
VALIDATION = "validation_"
VALIDATION_LOSS = f"{VALIDATION}loss"


class History:
    """Rows by global step; each has at least `global_step` and `seconds`."""

    def __init__(self, uri: str, *, start: int, file: RowFile | None = None) -> None:
        """Read the rows up to global step `start` from below the checkpoints' `uri`."""
        self._file = file or row_file(storage.join(uri, HISTORY_FILE))
        self._begun = False
        self.rows = [row for row in read_history(uri) if row["global_step"] <= start]

    def add(self, row: dict[str, Any]) -> None:
        """Append one row of finite numbers; raises `UserError`."""
        self.rows.append(row)
        if self._begun:
            self._file.append(row)
            return
        # Without the rows of the attempt before, and without what is damaged.
        self._file.begin(self.rows)
        self._begun = True

    def seconds(self) -> float:
        """Return the seconds of training so far, over all attempts."""
        return float(self.rows[-1]["seconds"]) if self.rows else 0.0


def read_history(uri: str) -> list[dict[str, Any]]:
    """Return the rows below the checkpoints' `uri`; none when training has not begun.

    A line that is no such row is passed over with a warning: it must not end training.
    """
    return read_rows(storage.join(uri, HISTORY_FILE), _is_of_history)


def _is_of_history(row: Mapping[str, Any]) -> bool:
    return _is_step(row.get("global_step")) and is_number(row.get("seconds")) and _is_finite(row)


def _is_of_validation(row: Mapping[str, Any]) -> bool:
    created, loss = row.get("created"), row.get(VALIDATION_LOSS)
    return (
        _is_step(row.get("global_step"))
        and isinstance(created, str)
        and is_number(loss)
        and _is_finite(row)
    )


def _is_step(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_finite(row: Mapping[str, Any]) -> bool:
    """Say whether each column of a chart is a number, and no number is infinite."""
    is_plain = all(is_number(value) for value in row.values() if isinstance(value, int | float))
    return is_plain and all(is_number(row[name]) for name in _COLUMNS if name in row)


_COLUMNS = ("loss", VALIDATION_LOSS, "learning_rate", "steps_per_second")


class Validations:
    """The rows of one run, by global step."""

    def __init__(self, uri: str) -> None:
        """Continue the rows below the checkpoints' `uri`."""
        self._file = row_file(storage.join(uri, VALIDATIONS_FILE))
        self._begun = False
        self._rows = {row["global_step"]: row for row in read_validations(uri)}

    def has(self, manifest: Manifest) -> bool:
        """Say whether exactly this checkpoint was measured."""
        row = self._rows.get(manifest.fields["global_step"], {})
        return bool(row.get("created") == manifest.created)

    def add(self, manifest: Manifest, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Record the finite metrics of a checkpoint; return its row."""
        step = int(manifest.fields["global_step"])
        named = {f"{VALIDATION}{name}": value for name, value in metrics.items()}
        row = {"global_step": step, "created": manifest.created, **named}
        self._rows[step] = row
        if self._begun:
            self._file.append(row)
        else:
            self._file.begin(self._rows[each] for each in sorted(self._rows))
        self._begun = True
        self._file.upload()
        return row


def read_validations(uri: str) -> list[dict[str, Any]]:
    """Return the rows below the checkpoints' `uri` by global step; none without an evaluator.

    A line that is no such row is passed over with a warning: it must not end training.
    """
    rows = read_rows(storage.join(uri, VALIDATIONS_FILE), _is_of_validation)
    newest = {row["global_step"]: row for row in rows}
    return [newest[step] for step in sorted(newest)]


def merge_validations(
    history: Iterable[Mapping[str, Any]], rows: Iterable[Mapping[str, Any]]
) -> list[Any]:
    """Merge the evaluator's metrics into the rows of a history, by global step."""
    by_step: dict[int, dict[str, Any]] = {}
    for row in (*history, *rows):
        by_step.setdefault(row["global_step"], {}).update(row)
    return [by_step[step] for step in sorted(by_step)]

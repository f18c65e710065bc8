"""What the evaluator has measured: rows of `validation.jsonl` beside the checkpoints.

One row a checkpoint, told from another one of the same global step by when it was made. The file is
written whole and swapped in, by the evaluator alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from trainer import storage
from trainer.storage import Manifest

FILE = "validation.jsonl"
LOSS = "validation_loss"


class Validations:
    """The rows of one run, by global step."""

    def __init__(self, uri: str) -> None:
        """Go on with the rows below the checkpoints' `uri`."""
        self._uri = storage.join(uri, FILE)
        self._rows = {row["global_step"]: row for row in read(uri)}

    def has(self, manifest: Manifest) -> bool:
        """Say whether this very checkpoint was measured."""
        row = self._rows.get(manifest.fields["global_step"], {})
        return bool(row.get("created") == manifest.created)

    def add(self, manifest: Manifest, figures: Mapping[str, float]) -> dict[str, Any]:
        """Keep the finite figures of a checkpoint; return its row."""
        step = int(manifest.fields["global_step"])
        named = {f"validation_{name}": value for name, value in figures.items()}
        row = {"global_step": step, "created": manifest.created, **named}
        self._rows[step] = row
        text = "".join(f"{json.dumps(self._rows[each])}\n" for each in sorted(self._rows))
        storage.write_bytes(self._uri, text.encode())
        return row


def read(uri: str) -> list[dict[str, Any]]:
    """Return the rows below the checkpoints' `uri` by global step; none without an evaluator.

    A line that is no such row is left out: no damage to this file may reach training.
    """
    try:
        text = storage.read_bytes(storage.join(uri, FILE)).decode(errors="replace")
    except storage.Missing:
        return []
    rows = []
    for line in text.splitlines():
        with suppress(ValueError, TypeError, KeyError):
            row = json.loads(line)
            int(row["global_step"]), str(row["created"]), float(row[LOSS])
            rows.append(row)
    return rows


def merged(history: Iterable[Mapping[str, Any]], rows: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Return the rows of a history with the evaluator's figures in them, by global step."""
    by_step: dict[int, dict[str, Any]] = {}
    for row in (*history, *rows):
        by_step.setdefault(row["global_step"], {}).update(row)
    return [by_step[step] for step in sorted(by_step)]

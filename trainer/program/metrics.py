"""Reads the metrics that a program reports as JSON lines in its output or in `metrics.jsonl`.

A line is an object with `step` (or `global_step`). The names `loss`, `learning_rate`, `epoch`,
`epochs`, `steps` (of the whole training) and `steps_per_second` have a fixed meaning. The prefixes
`val_` and `validation_` mark metrics of a validation. Other numbers are training metrics, except
`time` and `seconds`, which are ignored.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flotilla.trainer import events
from flotilla.trainer.checkpoints.history import History
from flotilla.trainer.config.main_metric import VALIDATION, VALIDATION_LOSS
from flotilla.trainer.runtime.json_records import is_number, parse_mapping

MAX_ROWS = 2000
# The largest step that is accepted. JSON parsers may round larger integers.
_MOST_STEPS = 2**53
_MOST_NAMES, _LONGEST_NAME = 200, 100
_PROGRESS_SECONDS = 0.5
_LONGEST_LINE = 1 << 16
_MOST_BYTES = 1 << 22
_SAID, _MOST_SAVED = "said.json", 200
_NAMES = {"global_step": "step", "lr": "learning_rate", "total_steps": "steps"}
_PREFIXES = (VALIDATION, "val_")
log = logging.getLogger(__name__)
_KNOWN = ("loss", "learning_rate", "steps_per_second", "epoch", "epochs")


class MetricsFile:
    """A reader of the lines that a program appends to a file."""

    def __init__(self, path: Path) -> None:
        """Skip the lines that the file already has."""
        self._path = path
        self._position, self._rest = 0, b""
        self.skip()

    def skip(self) -> None:
        """Skip the lines that the file has now."""
        self._rest = b""
        self._position = self._path.stat().st_size if self._path.is_file() else 0

    def read(self) -> list[tuple[str, float]]:
        """Return the new complete lines, each with the modification time of the file."""
        try:
            there = self._path.stat()
            if there.st_size < self._position:
                # The program has started a new file.
                self._position, self._rest = 0, b""
            if there.st_size == self._position:
                return []
            with self._path.open("rb") as file:
                file.seek(self._position)
                data = file.read(_MOST_BYTES)
        except OSError:
            return []
        self._position += len(data)
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[:_LONGEST_LINE]
        return [(each.decode("utf-8", "replace"), there.st_mtime) for each in lines]


class Metrics:
    """The steps and metrics of one attempt, which become events and rows of the history."""

    def __init__(self, history: History, steps: int, start: int) -> None:
        """Start at global step `start`. Training ends at step `steps` (0 if unknown)."""
        self._history = history
        self.steps = steps
        self._begun = history.seconds()
        self._started = time.monotonic()
        self.step = start
        self.said_steps = False
        self.stepped_at = time.monotonic()
        #: The newest metrics, for the manifest of the next checkpoint.
        self.newest: dict[str, Any] = {}
        self._said: deque[tuple[float, int]] = deque(maxlen=10_000)
        self._rate = (time.monotonic(), start)
        self._progress_at = -1.0
        self._waiting: dict[str, Any] | None = None
        self._saved = -1
        self._names: set[str] = set()

    def take(self, line: str, when: float) -> None:
        """Process a line that was written at Unix time `when`. Ignore it if it reports no step."""
        try:
            tree = parse_mapping(line)
        except ValueError:
            return
        said = {_NAMES.get(name, name): value for name, value in tree.items()}
        step = said.pop("step", None)
        if not is_number(step) or not 0 <= step == int(step) <= _MOST_STEPS:
            return
        if not self.said_steps and step < self.step:
            log.warning(
                "the program starts at step %d, although its checkpoint is from step %d; check "
                "that it restores the checkpoint in FLOTILLA_CHECKPOINTS", step, self.step,
            )  # fmt: skip
        if not self.said_steps or step != self.step:
            self.stepped_at = time.monotonic()
        self.step, self.said_steps = int(step), True
        self._said.append((when, self.step))
        if is_number(total := said.pop("steps", None)) and 0 < total <= _MOST_STEPS:
            self.steps = int(total)
        self._note({name: value for name, value in said.items() if self._is_metric(name, value)})

    def _is_metric(self, name: str, value: object) -> bool:
        if not is_number(value) or len(name) > _LONGEST_NAME or not name.isprintable():
            return False
        if len(self._names) < _MOST_NAMES:
            self._names.add(name)
        return name in self._names

    def step_at(self, when: float, number: int) -> int:
        """Return the newest step that was reported at or before the Unix time `when`, or -1.

        If `number`, the step in a checkpoint's name, was reported and is not lower, return it.
        """
        steps = [step for at, step in self._said if at <= when]
        found = steps[-1] if steps else -1
        return number if number >= found and number in {step for _, step in self._said} else found

    def save(self, folder: Path) -> None:
        """Write the newest steps with their times for the next agent. Ignore file errors."""
        if self._saved == self.step:
            return
        newest = list(self._said)[-_MOST_SAVED:]
        with suppress(OSError):
            staged = folder / f"{_SAID}.new"
            staged.write_text(json.dumps({"said": newest}), encoding="ascii")
            staged.replace(folder / _SAID)
            self._saved = self.step

    def restore(self, folder: Path) -> None:
        """Read the steps that `save` wrote."""
        with suppress(OSError, ValueError, TypeError):
            tree = parse_mapping((folder / _SAID).read_bytes())
            self._said.extend((float(at), int(step)) for at, step in tree["said"])

    def flush(self) -> None:
        """Report the newest metrics now, because the program may report no more lines."""
        if self._waiting:
            self._report(self._waiting)

    def _note(self, said: Mapping[str, float]) -> None:
        validation = {
            VALIDATION + name[len(prefix) :]: value
            for name, value in said.items()
            for prefix in _PREFIXES
            if name.startswith(prefix)
        }
        plain = {
            name: value
            for name, value in said.items()
            if not name.startswith(_PREFIXES) and name not in ("time", "seconds")
        }
        row = {"global_step": self.step, **plain, **validation}
        waiting = self._waiting or {}
        same = waiting.get("global_step") == self.step
        self._waiting = {**waiting, **row} if same else row
        self.newest = {**self.newest, **{n: v for n, v in row.items() if n != "global_step"}}
        if validation:
            shorter = {name.removeprefix(VALIDATION): each for name, each in validation.items()}
            events.emit(events.Validation(global_step=self.step, metrics=shorter))
        if validation or time.monotonic() - self._progress_at >= _PROGRESS_SECONDS:
            self._report(self._waiting)

    def _report(self, row: dict[str, Any]) -> None:
        now, self._waiting = time.monotonic(), None
        self._progress_at = now
        since, before = self._rate
        rate = row.get("steps_per_second")
        if rate is None:
            rate = max(0.0, (self.step - before) / max(now - since, 1e-3))
        self._rate = (now, self.step)
        seconds = self._begun + now - self._started
        row |= {"steps_per_second": round(rate, 3), "seconds": round(seconds, 3)}
        left = (self.steps - self.step) / rate if rate and self.steps else -1.0
        metrics = {
            name: value
            for name, value in row.items()
            if name not in (*_KNOWN, "global_step", "seconds") and not name.startswith(VALIDATION)
        }
        events.emit(
            events.Progress(
                global_step=self.step,
                steps=self.steps,
                seconds=row["seconds"],
                seconds_left=round(max(left, -1.0), 1),
                metrics=metrics,
                **{name: float(row.get(name, self.newest.get(name, 0.0))) for name in _KNOWN},
            )
        )
        self._add(row)

    def _add(self, row: dict[str, Any]) -> None:
        """Add a row to the history, which keeps all validations and about `MAX_ROWS` other rows."""
        last = self._history.rows[-1]["global_step"] if self._history.rows else -1
        every = max(self.steps, self.step) / MAX_ROWS
        if row["global_step"] >= last and (
            VALIDATION_LOSS in row or last < 0 or row["global_step"] - last >= every
        ):
            self._history.add(row)

"""What a run writes next to its checkpoints: rows of metrics, and the files of TensorBoard.

The chief writes `history.jsonl`, at most one row per inner loop. A new attempt drops the rows of
steps after the one at which it begins. The evaluator writes `validation.jsonl`, one row per
checkpoint. If a step has two rows, the later one counts.

In an object store, rows are in segments, `NAME.jsonl`, `NAME.2.jsonl` and so on. Only the last
segment is rewritten, so the number of written bytes grows linearly with the rows and not
quadratically. Readers skip invalid lines, such as a line that a killed process has truncated.
`UploadQueue` uploads rows, files and checkpoints to an object store in the background.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flotilla.trainer import events, storage
from flotilla.trainer.config.main_metric import VALIDATION, VALIDATION_LOSS
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.runtime.json_records import is_number, parse_mapping
from flotilla.trainer.storage import Manifest

HISTORY_FILE = "history.jsonl"
VALIDATIONS_FILE = "validation.jsonl"
SEGMENT_BYTES = 1 << 20
_SUFFIX = ".jsonl"
# Maximum number of invalid lines to list in a warning.
_MOST_NAMED = 5
log = logging.getLogger(__name__)

Row = dict[str, Any]


class History:
    """The rows of a run, in order. Each row has at least `global_step` and `seconds`."""

    def __init__(self, uri: str, *, start: int, file: RowFile | None = None) -> None:
        """Read the rows of the run with checkpoints below `uri`, up to global step `start`."""
        self._file = file or row_file(storage.join(uri, HISTORY_FILE))
        self._begun = False
        self.rows = [row for row in read_history(uri) if row["global_step"] <= start]

    def add(self, row: dict[str, Any]) -> None:
        """Append one row of finite numbers. Raises `UserError`."""
        self.rows.append(row)
        if self._begun:
            self._file.append(row)
            return
        # Before the first row, rewrite the file to drop invalid lines and rows after `start`.
        self._file.begin(self.rows)
        self._begun = True

    def seconds(self) -> float:
        """Return the duration of training over all attempts, in seconds."""
        return float(self.rows[-1]["seconds"]) if self.rows else 0.0


def read_history(uri: str) -> list[dict[str, Any]]:
    """Return the history of the run with checkpoints below `uri` (empty before training)."""
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
    is_plain = all(is_number(value) for value in row.values() if isinstance(value, int | float))
    return is_plain and all(is_number(row[name]) for name in _COLUMNS if name in row)


_COLUMNS = ("loss", VALIDATION_LOSS, "learning_rate", "steps_per_second")


class Validations:
    """The validation rows of one run, keyed by global step."""

    def __init__(self, uri: str) -> None:
        """Read the rows next to the checkpoints below `uri`. `add` appends a row."""
        self._file = row_file(storage.join(uri, VALIDATIONS_FILE))
        self._begun = False
        self._rows = {row["global_step"]: row for row in read_validations(uri)}

    def has(self, manifest: Manifest) -> bool:
        """Return whether this checkpoint was measured, not just an earlier one at the same step."""
        row = self._rows.get(manifest.fields["global_step"], {})
        return bool(row.get("created") == manifest.created)

    def add(self, manifest: Manifest, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Record the metrics of a checkpoint, which must be finite, and return the new row."""
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
    """Return the evaluator's latest row for each global step, in order of the steps."""
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


def read_rows(uri: str, is_row: Callable[[Row], bool]) -> list[Row]:
    """Return the rows of the file at `uri` and its segments. Raises `UserError`."""
    rows: list[Row] = []
    number, size = 0, SEGMENT_BYTES
    while size >= SEGMENT_BYTES:
        number += 1
        place = _segment(uri, number)
        try:
            data = storage.read_bytes(place)
        except storage.Missing:
            break
        rows += _parse_rows(data, place, is_row)
        size = len(data)
    return rows


def _parse_rows(data: bytes, place: str, is_row: Callable[[Row], bool]) -> list[Row]:
    rows, damaged = [], []
    *lines, last = data.split(b"\n")
    for number, line in enumerate([*lines, last] if last else lines, start=1):
        try:
            row = parse_mapping(line)
        except ValueError:
            row = {}
        if row and is_row(row):
            rows.append(row)
        elif number <= len(lines):
            damaged.append(number)
    if damaged:
        named = ", ".join(map(str, damaged[:_MOST_NAMED]))
        more = f" and {len(damaged) - _MOST_NAMED} more" if damaged[_MOST_NAMED:] else ""
        word = "lines" if damaged[1:] else "line"
        log.warning("skipped invalid rows of %s: %s %s%s", place, word, named, more)
    return rows


def _segment(uri: str, number: int) -> str:
    if number == 1:
        return uri
    stem = storage.name_of(uri).removesuffix(_SUFFIX)
    return storage.join(storage.parent_of(uri), f"{stem}.{number}{_SUFFIX}")


def _line(row: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(row)}\n".encode()


class RowFile:
    """A writer of rows to a file in a file system. It calls `require` before each write."""

    def __init__(self, uri: str, require: Callable[[], None] = lambda: None) -> None:
        """Store the arguments. Nothing is written yet."""
        self._uri = uri
        self._require = require

    def begin(self, rows: Iterable[Row]) -> None:
        """Replace all rows. Raises `UserError`."""
        self._require()
        storage.write_bytes(self._uri, b"".join(map(_line, rows)))

    def append(self, row: Row) -> None:
        """Append one row. Raises `UserError`."""
        self._require()
        storage.append_line(self._uri, _line(row))

    def upload(self) -> None:
        """Write pending rows. There are none in a file system."""


class SegmentedRowFile(RowFile):
    """A writer of rows to a file in an object store. Any thread may call `upload`."""

    def __init__(self, uri: str, require: Callable[[], None] = lambda: None) -> None:
        """Store the arguments. No request is sent yet."""
        super().__init__(uri, require)
        self._mutex = threading.Lock()
        # Segments to write, by number. Only the last one grows.
        self._open: dict[int, bytearray] = {}
        self._is_new = False

    def begin(self, rows: Iterable[Row]) -> None:
        """Replace all rows at the next upload."""
        self._require()
        with self._mutex:
            self._open, self._is_new = {1: bytearray()}, True
            for row in rows:
                self._add(row)

    def append(self, row: Row) -> None:
        """Append one row at the next upload, after the rows of `begin`."""
        self._require()
        with self._mutex:
            self._add(row)

    def _add(self, row: Row) -> None:
        last = max(self._open)
        self._open[last] += _line(row)
        if len(self._open[last]) >= SEGMENT_BYTES:
            self._open[last + 1] = bytearray()

    def upload(self) -> None:
        """Write the changed segments, and delete the segments of earlier attempts."""
        with self._mutex:
            segments = {number: bytes(data) for number, data in self._open.items()}
            is_new = self._is_new
        if not segments:
            return
        self._require()
        last = max(segments)
        if is_new:
            # An empty last segment is not written, so also delete the old file with its number.
            self._delete_segments(max((each for each in segments if segments[each]), default=1))
        for number, data in segments.items():
            if data or number == 1:
                storage.write_bytes(_segment(self._uri, number), data)
            with self._mutex:
                # Keep a segment if `begin` has replaced it during the upload.
                if number < last and bytes(self._open.get(number, b"")) == data:
                    del self._open[number]
        with self._mutex:
            self._is_new = False

    def _delete_segments(self, last: int) -> None:
        stem = storage.name_of(self._uri).removesuffix(_SUFFIX)
        names = storage.names(storage.parent_of(self._uri))
        found = [
            re.fullmatch(rf"{re.escape(stem)}\.([0-9]+){re.escape(_SUFFIX)}", n) for n in names
        ]
        # Delete the highest segment first. Otherwise, a killed process could leave a gap, and
        # readers would miss the segments after it.
        for number in sorted((int(each[1]) for each in found if each), reverse=True):
            if number > last:
                storage.delete(_segment(self._uri, number))


def row_file(uri: str, require: Callable[[], None] = lambda: None) -> RowFile:
    """Return a writer for the rows at `uri`, in a file system or an object store."""
    return (RowFile if storage.local_path(uri) else SegmentedRowFile)(uri, require)


class _Upload(NamedTuple):
    """An upload, and a function to call if a newer upload replaces it."""

    run: Callable[[], None]
    replaced: Callable[[], None]


class UploadQueue:
    """A thread that runs uploads, one at a time.

    A newer upload replaces a waiting one in the same slot.
    """

    def __init__(self) -> None:
        """Create an empty queue. The first upload starts a daemon thread."""
        self._waiting: dict[str, _Upload] = {}
        self._failed: dict[str, tuple[_Upload, UserError]] = {}
        self._broken: BaseException | None = None
        self._busy = False
        self._change = threading.Condition()
        self._begun = False

    def put(
        self, slot: str, run: Callable[[], None], replaced: Callable[[], None] = lambda: None
    ) -> None:
        """Queue an upload, which replaces a waiting or failed one in the same slot.

        `replaced` is called, on any thread, when a newer upload replaces this one. Raises
        `UserError` if an earlier upload failed for a reason that retries cannot fix.
        """
        with self._change:
            self._raise_lasting()
            if not self._begun:
                self._begun = True
                threading.Thread(target=self._run, name="uploads", daemon=True).start()
            older = [self._waiting.get(slot), self._failed.get(slot, (None,))[0]]
            self._waiting[slot] = _Upload(run, replaced)
            self._change.notify_all()
        for each in older:
            if each:
                each.replaced()

    def flush(self) -> None:
        """Wait for all uploads, and retry failed ones once. Raises `UserError`."""
        with self._change:
            self._wait()
            for slot, (upload, _) in self._failed.items():
                self._waiting.setdefault(slot, upload)
            self._failed.clear()
            self._change.notify_all()
            self._wait()
            self._raise_lasting()
            for _, error in self._failed.values():
                raise error

    def _wait(self) -> None:
        self._change.wait_for(lambda: not self._waiting and not self._busy)

    def _raise_lasting(self) -> None:
        if self._broken:
            raise self._broken
        for _, error in self._failed.values():
            if not isinstance(error, storage.Unavailable):
                raise error

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: bool(self._waiting))
                slot = next(iter(self._waiting))
                upload = self._waiting.pop(slot)
                self._busy = True
            failure = self._attempt(upload)
            with self._change:
                # Ignore the error if a newer upload waits, which will show whether it persists.
                is_replaced = failure is not None and slot in self._waiting
                if failure and not is_replaced:
                    self._failed[slot] = (upload, failure)
                elif not failure:
                    self._failed.pop(slot, None)
            if is_replaced:
                upload.replaced()
            with self._change:
                self._busy = False
                self._change.notify_all()

    def _attempt(self, upload: _Upload) -> UserError | None:
        try:
            upload.run()
        except UserError as error:
            log.warning("%s", error)
            events.emit(events.UploadFailed(reason=str(error)))
            return error
        except BaseException as error:
            # A bug must end training, as it would on the training thread.
            self._broken = error
        return None


class LogFiles:
    """TensorBoard's files in a local folder, which are uploaded to an object store."""

    def __init__(self, folder: Path, uri: str) -> None:
        """Copy the files in `folder` to the same paths below `uri` at each `upload`."""
        self.folder = folder
        self._uri = uri
        self._uploaded: dict[Path, int] = {}
        self._has_failed = False

    def upload(self) -> None:
        """Upload the files that have grown. Log the first failure as a warning, others as debug."""
        try:
            for path in sorted(self.folder.rglob("*")):
                # Skip links, because a user's program may link to files that are not logs.
                if (
                    path.is_symlink()
                    or not path.is_file()
                    or self._uploaded.get(path) == path.stat().st_size
                ):
                    continue
                data = path.read_bytes()
                place = path.relative_to(self.folder)
                storage.write_bytes(storage.join(self._uri, *place.parts), data)
                self._uploaded[path] = len(data)
        except (UserError, OSError) as error:
            level = logging.DEBUG if self._has_failed else logging.WARNING
            log.log(level, "the TensorBoard logs cannot be uploaded: %s", error)
            self._has_failed = True

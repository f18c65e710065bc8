"""Predicts data of any size with an exported model, and writes one row per example.

Memory use does not grow with the number of rows, because files are read and rows written batch by
batch. Prediction runs in a separate process, so that no other process imports TensorFlow. Request,
events and summary are passed in files, so that TensorFlow's messages do not mix with the rows.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from flotilla.trainer.evaluation.predictions import unsound
from flotilla.trainer.events.progress import Work
from flotilla.trainer.prediction.exported_model import ExportedModel, fetch_model
from flotilla.trainer.prediction.inputs import (
    STANDARD_OUTPUT,
    Batch,
    FileExamples,
    Request,
    SplitExamples,
    choose_batch_size,
    say,
)
from flotilla.trainer.prediction.output import WRITERS, Writer, make_columns, write_rows
from flotilla.trainer.runtime.errors import ConfigError, UserError
from flotilla.trainer.runtime.json_records import read_record, tree_of
from flotilla.trainer.runtime.masking import printable
from flotilla.trainer.runtime.streams import discard

SUMMARY = "summary.json"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The result of a prediction.

    Attributes:
        rows: number of rows written.
        skipped: number of unreadable rows.
        unsound: number of rows with predictions that are not finite.
        seconds: time from reading the first row to writing the last one.
    """

    rows: int
    skipped: int
    unsound: int
    seconds: float


def answer(request: Path, workdir: Path) -> None:
    """Process the request in a file, and write a summary to `workdir` at the end.

    Progress and notes on the data are reported as events.

    Raises:
        UserError: see `predict`.
    """
    wanted = read_record(Request, request.read_bytes())
    if wanted is None:
        raise UserError(f"{request} does not contain a request of this version of Flotilla")
    try:
        found = tree_of(predict(wanted))
    except BrokenPipeError:
        found = {"closed": True}
    (workdir / SUMMARY).write_text(json.dumps(found), encoding="utf-8")


def predict(request: Request) -> Summary:
    """Process a request.

    Raises:
        UserError: the model or the data cannot be read, or the rows cannot be written. In this case
            an existing output file stays unchanged.
    """
    with tempfile.TemporaryDirectory(prefix="predict-") as name:
        scratch = Path(name)
        with Work("loading the model"):
            model = fetch_model(request.model, scratch / "model")
        with _rewrite_errors():
            examples = _examples(model, request, scratch)
            size = request.batch_size or choose_batch_size(model)
            with _rows(request) as writer:
                return _predict(model, examples, size, writer)


def _predict(
    model: ExportedModel, examples: FileExamples | SplitExamples, size: int, writer: Writer
) -> Summary:
    rows = bad = 0
    began = time.monotonic()
    with Work("predicting", "rows", examples.total, size=examples.size) as work:
        for batch in examples.batches(size):
            answers = model.ask(batch.inputs)
            lengths = batch.lengths if model.varying_answers else None
            columns = make_columns(model, answers, lengths)
            writer.write(_join(batch, columns))
            bad += unsound([each for each in answers.values() if each.dtype.kind == "f"])
            rows += len(batch.copied)
            work.add(len(batch.copied), batch.size)
    if bad:
        say(f"{bad} of {rows} rows have a prediction that is not finite")
    seconds = time.monotonic() - began
    return Summary(rows=rows, skipped=examples.skipped, unsound=bad, seconds=seconds)


def _join(batch: Batch, columns: dict[str, pa.Array]) -> pa.Table:
    copied = dict(zip(batch.copied.column_names, batch.copied.columns, strict=True))
    if both := [name for name in copied if name in columns]:
        raise ConfigError(
            f"--columns: the predictions also have a column {both[0]!r}; rename the column of "
            "the data, or leave it out"
        )
    return pa.table({**copied, **columns})


def _examples(
    model: ExportedModel, request: Request, scratch: Path
) -> FileExamples | SplitExamples:
    if request.split:
        return SplitExamples(model, request, scratch)
    if function := model.config.data.map:
        raise UserError(
            f"{model.uri} needs the output of data.map ({function}), but these files contain its "
            "input; run `flotilla prepare` on the files with the same data.map, then pass the URI "
            "of the dataset and --split"
        )
    return FileExamples(model, request, scratch)


class _Terminal:
    def write(self, data: bytes) -> None:
        sys.stdout.buffer.write(printable(data.decode(errors="replace")).encode())

    def flush(self) -> None:
        sys.stdout.buffer.flush()


@contextmanager
def _rows(request: Request) -> Iterator[Writer]:
    if request.output != STANDARD_OUTPUT:
        with write_rows(Path(request.output), request.form) as writer:
            yield writer
        return
    out: Any = _Terminal() if sys.stdout.isatty() else sys.stdout.buffer
    writer = WRITERS[request.form](out)
    try:
        yield writer
        writer.close()
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        # The reader, such as `head`, closed the pipe. Discard the remaining output.
        discard(sys.stdout)
        raise
    except OSError as error:
        raise UserError(f"cannot write to standard output: {error.strerror}") from None


@contextmanager
def _rewrite_errors() -> Iterator[None]:
    """Rewrite errors of the data readers to name command-line options instead of config keys."""
    try:
        yield
    except UserError as error:
        text = str(error).removeprefix("data.source: ")
        for key, option in {
            "set data.format": "set --format",
            "data.format: ": "",
            "data.source": "the input",
        }.items():
            text = text.replace(key, option)
        if text == str(error):
            raise
        raise type(error)(text) from error

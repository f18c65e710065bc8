"""Prediction request and result, passed between processes as JSON."""

from __future__ import annotations

from dataclasses import dataclass

#: Used in place of a path: rows go to standard output.
STANDARD_OUTPUT = "-"
#: The value of `columns` that means all columns of the files.
ALL = "*"


@dataclass(frozen=True, kw_only=True)
class Request:
    """A model, the data, and the destination of the rows.

    Attributes:
        model: URI of a published model.
        inputs: paths, URIs or patterns of files; with a split, the URI of one dataset.
        split: split of a dataset; empty for files.
        format: format of the files, as in `data.format`; empty: by their names.
        output: absolute path, or `STANDARD_OUTPUT`.
        form: format of the output: csv, jsonl or parquet.
        columns: columns to copy from the data to the rows; `ALL` for all.
        batch_size: number of examples in a batch; 0: as in the model's evaluation.
        skip_bad: whether unreadable rows are skipped.
    """

    model: str
    inputs: tuple[str, ...]
    output: str
    form: str
    split: str = ""
    format: str = ""
    columns: tuple[str, ...] = ()
    batch_size: int = 0
    skip_bad: bool = False


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Result of a prediction.

    Attributes:
        rows: number of written rows.
        skipped: number of unreadable rows.
        unsound: number of rows with an answer that is not finite.
        seconds: from the first row read to the last one written.
    """

    rows: int
    skipped: int
    unsound: int
    seconds: float

"""The request and the result of a prediction, which processes exchange as JSON."""

from __future__ import annotations

from dataclasses import dataclass

#: The value of `output` that writes rows to standard output.
STANDARD_OUTPUT = "-"
#: The value of `columns` that copies all columns of the files.
ALL = "*"


@dataclass(frozen=True, kw_only=True)
class Request:
    """A model, the data to predict, and the output.

    Attributes:
        model: URI of a published model.
        inputs: paths, URIs or patterns of files or, with a split, the URI of a dataset.
        split: split of a dataset, or empty for files.
        format: format of the files, as in `data.format`, or empty to infer it from their names.
        output: absolute path, or `STANDARD_OUTPUT`.
        form: format of the output: csv, jsonl or parquet.
        columns: columns of the data to copy to the output, or `ALL` for all.
        batch_size: number of examples per batch, or 0 for the batch size of the model's evaluation.
        skip_bad: whether to skip unreadable rows.
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

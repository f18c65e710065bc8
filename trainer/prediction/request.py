"""What is to be predicted, and what came of it: both cross a process as JSON."""

from __future__ import annotations

from dataclasses import dataclass

#: In place of a path: rows go to standard output.
STANDARD_OUTPUT = "-"
#: Of `columns`: all that the files have.
ALL = "*"


@dataclass(frozen=True, kw_only=True)
class Request:
    """A model, the data, and where the rows go.

    Attributes:
        model: URI of a published model.
        inputs: paths, URIs or patterns of files; the URI of one dataset where a split is asked for.
        split: of a dataset; empty for files.
        format: of the files, as `data.format`; by their names when empty.
        output: absolute path, or `STANDARD_OUTPUT`.
        form: of the output: csv, jsonl or parquet.
        columns: that are copied from the data to the rows; `ALL` for all.
        batch_size: examples in a batch; 0 for that of the model's evaluation.
        skip_bad: whether rows that cannot be read are left out.
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
    """What a prediction came to.

    Attributes:
        rows: that were written.
        skipped: rows that could not be read.
        unsound: rows with an answer that is not finite.
        seconds: from the first row read to the last one written.
    """

    rows: int
    skipped: int
    unsound: int
    seconds: float

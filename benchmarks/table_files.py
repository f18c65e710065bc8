"""Compares the CPU time and memory to prepare a table and to read it with pyarrow.

`python -m benchmarks.table_files WHICH FILE` prepares or reads one file in its own process.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import tensorflow as tf
from pyarrow import csv, parquet

from benchmarks.comparisons import Comparison, alternating
from flotilla.trainer import storage
from flotilla.trainer.config.data import DataConfig

# Import these first, because the imports take seconds that are not part of the measurement.
from flotilla.trainer.data.files import file_source  # noqa: F401
from flotilla.trainer.data.preparation import shards  # noqa: F401
from flotilla.trainer.data.prepare import prepare

ROUNDS, ROWS = 3, 1_000_000
FLOTILLA, ARROW = "flotilla", "arrow"
_AT_ONCE = 1_000_000


def preparing_tables() -> list[Comparison]:
    """Compare `prepare_data` with pyarrow, for a CSV and a Parquet file of a million rows."""
    with tempfile.TemporaryDirectory(prefix="flotilla-bench-") as name:
        paths = write_table(Path(name), ROWS)
        return [_compare(path) for path in paths]


def write_table(folder: Path, rows: int) -> list[Path]:
    """Write three floats, two integers, two categories and a label as CSV and as Parquet."""
    draw = np.random.RandomState(0)
    paths = [folder / kind / f"table.{kind}" for kind in ("csv", "parquet")]
    for path in paths:
        path.parent.mkdir(parents=True)
    schema = _draw(draw, 1).schema
    with (
        csv.CSVWriter(paths[0], schema) as as_text,
        parquet.ParquetWriter(paths[1], schema) as as_columns,
    ):
        for start in range(0, rows, _AT_ONCE):
            table = _draw(draw, min(_AT_ONCE, rows - start))
            as_text.write_table(table)
            as_columns.write_table(table)
    return paths


def _draw(draw: np.random.RandomState, rows: int) -> pa.Table:
    numbers = {f"number{index}": np.round(draw.randn(rows), 4) for index in range(3)}
    ints = {f"int{most}": draw.randint(0, most, rows) for most in (1000, 1_000_000)}
    texts = {
        f"text{most}": np.array([f"category {index}" for index in range(most)])[
            draw.randint(0, most, rows)
        ]
        for most in (20, 5000)
    }
    label = (numbers["number0"] + numbers["number1"] > 0).astype(np.int64)
    return pa.table({**numbers, **ints, **texts, "label": label})


def _compare(path: Path) -> Comparison:
    found: dict[str, list[list[float]]] = {FLOTILLA: [], ARROW: []}

    def measure(which: str) -> float:
        command = [sys.executable, "-m", "benchmarks.table_files", which, str(path)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found[which].append(json.loads(done.stdout.splitlines()[-1]))
        return found[which][-1][0]

    pairs = alternating(ROUNDS, lambda: measure(FLOTILLA), lambda: measure(ARROW))
    kind = path.suffix.lstrip(".")
    return Comparison(
        name=f"prepare_data with {ROWS:,} rows of {kind}: CPU seconds, compared with reading the "
        "file with pyarrow",
        rounds=tuple(own / other for own, other in pairs),
        at_most=25.0,
        more={"seconds_and_megabytes": found},
    )


def _measure_one(which: str, path: Path) -> tuple[float, float]:
    """Return the CPU seconds and the peak memory in megabytes."""
    # Start TensorFlow's threads before the measurement.
    tf.constant(0)
    before = _used()
    if which == FLOTILLA:
        with tempfile.TemporaryDirectory(prefix="flotilla-bench-") as name:
            config = DataConfig(source=str(path.parent), label=("label",), shards=4)
            prepare(config, storage.uri_of(Path(name)), Path(name) / "scratch")
    elif path.suffix == ".csv":
        csv.read_csv(path)
    else:
        parquet.read_table(path)
    most = max(resource.getrusage(who).ru_maxrss for who in _WHO)
    return round(_used() - before, 2), most // 1024


_WHO = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)


def _used() -> float:
    return sum(each.ru_utime + each.ru_stime for each in (resource.getrusage(who) for who in _WHO))


def main() -> None:
    """Prepare or read, and print the seconds and megabytes."""
    sys.stdout.write(f"{json.dumps(_measure_one(sys.argv[1], Path(sys.argv[2])))}\n")


if __name__ == "__main__":
    main()

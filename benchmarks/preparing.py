"""Compares the cost of preparing a dataset with Flotilla and with TFDS alone.

`python -m benchmarks.preparing WHICH FOLDER` prepares MNIST in its own process.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tensorflow as tf

from benchmarks import launched
from benchmarks.baselines import tfds_input
from benchmarks.comparisons import Comparison, alternating
from flotilla.trainer import storage
from flotilla.trainer.data import prepare

ROUNDS = 3
FLOTILLA, TFDS = "flotilla", "tfds"


def preparing() -> Comparison:
    """Compare the seconds of `prepare_data` and `download_and_prepare` on the MNIST files."""
    with tempfile.TemporaryDirectory(prefix="flotilla-bench-") as name:
        count = iter(range(1000))

        def measured(which: str) -> float:
            folder = Path(name) / f"{next(count)}"
            command = [sys.executable, "-m", "benchmarks.preparing", which, str(folder)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            return float(done.stdout.splitlines()[-1])

        pairs = alternating(ROUNDS, lambda: measured(FLOTILLA), lambda: measured(TFDS))
    return Comparison(
        name="prepare_data with MNIST: seconds, compared with preparation with TFDS alone",
        rounds=tuple(own / other for own, other in pairs),
        at_most=1.5,
        more={"seconds": [[round(each, 2) for each in pair] for pair in pairs]},
    )


def prepared_by(which: str, folder: Path) -> float:
    """Prepare MNIST below a folder with Flotilla or with TFDS alone, and return the seconds."""
    folder.mkdir(parents=True)
    # Start TensorFlow before the measurement, because both sides use it.
    tf.constant(0)
    began = time.perf_counter()
    if which == FLOTILLA:
        data = launched.configuration({}).data
        prepare.prepare(data, storage.uri_of(folder), folder / "scratch")
    else:
        tfds_input.prepare(folder)
    return time.perf_counter() - began


def main() -> None:
    """Prepare, and print the seconds."""
    seconds = prepared_by(sys.argv[1], Path(sys.argv[2]))
    sys.stdout.write(f"{seconds}\n")


if __name__ == "__main__":
    main()

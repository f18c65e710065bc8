"""Compares the time of the whole pipeline with an import of TensorFlow, which every run needs."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.comparisons import Comparison, alternating

ROUNDS = 3
CONFIG = "configs/digits.yaml"


def whole_run() -> Comparison:
    """Compare how long `flotilla run` on the digits and `import tensorflow` take, in seconds."""
    with tempfile.TemporaryDirectory(prefix="flotilla-bench-") as name:
        workdir = Path(name)
        # Warm up: the first run prepares the dataset, and the system caches its files.
        run_seconds(workdir), import_seconds()
        pairs = alternating(ROUNDS, lambda: run_seconds(workdir), import_seconds)
    return Comparison(
        name="second flotilla run on the digits: seconds, compared with one import of TensorFlow",
        rounds=tuple(run / one for run, one in pairs),
        at_most=5,
        more={"seconds": [[round(each, 2) for each in pair] for pair in pairs]},
    )


def run_seconds(workdir: Path, *settings: str) -> float:
    """Return the seconds of a whole run.

    Raises:
        RuntimeError: the gate refused the model, so the run skipped steps.
    """
    command = [str(Path(sys.executable).with_name("flotilla")), "run", CONFIG, "--json"]
    command += ["--workdir", str(workdir), *(f"--set={each}" for each in settings)]
    began = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    seconds = time.perf_counter() - began
    status = json.loads((done.stdout.splitlines() or ["{}"])[-1]).get("status")
    if done.returncode:
        raise RuntimeError(f"the run ended with exit code {done.returncode}, {status}")
    return seconds


def import_seconds() -> float:
    """Return the seconds to start Python and import TensorFlow."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import tensorflow"], check=True, capture_output=True)
    return time.perf_counter() - began

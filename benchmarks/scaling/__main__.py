"""`make scaling`: measures the cost of an update, fits the constants, and writes the pages.

Writes `benchmarks/scaling/measured.json` (runs and constants), the measured part of
`benchmarks/results/scaling.md`, and `docs/scaling.md` with its plots. A round takes about eight
minutes on two idle cores. `--rewrite` measures nothing: it fits the constants to the runs in
`measured.json` and rewrites the pages.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks.baselines import mnist
from benchmarks.scaling import fleets, page
from benchmarks.scaling.costs import MEASURED
from benchmarks.scaling.fit import Point, fit
from flotilla.trainer.runtime.errors import RunInterruptedError, UserError

MEASUREMENTS, SCALING = Path("benchmarks/results/scaling.md"), Path("docs/scaling.md")


def main() -> None:
    """Run all cases or read their results, fit the model, and write the pages."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling")
    parser.add_argument(
        "--rounds",
        type=int,
        default=1,
        help="number of rounds; the run with the median speed counts",
    )
    parser.add_argument(
        "--rewrite", action="store_true", help="fit to the runs in measured.json, without measuring"
    )
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds: {options.rounds} is invalid; it must be 1 or more")
    if options.rewrite:
        before = json.loads(MEASURED.read_text(encoding="utf-8"))
        points = [Point(**{**each, "held": tuple(each["held"])}) for each in before["points"]]
        cores, rounds = before["cores"], before["rounds"]
    else:
        points, cores, rounds = _points(options.rounds), os.cpu_count() or 1, options.rounds
    costs = fit(points, cores)
    tree = {
        "cores": cores,
        "rounds": rounds,
        "costs": asdict(costs),
        "points": [asdict(point) for point in points],
    }
    MEASURED.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
    part = page.measured_part(points, costs, cores, rounds)
    page.write(MEASUREMENTS, part)
    page.write(SCALING, fleets.simulated_part(costs, SCALING.parent, sys.stderr.write))
    sys.stdout.write(f"{part}\n")


def _points(rounds: int) -> list[Point]:
    mnist.require()
    # Import this late, because it imports TensorFlow.
    from benchmarks.scaling.measure import all_measured  # noqa: PLC0415

    try:
        with tempfile.TemporaryDirectory(prefix="flotilla-bench-") as name:
            return all_measured(Path(name), rounds, sys.stderr.write)
    except (KeyboardInterrupt, RunInterruptedError):
        sys.exit("scaling: interrupted; nothing is written")
    except (UserError, RuntimeError, subprocess.CalledProcessError) as error:
        sys.exit(f"scaling: {error}; nothing is written")


if __name__ == "__main__":
    main()

"""`make experiments`: repeats the published experiments and writes the table of results."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.baselines import mnist
from benchmarks.experiments.measure import Measured, Run, measured
from benchmarks.experiments.rows import ROWS
from benchmarks.experiments.table import page
from flotilla.trainer.runtime.errors import UserError

FOLDER = Path("build/experiments")
PAGE = Path("docs/experiments.md")


def main() -> int:
    """Run the experiments that have not been run yet, and return 1 if one misses its goal."""
    mnist.require()
    FOLDER.mkdir(parents=True, exist_ok=True)
    brought: dict[Run, Measured] = {}
    for run in dict.fromkeys(run for row in ROWS for run in row.runs):
        sys.stderr.write(f"{run.command()}\n")
        brought[run] = measured(run, FOLDER)
    findings = [row.judge([brought[run] for run in row.runs]) for row in ROWS]
    PAGE.write_text(page(findings), encoding="utf-8")
    for row, finding in zip(ROWS, findings, strict=True):
        word = "reached" if finding.reached else "MISSED"
        sys.stdout.write(f"{word}: {row.runs[0].config}: {finding.text} (goal: {row.goal})\n")
    return 0 if all(finding.reached for finding in findings) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"experiments: {error}")

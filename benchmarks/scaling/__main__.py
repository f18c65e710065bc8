"""Measure what a step costs and write it into docs/performance.md: `make scaling`."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks.baselines import mnist
from benchmarks.scaling.measure import MODELS, all_measured, sizes
from benchmarks.scaling.model import fit
from benchmarks.scaling.page import measured_part, put_in

PAGE = Path("docs/performance.md")
OUTPUT = Path("build/scaling.json")


def main() -> None:
    """Run all cases, fit the model, and write what was found."""
    mnist.require()
    with tempfile.TemporaryDirectory(prefix="flotilla-bench-") as name:
        *points, looped = all_measured(Path(name), sys.stderr.write)
    OUTPUT.parent.mkdir(exist_ok=True)
    rows = [asdict(point) for point in [*points, looped]]
    OUTPUT.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    variables = {model: sizes(model) for model in MODELS}
    part = measured_part(points, fit(points, looped), variables, os.cpu_count() or 1)
    PAGE.write_text(put_in(PAGE.read_text(encoding="utf-8"), part), encoding="utf-8")
    sys.stdout.write(f"{part}\n")


if __name__ == "__main__":
    main()

"""Random failures on real runs: `python -m tests.chaos --on WHERE --runs N --seed S`.

Each run is the whole pipeline, with faults injected while it trains: with the cluster on this
machine, or as a TFJob on the stand-in of a Kubernetes cluster, whose pods are processes. The faults
follow from its seed alone; when exactly they happen depends on the machine.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.chaos.invariants import Outcome, attempts, repeated, restarts, violations_of
from tests.chaos.job_plan import draw_job_plan
from tests.chaos.job_run import run_job_plan
from tests.chaos.plan import Plan, draw_plan
from tests.chaos.run import forget, run_plan


def main(arguments: list[str] | None = None) -> int:
    """Run all; return 1 when an invariant is violated."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--on", choices=("local", "tfjob"), default="local")
    parser.add_argument("--runs", type=int, default=3, metavar="N")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6), metavar="S")
    parser.add_argument("--folder", type=Path, default=None, help="where to work; kept")
    options = parser.parse_args(arguments)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="flotilla-chaos-"))
    seeds = range(options.seed, options.seed + options.runs)
    say(f"seed {options.seed}, {options.runs} runs, in {folder}")
    began = time.monotonic()
    total: Counter[str] = Counter()
    for seed in seeds:
        total += one(options.on, seed, folder)
    total["seconds"] = round(time.monotonic() - began)
    counts = [f"{total[name]} {name}" for name in COUNTED]
    say(f"seed {options.seed}: {', '.join(counts)}")
    return int(total["invariants broken"] > 0)


COUNTED = (
    "runs", "blessed", "faults", "tries resumed", "attempts", "restarts", "steps repeated",
    "invariants broken", "seconds",
)  # fmt: skip


def one(where: str, seed: int, folder: Path) -> Counter[str]:
    """Run one plan; print its faults, and whether the invariants held."""
    plan: Plan
    if where == "tfjob":
        plan = draw_job_plan(seed)
        say(f"run {seed}: TFJob, {plan}")
        found = run_job_plan(plan, folder.absolute(), say)
    else:
        plan = draw_plan(seed)
        say(f"run {seed}: {plan}")
        found = run_plan(plan, folder.absolute(), say)
    violations = violations_of(found)
    say(
        "  all invariants held"
        if not violations
        else "\n".join(f"  BROKEN: {it}" for it in violations)
    )
    if not violations:
        forget(folder, seed)
    return Counter(counted(found, faults=len(plan.faults), violations=len(violations)))


def counted(found: Outcome, *, faults: int, violations: int) -> dict[str, int]:
    """Return the counts of a run."""
    return {
        "runs": 1,
        "blessed": int(found.ends[-1][0] == 0),
        "faults": faults,
        "tries resumed": len(found.ends) - 1,
        "attempts": attempts(found),
        "restarts": restarts(found),
        "steps repeated": repeated(found),
        "invariants broken": violations,
    }


def say(text: str) -> None:
    """Print a line, and flush it."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

"""Random failures on real runs: `python -m tests.chaos --runs N --seed S`.

Each run is the whole pipeline on this machine, struck while it trains. What is done to it follows
from its seed alone; when exactly it falls depends on the machine.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.chaos.invariants import Lived, attempts, broken, repeated, restarts
from tests.chaos.plan import drawn
from tests.chaos.run import forget, lived


def main(arguments: list[str] | None = None) -> int:
    """Do the runs; return 1 when an invariant is broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
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
        total += one(seed, folder)
    total["seconds"] = round(time.monotonic() - began)
    counts = [f"{total[name]} {name}" for name in COUNTED]
    say(f"seed {options.seed}: {', '.join(counts)}")
    return int(total["invariants broken"] > 0)


COUNTED = (
    "runs", "blessed", "blows", "tries resumed", "attempts", "restarts", "steps repeated",
    "invariants broken", "seconds",
)  # fmt: skip


def one(seed: int, folder: Path) -> Counter[str]:
    """Do one run; say what was done to it and whether the invariants held."""
    plan = drawn(seed)
    say(f"run {seed}: {plan}")
    found = lived(plan, folder.absolute(), say)
    faults = broken(found)
    say("  all invariants held" if not faults else "\n".join(f"  BROKEN: {it}" for it in faults))
    if not faults:
        forget(folder, seed)
    return Counter(counted(found, blows=len(plan.blows), faults=len(faults)))


def counted(found: Lived, *, blows: int, faults: int) -> dict[str, int]:
    """Return what is counted of a run."""
    return {
        "runs": 1,
        "blessed": int(found.ends[-1][0] == 0),
        "blows": blows,
        "tries resumed": len(found.ends) - 1,
        "attempts": attempts(found),
        "restarts": restarts(found),
        "steps repeated": repeated(found),
        "invariants broken": faults,
    }


def say(text: str) -> None:
    """Write a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

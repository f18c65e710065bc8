"""Random failures on real runs: `python -m tests.chaos --on WHERE --runs N --seed S`.

Each run is the whole pipeline or, for most runs of `--on tables`, training alone. Faults are
injected while it trains. Training runs on this machine, or as a TFJob or JobSet on a fake
Kubernetes cluster whose pods are processes. `--on tables` trains a recommender with growing tables
on this machine and checks their rows. The seed determines the faults; their exact times depend on
the machine.
"""

import argparse
import secrets
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.grown import in_words
from tests.chaos.invariants import Tally, rows_of, violations_of
from tests.chaos.job_plan import JobPlan, draw_job_plan
from tests.chaos.job_run import run_job_plan
from tests.chaos.plan import Plan, draw_plan
from tests.chaos.run import forget, run_plan
from tests.chaos.stores import store_below
from tests.chaos.table_plan import draw_table_plan

ON_THIS_MACHINE = {"local": draw_plan, "tables": draw_table_plan}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--on", choices=(*ON_THIS_MACHINE, "tfjob", "jobset"), default="local")
    parser.add_argument("--runs", type=int, default=3, metavar="N")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6), metavar="S")
    parser.add_argument("--folder", type=Path, default=None, help="where to work; kept")
    options = parser.parse_args(arguments)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="flotilla-chaos-"))
    seeds = range(options.seed, options.seed + options.runs)
    say(f"seed {options.seed}, {options.runs} runs, in {folder}")
    began = time.monotonic()
    tally = Tally()
    for seed in seeds:
        one(options.on, seed, folder, tally)
        # Report the results so far, in case the series is interrupted.
        say(f"  so far: {tally}")
    say(f"{tally.table()}\nseed {options.seed}: {tally}, {time.monotonic() - began:.0f} seconds")
    return int(tally.is_violated)


def one(where: str, seed: int, folder: Path, tally: Tally) -> None:
    draw = ON_THIS_MACHINE.get(where)
    plan: Plan = draw(seed) if draw else draw_job_plan(seed, where)
    began = time.monotonic()
    say(f"run {seed}: {'' if where == 'local' else f'{where}, '}{plan}")
    with store_below(folder.absolute(), has_outages=plan.has_outages) as store:
        if isinstance(plan, JobPlan):
            found = run_job_plan(plan, folder.absolute(), say, store)
        else:
            found = run_plan(plan, folder.absolute(), say, store)
        violations = violations_of(found)
        if found.tables:
            say(f"  {in_words(list(rows_of(found).values()))}")
        tally.add(plan, found, violations)
    say(f"  {time.monotonic() - began:.0f} seconds")
    for violation in violations:
        say(f"  BROKEN, {violation.total}: {violation.words}")
    if not violations:
        say("  all invariants held")
        forget(folder, seed)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

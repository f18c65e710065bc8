"""Renders the measured parts of pages."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path

from benchmarks.scaling.costs import Costs
from benchmarks.scaling.fit import Point, rate

BEGIN = "<!-- measured by `make scaling` -->\n"
END = "<!-- end of what was measured -->\n"
# Target for the maximum relative error of a prediction.
AIM = 0.15
RUNS = (
    "model",
    "workers",
    "servers",
    "`pull_every`",
    "updates/s",
    "simulated",
    "off by",
    "fitted",
    "worker ms/update",
    "server ms/update",
    "chief ms/update",
)


def write(path: Path, part: str) -> None:
    """Replace the measured part of a page."""
    path.write_text(put_in(path.read_text(encoding="utf-8"), part), encoding="utf-8")


def put_in(page: str, measured: str) -> str:
    """Return a page with its measured part replaced.

    Raises:
        ValueError: the page has no measured part, or several.
    """
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"the page needs one line {BEGIN.strip()!r} and one {END.strip()!r}")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{measured.strip()}\n\n{END}{after}"


def measured_part(points: Sequence[Point], costs: Costs, cores: int, rounds: int) -> str:
    """Return the runs as Markdown.

    Args:
        points: the measured runs.
        costs: constants fitted to some of the runs.
        cores: cores of this machine.
        rounds: number of rounds, of which `points` has the run with the median speed for each case.
    """
    paced = [(point, rate(costs, point, cores)) for point in points if not point.looped]
    rows = [_run(point, found) for point, found in paced]
    errors = sorted(abs(found / point.rate - 1) for point, found in paced)
    held_out = [abs(found / point.rate - 1) for point, found in paced if not point.fitted]
    far = [
        f"{p.model} with {p.workers} workers, {len(p.held)} servers, `pull_every` {p.pull_every}: "
        f"{found / p.rate - 1:+.0%}"
        for p, found in paced
        if abs(found / p.rate - 1) > AIM
    ]
    words = f", at most {max(held_out):.0%} for rows that nothing is fitted to" if held_out else ""
    of_rounds = f", the run of median speed of {rounds}" if rounds > 1 else ""
    return "\n\n".join(
        [
            f"On {cores} cores ({platform.machine()}){of_rounds}, Adam, batches of 100. Times are "
            f"of one core. The error of the simulation is at most {errors[-1]:.0%}{words}, and "
            f"{errors[len(errors) // 2]:.0%} in the median.",
            f"Rows with an error above the aim of {AIM:.0%}: {'; '.join(far) or 'none'}.",
            table(RUNS, rows),
        ]
    )


def _run(point: Point, found: float) -> list[str]:
    return [
        point.model,
        f"{point.workers}",
        f"{len(point.held)}",
        f"{point.pull_every}",
        f"{point.rate:.0f}",
        f"{found:.0f}",
        f"{found / point.rate - 1:+.0%}",
        "yes" if point.fitted else "no",
        *(f"{1000 * each:.3f}" for each in (point.worker, point.server, point.chief)),
    ]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

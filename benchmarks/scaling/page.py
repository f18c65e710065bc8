"""The part of docs/performance.md that is measured."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence

from benchmarks.scaling.measure import FEW, ROUNDS
from benchmarks.scaling.model import Costs, Fleet, Point, on_one_machine, predicted

BEGIN = "<!-- measured by `make scaling` -->\n"
END = "<!-- end of what was measured -->\n"
# The clusters of the prediction: 10 Gbit/s, and a round trip within one data centre.
FLEETS = (
    Fleet(workers=10, servers=1, server_cores=4, bytes_per_second=1.25e9, round_trip=2e-4),
    Fleet(workers=100, servers=10, server_cores=4, bytes_per_second=1.25e9, round_trip=2e-4),
)


def put_in(page: str, measured: str) -> str:
    """Return a page with its measured part replaced.

    Raises:
        ValueError: the page has no such part, or several.
    """
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"the page needs one line {BEGIN.strip()!r} and one {END.strip()!r}")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{measured.strip()}\n\n{END}{after}"


def measured_part(
    points: Sequence[Point], costs: Costs, variables: Mapping[str, Sequence[int]], cores: int
) -> str:
    """Return runs, constants and predictions as Markdown.

    Args:
        points: in turns where updates are as many.
        costs: fitted to some of them.
        variables: their bytes, by model.
        cores: of this machine.
    """
    return "\n\n".join(
        [
            f"On {cores} cores ({platform.machine()}), the run of median speed of {ROUNDS}, "
            "one parameter server, Adam, batches of 100. Times are those of a core. The constants "
            f"are fitted to the runs of {FEW} workers, those of the chief to all; updates a second "
            "of other numbers of workers are predicted.",
            _table(RUNS, [_run(point, costs, cores) for point in points]),
            "The fitted constants:",
            _table(("constant", "value"), _constants(costs)),
            "Predictions for clusters whose tasks have machines of their own: a core for a "
            "worker, 4 for a server, 10 Gbit/s, a round trip of 0.2 ms. Nothing of this table was "
            "measured.",
            _table(PREDICTED, _predictions(costs, variables)),
        ]
    )


RUNS = (
    "model",
    "workers",
    "`pull_every`",
    "updates/s",
    "by the model",
    "off by",
    "worker ms/update",
    "server ms/update",
    "chief ms/update",
)
PREDICTED = ("model", "workers", "servers", "`pull_every`", "updates/s", "examples/s", "limit")
_BATCH = 100


def _run(point: Point, costs: Costs, cores: int) -> list[str]:
    by_model = on_one_machine(costs, point, cores)
    return [
        point.model,
        f"{point.workers}",
        f"{point.pull_every}",
        f"{point.rate:.0f}",
        f"{by_model:.0f}",
        f"{by_model / point.rate - 1:+.0%}",
        *(f"{1000 * each:.3f}" for each in (point.worker, point.server, point.chief)),
    ]


def _constants(costs: Costs) -> list[list[str]]:
    rows = [
        ["`worker_message`", f"{1e3 * costs.worker_message:.3f} ms an update"],
        ["`worker_byte`", f"{1e9 * costs.worker_byte:.3f} ms a megabyte"],
        ["`server_message`", f"{1e3 * costs.server_message:.3f} ms an update"],
        ["`server_byte`", f"{1e9 * costs.server_byte:.3f} ms a megabyte"],
        ["`worker_loop`", f"{1e3 * costs.worker_loop:.3f} ms an update"],
        ["`server_loop`", f"{1e3 * costs.server_loop:.3f} ms an update"],
        ["`closure`", f"{1e3 * costs.closure:.3f} ms of the chief"],
        ["`chief_share`", f"{costs.chief_share:.3f} of a core"],
    ]
    gradients = costs.gradient.items()
    return rows + [[f"`gradient` of {name}", f"{1e3 * each:.3f} ms"] for name, each in gradients]


def _predictions(costs: Costs, variables: Mapping[str, Sequence[int]]) -> list[list[str]]:
    rows = []
    for model, sizes in variables.items():
        for fleet in FLEETS:
            for pull_every in (1, 10):
                found = predicted(costs, fleet, model, sizes, pull_every)
                seen = found.rate * pull_every * _BATCH
                cells = [model, fleet.workers, fleet.servers, pull_every]
                words = [f"{found.rate:,.0f}", f"{seen:,.0f}", found.limit]
                rows.append([*map(str, cells), *words])
    return rows


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

"""`flotilla plan`: how fast a run will be, what it needs and costs, before anything starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.cli.exit import Answer, answers, note
from pipelines.cli.options import Assignments, Config

if TYPE_CHECKING:
    from pipelines.planning.plan import Plan, Plans

_MIB = 1 << 20

Workers = Annotated[str, typer.Option(metavar="N,...", help="Numbers of workers to try.")]
Servers = Annotated[str, typer.Option(metavar="N,...", help="Numbers of parameter servers to try.")]
Cores = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Of one machine that all tasks share; 0: a machine for each. Those of this machine "
        "with cluster.launcher local.",
    ),
]
WorkerCores = Annotated[int, typer.Option(metavar="N", help="Of a worker's own machine.")]
ServerCores = Annotated[int, typer.Option(metavar="N", help="Of a server's own machine.")]
Bandwidth = Annotated[float, typer.Option(metavar="GBIT", help="Gigabits a second of a machine.")]
RoundTrip = Annotated[float, typer.Option(metavar="MS", help="Milliseconds between two machines.")]
Gradient = Annotated[
    float,
    typer.Option(
        metavar="SECONDS", help="Of one batch on such a worker; measured on this machine when 0."
    ),
]
Prices = Annotated[
    list[str] | None,
    typer.Option(
        "--price", metavar="ROLE=NUMBER", help="Of a task for an hour: chief, ps, worker; repeat."
    ),
]


@answers
def plan(
    config: Config = None,
    assignments: Assignments = None,
    workers: Workers = "",
    servers: Servers = "",
    cores: Cores = None,
    worker_cores: WorkerCores = 1,
    server_cores: ServerCores = 4,
    bandwidth: Bandwidth = 10.0,
    round_trip: RoundTrip = 0.2,
    gradient: Gradient = 0.0,
    prices: Prices = None,
) -> Answer:
    """Predict speed, memory and cost of asynchronous training; propose servers and workers.

    The model's gradient is measured on this machine, which takes some seconds; all else is
    simulated with costs that were measured before.
    """
    from pipelines.planning.plan import as_tree, options_of, planned
    from pipelines.runs.local import configuration
    from trainer.cores import usable

    loaded = configuration(config, assignments or ())
    if cores is None:
        cores = usable() if loaded.cluster.launcher == "local" else 0
    options = options_of(
        {"workers": workers, "servers": servers},
        prices or (),
        {
            "cores": cores,
            "worker_cores": worker_cores,
            "server_cores": server_cores,
            "bandwidth": bandwidth,
            "round_trip": round_trip,
            "gradient": gradient,
        },
    )
    found = planned(loaded, options, lambda line: note(f"flotilla: {line}"))
    return Answer(more=as_tree(found), text=_table(found, has_prices=bool(options.prices)))


def _table(found: Plans, *, has_prices: bool) -> str:
    head = ["workers", "servers", "steps/s", "examples/s", "seconds", "MB chief/ps/worker"]
    head += ["cost"] if has_prices else []
    rows = [_cells(each, has_prices=has_prices) for each in found.plans]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]

    def line(cells: list[str], words: str) -> str:
        padded = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        return f"{'  '.join(padded)}  {words}\n"

    named = (("configured", found.configured), ("proposed", found.proposed))
    text = line(head, "limit")
    for each, cells in zip(found.plans, rows, strict=True):
        marks = [word for word, one in named if each is one]
        text += line(cells, each.limit + (f" ({', '.join(marks)})" if marks else ""))
    return text


def _cells(each: Plan, *, has_prices: bool) -> list[str]:
    roles = ("chief", "ps", "worker")
    memory = "/".join(f"{each.memory.get(role, 0) / _MIB:.0f}" for role in roles)
    cost = [f"{each.cost:,.4f}"] if has_prices else []
    counts = [str(each.workers), str(each.servers)]
    speeds = [f"{each.rate:,.1f}", f"{each.examples:,.0f}", f"{each.seconds:,.1f}"]
    return [*counts, *speeds, memory, *cost]

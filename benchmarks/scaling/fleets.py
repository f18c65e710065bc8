"""Simulates clusters of up to 10,000 workers for the tables and plots of `docs/scaling.md`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.scaling.costs import Costs, Model, work_of
from benchmarks.scaling.page import table
from benchmarks.scaling.simulation import Fleet, Outcome, Work, simulated

WORKERS = (10, 30, 100, 300, 1000, 3000, 10_000)
# Seconds per byte of a 10 Gbit/s network card, and per round trip in a data center.
BYTE, ROUND_TRIP = 8e-10, 2e-4
# A model with 25 million parameters that takes half a second per batch on one machine.
BYTES, GRADIENT = 100e6, 0.5
SERVERS, PULL_EVERY = 16, 10
SPREAD = 0.2
Series = Mapping[str, Sequence[tuple[float, float]]]
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 640, 360, 64, 40, 16, 170
_COLOURS = ("#1f6fb4", "#d9622b", "#2e8b57", "#8a4fbf", "#b3261e")


def work(costs: Costs, servers: int, pull_every: int) -> Work:
    """Return the cost of an update of the model if all servers hold equal parts."""
    model = Model(
        gradient=GRADIENT / costs.gradient,
        held=(int(BYTES / servers),) * servers,
        pull_every=pull_every,
    )
    return work_of(costs, model, byte=BYTE)


def fleet(workers: int, **more: Any) -> Fleet:
    """Return a fleet with one machine per task."""
    return Fleet(workers=workers, round_trip=ROUND_TRIP, **{"spread": SPREAD, **more})


def outcome(
    costs: Costs, workers: int, servers: int = SERVERS, pull_every: int = PULL_EVERY, **more: Any
) -> Outcome:
    """Simulate one fleet."""
    found = work(costs, servers, pull_every)
    seconds = max(_SECONDS, _UPDATES * GRADIENT * pull_every)
    dispatch = replace(costs.dispatch, seconds=seconds)
    return simulated(found, fleet(workers, **more), dispatch, stretches=1)


def simulated_part(costs: Costs, folder: Path, say: Callable[[str], Any]) -> str:
    """Simulate all fleets, write their plots into a folder, and return the tables as Markdown."""
    say("simulating fleets of 10 to 10,000 workers ...\n")
    by_pull = {
        f"pull_every {pull}": [(n, outcome(costs, n, pull_every=pull).rate * pull) for n in WORKERS]
        for pull in (1, 10, 100)
    }
    by_servers = {
        f"{servers} servers": [
            (n, outcome(costs, n, servers=servers).rate * PULL_EVERY) for n in WORKERS
        ]
        for servers in (1, 4, 16, 64)
    }
    by_backup = {
        name: [(n, _synchronous(costs, n, share).rate) for n in WORKERS[:5]]
        for name, share in (("waits for all", 1.0), ("for 98 %", 0.98), ("for 90 %", 0.9))
    }
    for name, series, label in (
        ("pull-every", by_pull, "gradients a second"),
        ("servers", by_servers, "gradients a second"),
        ("backup", by_backup, "updates a second"),
    ):
        path = folder / f"scaling-{name}.svg"
        path.write_text(chart(series, "workers", label), encoding="utf-8")
    return "\n\n".join(
        [
            "The bottleneck of asynchronous training with 1,000 workers:",
            table(_LIMITS, _limits(costs)),
            "Updates per second of 100 workers, some of which are slow or killed:",
            table(_TROUBLES, _troubles(costs)),
        ]
    )


_LIMITS = (
    "workers",
    "servers",
    "`pull_every`",
    "gradients/s",
    "of ideal",
    "limit",
)
# Minimum time between checkpoints: in seconds, and in updates of each worker.
_SECONDS, _UPDATES = 60.0, 12
_TROUBLES = ("what happens", "asynchronous", "synchronous, all", "synchronous, 95 of 100")


def _limits(costs: Costs) -> list[list[str]]:
    rows, workers = [], 1000
    for pull_every in (1, 10, 100):
        for servers in (1, 16, 64):
            found = outcome(costs, workers, servers, pull_every)
            gradients = found.rate * pull_every
            share = f"{gradients * GRADIENT / workers:.0%}"
            cells = [f"{workers:,}", f"{servers}", f"{pull_every}"]
            rows.append([*cells, f"{gradients:,.0f}", share, found.limit])
    return rows


def _synchronous(costs: Costs, workers: int, share: float, **more: Any) -> Outcome:
    needed = max(1, math.floor(workers * share))
    troubled = {"slow": 0.01, "slow_by": 3.0, **more}
    return outcome(costs, workers, 64, 1, needed=needed, **troubled)


def _troubles(costs: Costs) -> list[list[str]]:
    cases: dict[str, dict[str, float]] = {
        "nothing": {"slow": 0.0},
        "1 % take three times as long": {"slow": 0.01, "slow_by": 3.0},
        "10 % take three times as long": {"slow": 0.1, "slow_by": 3.0},
        "each is killed every hour, away for 60 s": {
            "slow": 0.0,
            "kill_every": 3600.0,
            "restart": 60.0,
        },
    }
    rows: list[list[str]] = []
    first: list[float] = []
    for name, more in cases.items():
        rates = [
            _steady(work(costs, 64, PULL_EVERY), costs, fleet(100, **more)),
            _steady(work(costs, 64, 1), costs, fleet(100, needed=100, **more)),
            _steady(work(costs, 64, 1), costs, fleet(100, needed=95, **more)),
        ]
        first = first or rates
        rows.append(
            [name, *(f"{r:.1f} ({r / of:.0%})" for r, of in zip(rates, first, strict=True))]
        )
    return rows


def _steady(found: Work, costs: Costs, machines: Fleet) -> float:
    # Simulate long enough for dozens of workers to be killed.
    dispatch = replace(costs.dispatch, seconds=_SECONDS)
    return simulated(found, machines, dispatch, stretches=20).rate


def chart(series: Series, across: str, upward: str) -> str:
    """Return a line chart with two logarithmic axes as SVG."""
    xs = [math.log10(x) for line in series.values() for x, _ in line]
    ys = [math.log10(y) for line in series.values() for _, y in line]
    low_x, high_x = min(xs), max(xs)
    low_y, high_y = math.floor(min(ys)), math.ceil(max(ys))

    def place(x: float, y: float) -> tuple[float, float]:
        width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
        return (
            _LEFT + width * (x - low_x) / (high_x - low_x),
            _TOP + height * (high_y - y) / max(1, high_y - low_y),
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="#fff"/>'
    ]
    for power in range(low_y, high_y + 1):
        left, y = place(low_x, power)
        parts.append(
            f'<path d="M{left:.0f},{y:.1f}H{_WIDTH - _RIGHT}" stroke="#ddd"/>'
            f'<text x="{left - 6:.0f}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>'
        )
    for power in range(math.ceil(low_x), math.floor(high_x) + 1):
        x, bottom = place(power, low_y)
        parts.append(
            f'<path d="M{x:.1f},{_TOP}V{bottom:.0f}" stroke="#ddd"/>'
            f'<text x="{x:.1f}" y="{bottom + 16:.0f}" text-anchor="middle">{10**power:,}</text>'
        )
    parts += _lines(series, place)
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(
        f'<text x="{middle:.0f}" y="{_HEIGHT - 6}" text-anchor="middle">{across}</text>'
        f'<text transform="translate(14,{_HEIGHT / 2:.0f}) rotate(-90)" '
        f'text-anchor="middle">{upward}</text></svg>\n'
    )
    return "\n".join(parts)


def _lines(series: Series, place: Callable[[float, float], tuple[float, float]]) -> list[str]:
    parts = []
    for number, (name, line) in enumerate(series.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        points = [place(math.log10(x), math.log10(y)) for x, y in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        y = _TOP + 16 + 20 * number
        x = _WIDTH - _RIGHT + 14
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
            f'<path d="M{x},{y}h18" stroke="{colour}" stroke-width="3"/>'
            f'<text x="{x + 24}" y="{y + 4}">{name}</text>'
        )
    return parts

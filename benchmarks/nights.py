"""A thousand nights of a gate: what becomes of the champion, simulated.

    python -m benchmarks.nights docs/how-to/gate-nights.svg

Each night a new model answers new test examples, in pairs with the champion, and is promoted or
refused by the gate's own bound. The script prints the table of `docs/how-to/gate.md` and draws its
figure. All is drawn from one seed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from scipy import stats

from trainer.evaluation import noninferiority
from trainer.evaluation.noninferiority import Pairs
from trainer.report import charts

NIGHTS = 1000
EXAMPLES = 360
MARGIN = 0.03
CONFIDENCE = 0.95
# The share of examples on which two equal models do not agree whether they are right.
DIFFER = 0.03
BEGIN = 0.97

Passes = Callable[[int, int], bool]


@dataclass(frozen=True, kw_only=True)
class Nights:
    """The true accuracy of each night's champion, and how many models were promoted."""

    accuracies: tuple[float, ...]
    promoted: int

    @property
    def lowest(self) -> float:
        """The accuracy of the worst champion."""
        return min(self.accuracies)


@cache
def bound(own: int, other: int, examples: int = EXAMPLES) -> float:
    """Return the gate's bound, by who alone was right."""
    pairs = Pairs(examples - own - other, own, other, 0)
    return noninferiority.shares(pairs, CONFIDENCE).bound


def by_margin(own: int, other: int) -> bool:
    """Say whether a loss beyond the margin is ruled out."""
    return bound(own, other) >= -MARGIN


@cache
def by_significance(own: int, other: int) -> bool:
    """Say whether it is not proved that the champion is better: the gate of earlier versions."""
    return bool(stats.binom.sf(other - 1, own + other, 0.5) >= 1 - CONFIDENCE)


def equal(champion: float, generator: np.random.Generator) -> float:
    """Return the accuracy of a model of one recipe: they differ by chance alone."""
    del champion
    return BEGIN + float(generator.normal(0, 0.004))


def wandering(champion: float, generator: np.random.Generator) -> float:
    """Return that of a model that begins with the champion's weights, as good by expectation."""
    return float(np.clip(champion + generator.normal(0, 0.003), 0.5, 0.999))


def decaying(champion: float, generator: np.random.Generator) -> float:
    """Return that of a model that is a little worse than the champion, every night."""
    del generator
    return max(champion - 0.005, 0.5)


def worse(champion: float, generator: np.random.Generator) -> float:
    """Return that of a model that is worse than the first champion by the whole margin."""
    del champion, generator
    return BEGIN - MARGIN


def simulated(
    made: Callable[[float, np.random.Generator], float],
    passes: Passes,
    *,
    seed: int = 0,
    keep: bool = False,
    remembers: bool = True,
) -> Nights:
    """Return what becomes of the champion.

    With `keep` it stays whoever is promoted; without `remembers` a model is compared with the
    champion alone, and not with the one since which no gain was proved.
    """
    generator = np.random.default_rng(seed)
    champion = reference = BEGIN
    promoted, accuracies = 0, []
    for _ in range(NIGHTS):
        own = made(champion, generator)
        alone, other = drawn = _answered(own, champion, generator)
        if remembers and reference != champion:
            drawn = _answered(own, reference, generator)
        if passes(alone, other) and (not remembers or passes(*drawn)):
            promoted += 1
            champion = champion if keep else own
            if bound(*drawn) >= MARGIN:
                reference = champion
        accuracies.append(champion)
    return Nights(accuracies=tuple(accuracies), promoted=promoted)


def _answered(own: float, other: float, generator: np.random.Generator) -> tuple[int, int]:
    """Return how many examples a model alone is right on, and how many the other alone."""
    _, alone, lost, _ = generator.multinomial(EXAMPLES, _cells(own, other)).tolist()
    return alone, lost


def _cells(own: float, other: float) -> list[float]:
    """Return how likely an example is right by both, by one alone, by the other, by neither."""
    differ = min(max(DIFFER, abs(own - other)), 2 - own - other)
    alone, lost = (differ + own - other) / 2, (differ - own + other) / 2
    # What should be 0 may be less by rounding.
    return [max(each, 0.0) for each in (own - alone, alone, lost, 1 - own - lost)]


MODELS = {
    "of one recipe": equal,
    "each begun with the champion": wandering,
    "each worse by 0.005": decaying,
}
GATES: dict[str, tuple[Passes, bool]] = {
    "the gate": (by_margin, True),
    "champion alone": (by_margin, False),
    "not proved worse": (by_significance, False),
}


def cases(seed: int = 0) -> dict[str, Nights]:
    """Return what becomes of the champion with each kind of models, and of gate."""
    return {
        f"{models}: {gate}": simulated(made, passes, seed=seed, remembers=remembers)
        for models, made in MODELS.items()
        for gate, (passes, remembers) in GATES.items()
    }


def table(found: dict[str, Nights]) -> str:
    """Return a table in Markdown."""
    rows = [
        f"| {case} | {each.promoted / NIGHTS:.1%} | {each.accuracies[-1]:.3f} | {each.lowest:.3f} |"
        for case, each in found.items()
    ]
    head = "| models: rule | promoted | last champion | worst champion |"
    return "\n".join([head, "| --- | --- | --- | --- |", *rows])


def drawn(found: dict[str, Nights]) -> str:
    """Return the picture of some cases as SVG."""
    names = {f"c{number}": case for number, case in enumerate(found)}
    columns = zip(*(each.accuracies for each in found.values()), strict=True)
    points = [
        {"night": night, **dict(zip(names, row, strict=True))}
        for night, row in enumerate(columns, 1)
    ]
    chart = charts.line_chart("accuracy of the champion", points, "night", names)
    assert chart
    colors = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd")
    height = charts.HEIGHT + 18 * len(chart.lines)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {charts.WIDTH} {height}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for row in chart.rows:
        lines += [
            f'<line x1="{charts.LEFT}" x2="{charts.WIDTH - charts.RIGHT}" y1="{row.at:.1f}" '
            f'y2="{row.at:.1f}" stroke="#ddd"/>',
            f'<text x="{charts.LEFT - 6}" y="{row.at + 4:.1f}" '
            f'text-anchor="end">{row.label}</text>',
        ]
    lines += [
        f'<text x="{tick.at:.1f}" y="{charts.HEIGHT - 8}" text-anchor="middle">{tick.label}</text>'
        for tick in chart.columns
    ]
    for number, (line, color) in enumerate(zip(chart.lines, colors, strict=False)):
        at = charts.HEIGHT + 18 * number + 8
        lines += [
            f'<polyline points="{line.path}" fill="none" stroke="{color}" stroke-width="1.2"/>',
            f'<text x="{charts.LEFT}" y="{at}" fill="{color}">{line.label}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    """Print the table and write the figure."""
    found = cases()
    share = f"{simulated(worse, by_margin, keep=True).promoted / NIGHTS:.1%}"
    sys.stdout.write(f"{table(found)}\n\nworse by the margin: promoted {share}\n")
    picture = {case: each for case, each in found.items() if "begun" in case}
    Path(sys.argv[1]).write_text(drawn(picture), encoding="utf-8")


if __name__ == "__main__":
    main()

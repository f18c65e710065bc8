"""The report of a validation: the findings, and each feature next to the champion's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from flotilla.trainer.data_gate.findings import percent
from flotilla.trainer.data_gate.profile import DatasetProfile, FeatureProfile
from flotilla.trainer.features.statistics.statistics import CLASS, TEXT
from flotilla.trainer.report.charts import fit_axis
from flotilla.trainer.report.report import environment
from flotilla.trainer.runtime.masking import mask

_TEMPLATE = Path(__file__).with_name("page.html.j2")
# Maximum number of features on the page. Features with findings come first.
MOST_FEATURES = 60
_MOST_FINDINGS = 200
_BINS, _MOST_BARS, _LONGEST = 24, 12, 40
WIDTH, HEIGHT = 300, 90
# Minimum share of all other values together to get a bar. A smaller share is a rounding error.
_LEAST_REST = 1e-9
# Draw only values between these quantiles, because outliers would squeeze the rest into one bar.
_DRAWN = (0.005, 0.995)

# A bar: its name or position, and its size for the dataset and for the champion's dataset.
Bar = dict[str, Any]


def render(
    facts: Mapping[str, Any], dataset: DatasetProfile, champion: DatasetProfile | None
) -> bytes:
    """Return the page as HTML with all data escaped."""
    known = champion.features("train") if champion else {}
    found = [each["feature"] for each in facts["findings"]]
    features = dataset.features("train")
    order = sorted(features, key=lambda name: name not in found)
    text = _template().render(
        tree=facts,
        notes=dataset.notes,
        findings=facts["findings"][:_MOST_FINDINGS],
        pictures=[
            _picture(name, features[name], known.get(name)) for name in order[:MOST_FEATURES]
        ],
        left_out=max(len(order) - MOST_FEATURES, 0),
        width=WIDTH,
        height=HEIGHT,
    )
    return mask(text).encode(errors="backslashreplace")


def _picture(name: str, new: FeatureProfile, old: FeatureProfile | None) -> dict[str, Any]:
    rows: list[tuple[str, object, object]]
    rows = [("missing", new.missing, old.missing if old else None)]
    if math.isfinite(new.mean):
        rows += [
            (word, _short(getattr(new, key)), _short(getattr(old, key)) if old else None)
            for word, key in (
                ("mean", "mean"), ("standard deviation", "std"),
                ("least", "least"), ("most", "most"),
            )
        ]  # fmt: skip
    rows.append(("values", new.distinct or None, (old.distinct or None) if old else None))
    is_named = new.kind in (TEXT, CLASS)
    drawn = {"values": _stack(new, old)} if is_named else _bin(new, old)
    return {"name": name, "facts": rows, "values": [], "bars": [], "ticks": (), **drawn}


def _short(value: float) -> str:
    return f"{value:.5g}"


def _stack(new: FeatureProfile, old: FeatureProfile | None) -> list[Bar]:
    """Return a bar for each of the most frequent values, and one for all others together."""
    names = sorted(new.counts, key=lambda value: -new.counts[value])[:_MOST_BARS]
    before = old.counts if old else {}
    whole, whole_before = max(new.present, 1), max(old.present, 1) if old else 1
    shares = [
        (name[:_LONGEST], new.counts[name] / whole, before.get(name, 0) / whole_before)
        for name in names
    ]
    rest = 1 - sum(share for _, share, _ in shares)
    if new.present and rest > _LEAST_REST:
        shares.append(("all others", rest, max(1 - sum(each for *_, each in shares), 0.0)))
    highest = max((max(each) for _, *each in shares), default=0.0) or 1.0
    return [
        {
            "name": name,
            "new": round(100 * now / highest, 1),
            "old": round(100 * then / highest, 1) if old else 0,
            "share": percent(now),
            "before": percent(then) if old else "",
        }
        for name, now, then in shares
    ]


def _bin(new: FeatureProfile, old: FeatureProfile | None) -> dict[str, Any]:
    both = [each.numbers for each in (new, old) if each and len(each.numbers)]
    if not len(new.numbers):
        return {}
    ends = [np.quantile(values, _DRAWN) for values in both]
    low, high = min(float(each[0]) for each in ends), max(float(each[1]) for each in ends)
    edges = np.linspace(low, high if high > low else low + 1, _BINS + 1)
    shares = [np.histogram(values, edges)[0] / len(values) for values in both]
    before = shares[1] if len(shares) > 1 else np.zeros(_BINS)
    highest = float(max(each.max() for each in shares)) or 1.0
    step = WIDTH / _BINS
    bars = [
        {
            "left": round(at * step, 1),
            "width": round(step * 0.9, 1),
            "new": round(HEIGHT * now / highest, 1),
            "old": round(HEIGHT * then / highest, 1),
            "label": f"{edges[at]:.4g} to {edges[at + 1]:.4g}: {percent(now)}"
            + (f", before {percent(then)}" if len(shares) > 1 else ""),
        }
        for at, (now, then) in enumerate(zip(shares[0], before, strict=True))
    ]
    found = fit_axis([float(edges[0]), float(edges[-1])], is_exact=True)
    return {"bars": bars, "ticks": found.ticks, "highest": percent(highest)}


@cache
def _template() -> jinja2.Template:
    return environment(_TEMPLATE.parent).get_template(_TEMPLATE.name)

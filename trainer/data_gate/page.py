"""The report of a validation: findings, and each feature next to that of the champion's dataset."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from flotilla.trainer.data_gate.profile import DatasetProfile, FeatureProfile
from flotilla.trainer.features.statistics.statistics import CLASS, TEXT
from flotilla.trainer.report.pages import environment
from flotilla.trainer.runtime.masking import mask

_TEMPLATE = Path(__file__).with_name("page.html.j2")
# A longer page would not be read; features with findings come first.
MOST_FEATURES = 60
_MOST_FINDINGS = 200
_BINS, _MOST_BARS, _LONGEST = 24, 12, 40
WIDTH, HEIGHT = 300, 90
# Quantiles that are drawn: one outlier would squeeze all others into one bar.
_DRAWN = (0.005, 0.995)


# A bar: its position, the heights for the dataset and the champion, and its label.
Bar = dict[str, Any]


def render(
    facts: Mapping[str, Any], dataset: DatasetProfile, champion: DatasetProfile | None
) -> bytes:
    """Return the page as HTML; all data is escaped."""
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
    rows: list[tuple[str, object, object]] = []
    rows.append(("missing", new.missing, old.missing if old else None))
    if math.isfinite(new.mean):
        rows += [
            (word, _short(getattr(new, key)), _short(getattr(old, key)) if old else None)
            for word, key in (
                ("mean", "mean"), ("standard deviation", "std"),
                ("least", "least"), ("most", "most"),
            )
        ]  # fmt: skip
    rows.append(("values", new.distinct or None, (old.distinct or None) if old else None))
    if new.kind in (TEXT, CLASS):
        bars, ends = _stack(new, old), ("", "")
    else:
        bars, ends = _bin(new, old)
    return {"name": name, "facts": rows, "bars": bars, "ends": ends}


def _short(value: float) -> str:
    return f"{value:.5g}"


def _stack(new: FeatureProfile, old: FeatureProfile | None) -> list[Bar]:
    names = sorted(new.counts, key=lambda value: -new.counts[value])[:_MOST_BARS]
    before = old.counts if old else {}
    shares = [
        (name, new.counts[name] / max(new.present, 1),
         before.get(name, 0) / max(old.present, 1) if old else 0.0)
        for name in names
    ]  # fmt: skip
    return _bars(shares)


def _bin(new: FeatureProfile, old: FeatureProfile | None) -> tuple[list[Bar], tuple[str, str]]:
    both = [each.numbers for each in (new, old) if each and len(each.numbers)]
    if not len(new.numbers):
        return [], ("", "")
    ends = [np.quantile(values, _DRAWN) for values in both]
    low, high = min(float(each[0]) for each in ends), max(float(each[1]) for each in ends)
    edges = np.linspace(low, high if high > low else low + 1, _BINS + 1)
    shares = [np.histogram(values, edges)[0] / len(values) for values in both]
    before = shares[1] if len(shares) > 1 else np.zeros(_BINS)
    rows = [
        (f"{edges[at]:.4g} to {edges[at + 1]:.4g}", float(shares[0][at]), float(before[at]))
        for at in range(_BINS)
    ]
    return _bars(rows), (_short(low), _short(high))


def _bars(rows: Sequence[tuple[str, float, float]]) -> list[Bar]:
    highest = max((max(new, old) for _, new, old in rows), default=0.0) or 1.0
    step = WIDTH / max(len(rows), 1)
    return [
        {
            "left": round(place * step, 1),
            "width": round(step * 0.9, 1),
            "new": round(HEIGHT * new / highest, 1),
            "old": round(HEIGHT * old / highest, 1),
            "label": f"{name[:_LONGEST]}: {new:.3%}, before {old:.3%}",
        }
        for place, (name, new, old) in enumerate(rows)
    ]


@cache
def _template() -> jinja2.Template:
    return environment(_TEMPLATE.parent).get_template(_TEMPLATE.name)

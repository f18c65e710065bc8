"""Formats numbers and names for display. A number is rounded to the precision of its interval."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from flotilla.trainer.report.charts import number
from flotilla.trainer.runtime.masking import one_line

Facts = Mapping[str, Any]

NOTHING = "-"
# Number of significant digits of a value whose interval is unknown.
_DIGITS = 4
# Maximum number of significant digits of a float.
_MOST_DIGITS = 17
# Magnitudes outside of this range are written with an exponent.
_LARGE, _SMALL = 1e9, 1e-4
_UPPER = ("auc", "pr", "roc", "ndcg", "mrr", "map", "mae", "mse", "rmse", "id", "uri")
_NAMES = {"r2": "R²", "f1": "F1"}
_PAIR = 2
_MOST_METRICS = 4
# Maximum length of a displayed class name, in characters.
_LONGEST_NAME = 60


def format_value(value: object, digits: int = 6) -> str:
    """Format a value, such as a setting, for display."""
    if value is None or value == "":
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.{digits}g}"
    if isinstance(value, Mapping):
        value = [f"{name} {format_value(each, digits)}" for name, each in value.items()]
    if isinstance(value, list | tuple):
        return ", ".join(format_value(each, digits) for each in value) or NOTHING
    return str(value)


def round_value(value: object, interval: object = None) -> str:
    """Round a number to the precision of its confidence interval, or to four digits without one."""
    plain = number(value)
    if plain is None or isinstance(value, int):
        return format_value(value, _DIGITS)
    places = _places(interval)
    if not math.isfinite(plain) or places is None:
        return f"{plain:.{_DIGITS}g}" if abs(plain) < 10**_DIGITS else f"{plain:.{_DIGITS + 2}g}"
    if plain and not _SMALL <= abs(plain) < _LARGE:
        digits = math.floor(math.log10(abs(plain))) + places
        if 0 <= digits < _MOST_DIGITS:
            return f"{plain:.{digits}e}"
    return f"{plain:.{min(max(places, 0), _MOST_DIGITS)}f}"


def like(value: float) -> tuple[float, float]:
    """Return an interval that makes `round_value` keep four digits of `value`."""
    if not value or not math.isfinite(value):
        return (0.0, 0.0)
    return (0.0, 2 * 10.0 ** (math.floor(math.log10(abs(value))) - _DIGITS + 2))


def interval_text(interval: object, between: str = " to ") -> str:
    """Format both ends of an interval with its precision. Without an interval, return ""."""
    ends = _ends(interval)
    return between.join(round_value(end, interval) for end in ends) if ends else ""


def apart(*values: float, interval: object = None) -> list[str]:
    """Format numbers with enough digits to show their order."""
    texts = [round_value(each, interval) for each in values]
    for digits in range(2, _MOST_DIGITS + 1):
        if _tells(texts, values):
            return texts
        texts = [f"{each:.{digits}g}" for each in values]
    return [repr(each) for each in values]


def side_by_side(values: Sequence[Any], interval: object, better: str) -> list[tuple[str, bool]]:
    """Format values with the same decimal places, and mark the best value with true."""
    known = [each for each in values if isinstance(each, float) and number(each) is not None]
    places = interval or like(known[0] if known else 0.0)
    best = round_value((min if better == "lower" else max)(known), places) if known else ""
    is_one = any(round_value(each, places) != best for each in known)
    return [(text := round_value(each, places), is_one and text == best) for each in values]


def key_metrics(metrics: Facts) -> dict[str, str]:
    """Return the first scalar metrics of a step, formatted."""
    # Leave out numbers that the progress text already contains.
    left_out = {"headline", *(("share", "seconds_left") if metrics.get("progress") else ())}
    plain = {
        name: round_value(value)
        for name, value in metrics.items()
        if not isinstance(value, list | dict) and value not in ("", None) and name not in left_out
    }
    return dict(list(plain.items())[:_MOST_METRICS])


def spell_metric(name: object) -> str:
    """Spell out the name of a metric: `auc@label=7` becomes `AUC where label is 7`."""
    metric, _, part = str(name).partition("@")
    words = shorten_name(metric).replace("_", " ").split(" ")
    known = [_NAMES.get(each, each.upper() if each in _UPPER else each) for each in words]
    feature, is_one, value = part.partition("=")
    where = f" where {feature} is {shorten_name(value)}" if is_one else ""
    return f"{' '.join(known)}{where}"


def title_metric(name: object) -> str:
    """Return the spelled-out name of a metric with a capital letter."""
    return capital(spell_metric(name))


def capital(text: str) -> str:
    """Capitalize the first letter of text."""
    return text[:1].upper() + text[1:]


def shorten_name(name: object) -> str:
    """Shorten the name of a class or a file to fit into a one-line sentence."""
    text = one_line(str(name)) or "(empty)"
    return text if len(text) <= _LONGEST_NAME else f"{text[: _LONGEST_NAME - 1]}…"


def _tells(texts: Sequence[str], values: Sequence[float]) -> bool:
    read = [float(text) for text in texts]
    return all(
        (read[i] < read[j]) == (values[i] < values[j])
        and (read[i] == read[j]) == (values[i] == values[j])
        for i, j in combinations(range(len(read)), 2)
        if math.isfinite(values[i]) and math.isfinite(values[j])
    )


def _ends(interval: object) -> Sequence[float] | None:
    if not isinstance(interval, list | tuple) or len(interval) != _PAIR:
        return None
    ends = [found for each in interval if (found := number(each)) is not None]
    return ends if len(ends) == _PAIR else None


def _places(interval: object) -> int | None:
    """Return how many decimal places give half of the interval two digits. May be negative."""
    ends = _ends(interval)
    if not ends or not ends[1] > ends[0]:
        return None
    half = (ends[1] - ends[0]) / 2
    return 1 - math.floor(math.log10(half)) if half else None

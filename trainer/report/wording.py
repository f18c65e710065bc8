"""Numbers, names and rules as a person reads them; a number is rounded by its interval."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.report.charts import number

Facts = Mapping[str, Any]

NOTHING = "-"
# Where no interval is known.
_DIGITS = 4
# More do not tell two numbers apart.
_MOST_DIGITS = 17
# From here on, or below it, a number is read by its power of ten.
_LARGE, _SMALL = 1e9, 1e-4
_UPPER = ("auc", "pr", "roc", "ndcg", "mrr", "map", "mae", "mse", "rmse", "id", "uri")
_NAMES = {"r2": "R²", "f1": "F1"}
_GAIN = "_difference"
# Sixty of the smaller unit; from so many seconds on without tenths; from so many hours on in days.
_MINUTE, _TENTHS, _DAYS = 60, 10, 48
_PAIR = 2
_SEEN = {
    "labelled": (
        "The labels are as many as the model has outputs.",
        "The labels are not as many as the model has outputs.",
    ),
    "same_signature": (
        "It takes and gives the same as the champion does.",
        "It takes or gives something else than the champion does.",
    ),
    "comparable": (
        "The champion can be compared with this model.",
        "The champion cannot be compared with this model.",
    ),
}


def formatted(value: object) -> str:
    """Return a value as a person reads it."""
    if value is None or value == "":
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {formatted(each)}" for name, each in value.items()) or NOTHING
    if isinstance(value, list | tuple):
        return ", ".join(formatted(each) for each in value) or NOTHING
    return str(value)


def rounded(value: object, interval: object = None) -> str:
    """Return a number with the digits that its `interval`, a pair, leaves it; four without one."""
    plain = number(value)
    if plain is None or isinstance(value, int):
        return formatted(value)
    places = _places(interval)
    if not math.isfinite(plain) or places is None:
        return f"{plain:.{_DIGITS}g}" if abs(plain) < 10**_DIGITS else f"{plain:.{_DIGITS + 2}g}"
    if plain and not _SMALL <= abs(plain) < _LARGE:
        digits = math.floor(math.log10(abs(plain))) + places
        if 0 <= digits < _MOST_DIGITS:
            return f"{plain:.{digits}e}"
    return f"{plain:.{min(max(places, 0), _MOST_DIGITS)}f}"


def interval_text(interval: object) -> str:
    """Return both ends of an interval with the digits of its width; empty for none."""
    ends = _ends(interval)
    return " to ".join(rounded(end, interval) for end in ends) if ends else ""


def apart(value: float, threshold: float, interval: object = None) -> tuple[str, str]:
    """Return value and threshold with so many digits that a reader sees which one is larger."""
    short = rounded(value, interval), formatted(threshold)
    if value == threshold or _tells(short, value, threshold):
        return short
    for digits in range(2, _MOST_DIGITS + 1):
        texts = f"{value:.{digits}g}", formatted(threshold)
        if _tells(texts, value, threshold):
            return texts
    return repr(value), repr(threshold)


def titled(name: object) -> str:
    """Return the name of a metric as a title: `query_auc` is Query AUC."""
    words = str(name).replace("_", " ").split(" ")
    known = [_NAMES.get(each, each.upper() if each in _UPPER else each) for each in words]
    text = " ".join(known)
    return text[:1].upper() + text[1:]


def sentence(rule: Facts, intervals: Facts | None = None) -> str:
    """Return what a rule asks and what was found, in plain words."""
    metric, key = str(rule.get("metric") or "a value"), str(rule.get("key") or "")
    if metric in _SEEN and number(rule.get("value")) is not None:
        return _SEEN[metric][not rule.get("passed")]
    if metric.startswith("difference of "):
        metric = f"the largest difference of the exported {metric[14:]} from the checkpoint"
    value, threshold = number(rule.get("value")), number(rule.get("threshold"))
    bound = {"min": "at least", "max": "at most"}.get(str(rule.get("bound")), "")
    named = key or (f"gate.{rule['bound']}" if rule.get("bound") else "")
    source = f" ({named})" if named else ""
    if metric.endswith(_GAIN):
        return _difference(rule, metric.removesuffix(_GAIN), value, threshold)
    name = _named(metric)
    if value is None or threshold is None:
        said = "not a finite number" if value is None else rounded(value)
        asked = f"{bound} {formatted(rule.get('threshold'))}".strip()
        return f"{name} is {said}; it has to be {asked}{source}."
    interval = (intervals or {}).get(metric)
    found, asked = apart(value, threshold, interval)
    between = f", between {interval_text(interval)} at 95 %" if _ends(interval) else ""
    between = between.replace(" to ", " and ")
    return f"{name} is {found}{between}; it has to be {bound} {asked}{source}."


def duration(seconds: object) -> str:
    """Return seconds as a person says them: `1 h 05 min`, `2 min 08 s`, `7.3 s`."""
    plain = number(seconds)
    if plain is None or plain < 0 or not math.isfinite(plain):
        return formatted(seconds)
    if plain < _MINUTE:
        return f"{plain:.1f} s" if plain < _TENTHS else f"{plain:.0f} s"
    minutes, rest = divmod(round(plain), _MINUTE)
    if minutes < _MINUTE:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, _MINUTE)
    return f"{hours} h {minutes:02d} min" if hours < _DAYS else f"{hours // 24} d {hours % 24} h"


def _named(metric: str) -> str:
    name, _, part = metric.partition("@")
    feature, is_one, value = part.partition("=")
    where = f" where {feature} is {value}" if is_one else ""
    return f"{titled(name)}{where}"


def _difference(rule: Facts, metric: str, value: float | None, threshold: float | None) -> str:
    """Return the sentence of the comparison with the champion."""
    if value is None or threshold is None:
        return f"{titled(metric)} could not be compared with that of the champion."
    worse = -1.0 if rule.get("bound") == "min" else 1.0
    lost, allowed = worse * value, worse * threshold
    word = "lower" if worse < 0 else "higher"
    found, asked = rounded(abs(lost)), rounded(abs(allowed))
    if found == asked:
        found, asked = apart(abs(lost), abs(allowed))
    sure = (
        f"may be up to {found} {word} than the champion's"
        if lost > 0
        else f"is at least {found} better than the champion's"
    )
    rest = f"up to {asked} is allowed" if allowed >= 0 else f"a gain of {asked} is asked for"
    return f"{titled(metric)} {sure}; {rest} ({rule.get('key') or 'gate.champion'})."


def _tells(texts: tuple[str, str], value: float, threshold: float) -> bool:
    left, right = (float(each) for each in texts)
    return (left < right) == (value < threshold) and left != right


def _ends(interval: object) -> Sequence[float] | None:
    if not isinstance(interval, list | tuple) or len(interval) != _PAIR:
        return None
    ends = [number(each) for each in interval]
    return None if None in ends else [float(each) for each in ends if each is not None]


def _places(interval: object) -> int | None:
    """Return the decimal places at which half of the interval has two digits; below 0 for tens."""
    ends = _ends(interval)
    if not ends or not ends[1] > ends[0]:
        return None
    half = (ends[1] - ends[0]) / 2
    return 1 - math.floor(math.log10(half)) if half else None

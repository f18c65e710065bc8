"""Describes the result of each rule of the gate and the registry in a sentence.

A rule is plain data as in `decision.json`: `metric`, `bound` (`min` or `max`), `threshold`,
`value`, `key`, `note`, `passed`. The value of a comparison is a confidence bound of the difference.
`found` describes a comparison. The keys that are used here are `metric`, `own` with its `interval`,
`other`, `opponent`, `label` (a class), `answer` (of a constant), `examples`, and `needed`, the
sufficient number of examples. Any of them may be missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flotilla.trainer.report.charts import number
from flotilla.trainer.report.wording import (
    apart,
    capital,
    format_value,
    interval_text,
    like,
    shorten_name,
    spell_metric,
)

#: Configuration keys of the comparison rules.
CONSTANT = "gate.constant"
MARGIN = "gate.champion.margin"
CLASS_MARGIN = "gate.champion.class_margin"
#: A prefix and a suffix of metric names in rules that measure a difference.
EXPORTED = "difference of "
DIFFERENCE = "_difference"
_OPPONENTS = {CONSTANT: "a constant", MARGIN: "the champion", CLASS_MARGIN: "the champion"}
_SEEN = {
    "labelled": (
        "the number of labels equals the number of outputs",
        "the number of labels differs from the number of outputs",
    ),
    "same_signature": (
        "its inputs and outputs are the same as the champion's",
        "its inputs or outputs differ from the champion's",
    ),
    "comparable": (
        "the champion can be compared with this model",
        "the champion cannot be compared with this model",
    ),
}
#: Metrics of the rules that check whether the model can replace the champion.
IDENTITY = ("same_signature", "comparable")
_NAMES = {
    "megabytes": "the size of the model in megabytes",
    "milliseconds": "the time to predict one example in milliseconds",
}

Facts = Mapping[str, Any]


def sentence(rule: Facts, intervals: Facts | None = None) -> str:
    """Return a sentence with the measured value, the required value and the examples needed."""
    metric, found = str(rule.get("metric") or "a value"), _comparison(rule)
    if metric in _SEEN and number(rule.get("value")) is not None:
        text = _SEEN[metric][not rule.get("passed")]
        text = text.replace("the champion", str(found.get("opponent") or "the champion"))
        return f"{capital(text)}{': ' if rule.get('note') else ''}{rule.get('note') or ''}."
    interval = found.get("interval") or (intervals or {}).get(found.get("metric") or metric)
    if opponent := _opponent(rule):
        return _describe_comparison(rule, opponent, interval)
    value, threshold = number(rule.get("value")), number(rule.get("threshold"))
    said, asked = "not a finite number", format_value(rule.get("threshold"))
    if value is not None and threshold is not None:
        said, limit = apart(value, threshold, interval=interval)
        asked = asked if float(asked) == threshold else limit
        between = interval_text(interval, " and ")
        said += f", between {between} at 95 %" if between else ""
    bound = {"min": "at least", "max": "at most"}.get(str(rule.get("bound")), "")
    key = rule.get("key") or (f"gate.{rule['bound']}" if bound else "")
    return (
        f"{capital(_name(metric))} is {said}; it must be "
        f"{' '.join(filter(None, (bound, asked)))}{f' ({key})' if key else ''}."
    )


def because(rule: Facts) -> str:
    """Return the reason for a refusal, as text that follows `refused:`."""
    metric, key, found = str(rule.get("metric") or "a value"), rule.get("key"), _comparison(rule)
    if metric in _SEEN:
        return _SEEN[metric][1]
    if key == CONSTANT:
        return "it does not beat a constant"
    if key == CLASS_MARGIN:
        return (
            f"it may find fewer examples of the class {shorten_name(found.get('label'))} than the "
            "champion"
        )
    if opponent := _opponent(rule):
        asked = number(rule.get("threshold")) or 0.0
        is_gain = asked > 0 if rule.get("bound") == "min" else asked < 0
        return f"it may be {'no better' if is_gain else 'worse'} than {opponent}"
    if number(rule.get("value")) is None:
        return f"{_name(metric)} is not a finite number"
    side = "below" if rule.get("bound") == "min" else "above"
    return f"{_name(metric)} is {side} {format_value(rule.get('threshold'))}"


def _name(metric: str) -> str:
    if metric.startswith(EXPORTED):
        form = metric.removeprefix(EXPORTED)
        return f"the largest difference between the exported {form} model and the checkpoint"
    return _NAMES.get(metric, spell_metric(metric))


def _comparison(rule: Facts) -> Facts:
    found = rule.get("found")
    return found if isinstance(found, Mapping) else {}


def _opponent(rule: Facts) -> str:
    """Return the opponent of a comparison, or an empty string for a rule that sets a bound."""
    # Rules in decisions of earlier versions may have no key.
    old = "the champion" if str(rule.get("metric")).endswith(DIFFERENCE) else ""
    return str(_comparison(rule).get("opponent") or _OPPONENTS.get(str(rule.get("key")), old))


def _describe_comparison(rule: Facts, opponent: str, interval: object) -> str:
    found = _comparison(rule)
    metric = spell_metric(found.get("metric") or str(rule.get("metric")).removesuffix(DIFFERENCE))
    if "label" in found:
        metric += f" of the class {shorten_name(found['label'])}"
    own, other = number(found.get("own")), number(found.get("other"))
    begin, than = f"{capital(metric)}", f" than for {opponent}"
    if own is not None and other is not None:
        mine, theirs = apart(own, other, interval=interval or like(own))
        answer = f" ({shorten_name(found['answer'])})" if found.get("answer") else ""
        begin, than = f"{begin} is {mine}, and {theirs} for {opponent}{answer}; it", ""
    bound, threshold = number(rule.get("value")), number(rule.get("threshold"))
    source = f" ({rule['key']})" if rule.get("key") else ""
    if bound is None or threshold is None:
        return f"{begin} cannot be compared with {opponent} on these examples{source}."
    known, asked = _describe_bound(bound, threshold, is_higher_better=rule.get("bound") != "max")
    note = f" {capital(str(rule['note']))}." if rule.get("note") and found else ""
    return f"{begin} {known}{than}{asked}{source}.{_describe_needed(found)}{note}"


def _describe_bound(bound: float, threshold: float, *, is_higher_better: bool) -> tuple[str, str]:
    """Return the proven difference and the allowed difference, as parts of a sentence."""
    gain, asked = (bound, threshold) if is_higher_better else (-bound, -threshold)
    better, worse = ("higher", "lower") if is_higher_better else ("lower", "higher")
    sizes = apart(abs(gain), abs(asked), interval=(0.0, max(abs(gain), abs(asked)) * 2))
    known = f"may be up to {sizes[0]} {worse}" if gain < 0 else f"is at least {sizes[0]} {better}"
    if not gain:
        known = f"may be no {better}"
    if asked > 0:
        return known, f", and must be at least {sizes[1]} {better}"
    if not asked:
        return known, "" if gain > 0 else f", and must be {better}"
    if gain > 0:
        return known, ""
    return known, f", {'and' if gain >= asked else 'but only'} {sizes[1]} is allowed"


def _describe_needed(found: Facts) -> str:
    examples, needed = number(found.get("examples")), number(found.get("needed"))
    if not examples or not needed or needed <= examples:
        return ""
    of = f" of the class {shorten_name(found['label'])}" if "label" in found else ""
    return (
        f" {examples:,.0f} test examples{of} are too few to be sure; about {needed:,.0f} would be "
        "enough."
    )

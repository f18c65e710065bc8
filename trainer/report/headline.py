"""Summarizes the result of a run in one sentence, and adds notes.

    churn v2: average precision 0.41, +0.03 against the champion, constant 0.03; promoted

The terminal, the tables, the report, the gate's decision and the pages of a KFP instance show this
sentence. The facts are `name`, `version`, `verdict`, `measured` (see `describe_metric`), the
evaluated `rules`, and `step`, the step in which the run ended. Any of them may be missing.

The result of each rule of the gate and the registry is a sentence too. A rule is plain data as in
`decision.json`: `metric`, `bound` (`min` or `max`), `threshold`, `value`, `key`, `note`, `passed`.
The value of a comparison is a confidence bound of the difference. `found` describes a comparison.
The keys that are used here are `metric`, `own` with its `interval`, `other`, `opponent`, `label` (a
class), `answer` (of a constant), `examples`, and `needed`, the sufficient number of examples. Any
of them may be missing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flotilla.trainer.config.main_metric import MainMetric
from flotilla.trainer.events.progress import duration
from flotilla.trainer.report.charts import number
from flotilla.trainer.report.wording import (
    apart,
    capital,
    format_value,
    interval_text,
    like,
    round_value,
    shorten_name,
    spell_metric,
)
from flotilla.trainer.runtime.masking import one_line

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
# If the confidence interval is unknown, the suggested bound keeps this share of the model's gain
# over a constant.
_KEPT = 0.9
_MOST_CLASSES, _MOST_DIGITS = 5, 6
# A suggested bound below this magnitude is rounded to 0.
_SMALLEST = 1e-100

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


def headline(facts: Facts) -> str:
    """Return the one-sentence result of a run."""
    name = facts.get("name") or "run"
    version = facts.get("version")
    subject = f"{name} v{version}" if version else name
    measures = facts.get("measured") or {}
    found = ", ".join(filter(None, [main_value(measures), *comparisons(measures)]))
    # Mask each part separately. Otherwise, a run named `authorization` would mask the whole text.
    parts = filter(None, map(one_line, [found, _describe_end(facts)]))
    return f"{one_line(subject)}: {'; '.join(parts)}"


def title(facts: Facts) -> str:
    """Return how a run ended, without metrics, such as `Promoted, no bound set`."""
    return capital(one_line(_describe_end(facts)))


def describe_metric(evaluation: Facts) -> dict[str, Any]:
    """Return the main metric of an evaluation, with the values of the champion and the constant.

    The values of `metric`, `value`, `interval`, `better`, `champion` and `constant` are None if
    unknown. `positive` has a line for each positive class.
    """
    metrics = evaluation.get("metrics") or {}
    if not metrics:
        return {}
    main, others = MainMetric.of(evaluation), opponents(evaluation)
    return {
        "metric": main.name,
        "value": number(metrics.get(main.name)),
        "interval": (evaluation.get("intervals") or {}).get(main.name),
        "better": main.better,
        **{name: number(others.get(name, {}).get(main.name)) for name in ("champion", "constant")},
        "positive": positive_classes(evaluation),
    }


def opponents(evaluation: Facts) -> dict[str, Facts]:
    """Return the known metrics of the champion, constant and baselines, keyed by opponent."""
    known = {name: evaluation.get(name) or {} for name in ("champion", "constant")}
    known |= {str(each.get("name")): each for each in evaluation.get("baselines") or ()}
    return {name: each["metrics"] for name, each in known.items() if each.get("metrics")}


def _positive_class(output: str, evaluation: Facts) -> str:
    if not evaluation.get("positive"):
        return ""
    of = f" of {shorten_name(output)}" if output else ""
    text = f"Positive class{of}: {shorten_name(evaluation['positive'])}"
    threshold = evaluation.get("threshold") or {}
    if number(threshold.get("value")) is None:
        return f"{text}."
    split, count = threshold.get("chosen_on"), threshold.get("examples")
    chosen = f", chosen on {count} {split} examples" if split and count else ""
    return f"{text}, at a probability of {round_value(threshold['value'])} or more{chosen}."


def positive_classes(evaluation: Facts) -> list[str]:
    """Return a line for each positive class, with its decision threshold."""
    outputs = {"": evaluation, **(evaluation.get("outputs") or {})}
    return [line for name, each in outputs.items() if (line := _positive_class(name, each))]


def main_value(found: Facts) -> str:
    """Return the main metric with its value, such as `average precision 0.41`, or "" if unknown."""
    if not found.get("metric"):
        return ""
    text = "undefined" if number(found.get("value")) is None else _values(found)[0]
    return f"{spell_metric(found['metric'])} {text}"


def _values(found: Facts) -> list[str]:
    """Format the known values of the model and the constant with digits that tell them apart."""
    known = [number(found.get(name)) for name in ("value", "constant")]
    return apart(*(each for each in known if each is not None), interval=_interval(found))


def _interval(found: Facts) -> object:
    return found.get("interval") or like(number(found.get("value")) or 0.0)


def describe_constant(found: Facts) -> str:
    """Return the constant's value, formatted like the main metric, or "" if unknown."""
    return _values(found)[-1] if number(found.get("constant")) is not None else ""


def comparisons(found: Facts) -> list[str]:
    """Return the difference from the champion and the value of the constant, if known."""
    value, champion, constant = (
        number(found.get(name)) for name in ("value", "champion", "constant")
    )
    parts = []
    if value is not None and champion is not None:
        parts.append(_difference(found, value - champion))
    if constant is not None:
        parts.append(f"constant {describe_constant(found)}")
    return parts


def difference(value: float, interval: object) -> str:
    """Format the magnitude of a difference, or return an empty string if it rounds to zero."""
    text = round_value(abs(value), interval)
    return text if float(text) else ""


def _difference(found: Facts, value: float) -> str:
    if not (size := difference(value, _interval(found))):
        return "the same as the champion"
    if found.get("better") != "lower":
        return f"{'+' if value > 0 else '-'}{size} against the champion"
    return f"{size} {'higher' if value > 0 else 'lower'} than the champion's"


def _describe_end(facts: Facts) -> str:
    verdict = str(facts.get("verdict") or "unknown")
    rules, step = facts.get("rules"), shorten_name(facts["step"]) if facts.get("step") else ""
    if verdict == "refused" and (
        broken := [each for each in rules or () if not each.get("passed")]
    ):
        more = f", and {len(broken) - 1} more" if broken[1:] else ""
        return f"refused: {because(broken[0])}{more}"
    if verdict in ("blessed", "promoted"):
        return verdict if rules is None or has_bound(rules) else f"{verdict}, no bound set"
    if verdict == "refused" and step:
        return f"refused by {step}"
    return f"{verdict} in {step}" if step else verdict


def has_bound(rules: Iterable[Facts]) -> bool:
    """Return whether a rule sets a bound or compares the model with the champion."""
    keys = (rule.get("key") or f"gate.{rule.get('bound')}" for rule in rules)
    return any(key in ("gate.min", "gate.max", MARGIN) for key in keys)


def make_notes(evaluation: Facts, rules: Sequence[Facts]) -> list[str]:
    """Return notes about an evaluated model, as sentences."""
    found = describe_metric(evaluation)
    champion = evaluation.get("champion") or {}
    return [
        *_unbound(found, rules),
        *_report_constant(evaluation, rules),
        *_name_better(evaluation),
        *map(str, evaluation.get("remarks") or ()),
        *map(str, champion.get("remarks") or ()),
        *_name_unjudged(champion),
    ]


def _unbound(found: Facts, rules: Sequence[Facts]) -> list[str]:
    if has_bound(rules) or not all(rule.get("passed") for rule in rules):
        return []
    asked = (
        "any model that beats a constant"
        if CONSTANT in {rule.get("key") for rule in rules}
        else "any model"
    )
    text = f"No bound is set: the gate blesses {asked}."
    if (value := number(found.get("value"))) is None:
        return [f"{text} Set gate.min or gate.max."]
    is_lower = found.get("better") == "lower"
    proposed = _propose_bound(found, value, is_lower=is_lower)
    key = f"gate.{'max' if is_lower else 'min'}.{found['metric']}"
    return [f"{text} Set one, such as {key}={proposed}, which this model meets."]


def _propose_bound(found: Facts, value: float, *, is_lower: bool) -> str:
    """Suggest a bound: the weaker end of the interval or, without one, weaker than the value."""
    ends, constant = found.get("interval"), number(found.get("constant"))
    bound = number(ends[is_lower]) if isinstance(ends, list | tuple) and len(ends) > 1 else None
    if bound is None:
        start = constant if constant is not None else 0.0 if not is_lower else 2 * value
        bound = start + _KEPT * (value - start)
    if constant is not None and (bound > constant) == is_lower:
        bound = (value + constant) / 2
    text, largest = f"{bound:g}", math.floor(math.log10(max(abs(bound), _SMALLEST)))
    for digits in range(2, _MOST_DIGITS):
        # Round toward the weaker side, so that the model still meets the bound.
        size = 10.0 ** (largest - digits + 1)
        text = f"{(math.ceil if is_lower else math.floor)(bound / size) * size:.{digits}g}"
        if constant is None or (float(text) < constant if is_lower else float(text) > constant):
            break
    return text


def _report_constant(evaluation: Facts, rules: Sequence[Facts]) -> list[str]:
    constant = evaluation.get("constant") or {}
    paired, notes = constant.get("paired") or {}, []
    bound, metric = number(paired.get("bound")), spell_metric(paired.get("metric"))
    gain = 1.0 if bound is None else -bound if paired.get("better") == "lower" else bound
    if gain <= 0 and CONSTANT not in {rule.get("key") for rule in rules}:
        notes = [f"The model does not beat a constant in {metric}; {CONSTANT} is set to reported."]
    if constant.get("champion") is False:
        notes.append(f"The champion does not beat a constant in {metric} on these examples.")
    return notes


def _name_better(evaluation: Facts) -> list[str]:
    return [
        f"A simple model is better: {describe_baseline(each)}{_describe_scores(evaluation, each)}."
        for each in evaluation.get("baselines") or ()
        if each.get("beats") is True
    ]


def describe_baseline(baseline: Facts) -> str:
    """Describe how a baseline was made: `linear (scikit-learn Ridge, 20 of 80 rows, 2.0 s)`."""
    rows, of, seconds = (number(baseline.get(name)) for name in ("rows", "of_rows", "seconds"))
    some = f"{rows:,.0f} of {of:,.0f} rows" if rows and of and rows < of else ""
    took = duration(seconds) if seconds else ""
    how = ", ".join(filter(None, [one_line(str(baseline.get("made_by") or "")), some, took]))
    return f"{shorten_name(baseline.get('name'))}{f' ({how})' if how else ''}"


def _describe_scores(evaluation: Facts, baseline: Facts) -> str:
    found = describe_metric(evaluation)
    value = number((baseline.get("metrics") or {}).get(found.get("metric")))
    own = number(found.get("value"))
    if value is None or own is None:
        return ""
    theirs, mine = apart(value, own, interval=_interval(found))
    return f" reaches {spell_metric(found['metric'])} {theirs}, and this model {mine}"


def _name_unjudged(champion: Facts) -> list[str]:
    few = [
        f"{shorten_name(each.get('label'))} ({each.get('examples')})"
        for each in champion.get("classes") or ()
        if each.get("judged") is False and not each.get("lost")
    ]
    if not few:
        return []
    count = max(number((champion.get("class_counts") or {}).get("not_judged")) or 0, len(few))
    first = few[:_MOST_CLASSES]
    names = ", ".join(first)
    more = f" and {count - len(first):.0f} more" if count > len(first) else ""
    return [
        f"Too few test examples to tell whether recall is lower for these classes: {names}{more}."
    ]

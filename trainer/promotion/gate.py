"""The gate: decides whether a model is good enough to be exported.

Bounds can be set for any metric that the task measures (`trainer/tasks/`). The decision is a
published directory with `decision.json`:

    {"decision": "blessed" | "refused", "reasons": [one line each],
     "headline": one sentence, "notes": [remarks that do not depend on the decision],
     "measured": the main metric, see `headline.describe_metric`,
     "rules": [{"metric", "key", "bound": "min" | "max", "threshold", "value", "passed", "note",
                "found"}],
     "champion": URI or "", "evaluation": URI, "global_step"}

`key` is the configuration key that sets the threshold, `note` is a remark, and `found` is the
result of a comparison (see `flotilla.trainer.report.headline`). A value that is not finite becomes
null, and never passes.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

from flotilla.trainer import storage
from flotilla.trainer.config.schema import Config
from flotilla.trainer.config.thresholds import ChampionRule, GateConfig, present_name, split_rule
from flotilla.trainer.report import headline
from flotilla.trainer.report.headline import CLASS_MARGIN, CONSTANT, DIFFERENCE, MARGIN, sentence
from flotilla.trainer.report.wording import shorten_name
from flotilla.trainer.runtime.errors import ConfigError, UserError, nearest

KIND = "decision"
BLESSED = "blessed"
REFUSED = "refused"
#: Key of the rule that requires a model that can be compared with the champion.
COMPARABLE = "the champion"
# Maximum number of lost classes that a rule lists.
_FEW = 4
# A rule suggests at most this many times the current number of examples.
_MOST_TIMES = 100


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule of the gate: a threshold, and the model's value."""

    metric: str
    bound: Literal["min", "max"]
    threshold: float
    value: float
    key: str
    note: str = ""
    found: Mapping[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether the value is within the bound."""
        if not math.isfinite(self.value):
            return False
        if self.key == CONSTANT and self.value == self.threshold:
            # A model that only equals the constant fails.
            return False
        if self.bound == "min":
            return self.value >= self.threshold
        return self.value <= self.threshold

    @property
    def gained(self) -> bool:
        """Whether a comparison with the champion proves a gain of at least the margin."""
        if self.key != MARGIN or not math.isfinite(self.value):
            return False
        gain = self.value if self.bound == "min" else -self.value
        return gain > 0 and gain >= abs(self.threshold)

    def __str__(self) -> str:
        """Return the rule and its result in a sentence."""
        return sentence(row(self))


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The decision of the gate."""

    uri: str
    blessed: bool
    rules: tuple[Rule, ...]
    headline: str = ""
    notes: tuple[str, ...] = ()
    measured: Mapping[str, Any] = field(default_factory=dict)

    @property
    def word(self) -> str:
        """The decision: `blessed` or `refused`."""
        return BLESSED if self.blessed else REFUSED

    @property
    def in_words(self) -> dict[str, Any]:
        """The fields of the decision that are shown to users, as plain data."""
        return {
            "decision": self.word,
            "headline": self.headline,
            "reasons": list(self.reasons),
            "notes": list(self.notes),
            "measured": dict(self.measured),
        }

    @property
    def gained(self) -> bool:
        """Whether the model is proven to beat the champion by at least the margin."""
        return any(rule.gained for rule in self.rules)

    @property
    def reasons(self) -> tuple[str, ...]:
        """One line for each failed rule or, if none failed, for each rule."""
        failed = tuple(str(rule) for rule in self.rules if not rule.passed)
        return failed or tuple(map(str, self.rules))


def check(config: Config, evaluation: str, output: str) -> Decision:
    """Compare the metrics with the thresholds, and publish the decision at the URI `output`.

    Raises `UserError` if a rule names a metric that was not measured, or if the directory at
    `evaluation` is not an evaluation.
    """
    measured = _read_measured(evaluation)
    with storage.check_form(f"metrics.json of {evaluation}"):
        decision = _decide(config.name, measured, make_rules(config.gate, measured), output)
        origin = {
            "champion": (measured.get("champion") or {}).get("uri", ""),
            "evaluation": evaluation,
            "global_step": measured.get("global_step"),
        }
        tree = {**decision.in_words, "rules": [row(rule) for rule in decision.rules], **origin}
        fields = {"decision": decision.word, "gained": decision.gained, **origin}
        publish_json(tree, output, kind=KIND, fields=fields)
    return decision


def make_rules(config: GateConfig, measured: Mapping[str, Any]) -> tuple[Rule, ...]:
    """Return the rules for the metrics of an evaluation. Raises like `check`."""
    rules = (
        *_bounds(config, measured),
        *_constant_rules(config, measured),
        *_against_champion(config, measured, measured.get("champion") or {}),
    )
    intervals = measured.get("intervals") or {}
    found = ((rule, intervals.get(rule.found.get("metric", rule.metric))) for rule in rules)
    return tuple(
        replace(rule, found={**rule.found, "interval": interval}) if interval else rule
        for rule, interval in found
    )


def _decide(
    name: str, measured: Mapping[str, Any], rules: tuple[Rule, ...], output: str
) -> Decision:
    rows, blessed = [row(rule) for rule in rules], all(rule.passed for rule in rules)
    main = headline.describe_metric(measured)
    verdict = BLESSED if blessed else REFUSED
    return Decision(
        uri=output,
        blessed=blessed,
        rules=rules,
        headline=headline.headline(
            {"name": name, "verdict": verdict, "measured": main, "rules": rows}
        ),
        notes=tuple(headline.make_notes(measured, rows)),
        measured=main,
    )


def _read_measured(uri: str) -> dict[str, Any]:
    kind = storage.read_manifest(uri).kind
    if kind != "evaluation":
        raise UserError(f"{uri} is of kind {kind!r}; pass the URI of an evaluation")
    tree = storage.read_json(uri, "metrics.json")
    if not isinstance(tree.get("metrics"), dict):
        raise UserError(f"{uri}: metrics.json contains no metrics; evaluate the checkpoint again")
    return tree


def _bounds(config: GateConfig, measured: Mapping[str, Any]) -> Iterator[Rule]:
    bounds: dict[Literal["min", "max"], dict[str, float]] = {"min": config.min, "max": config.max}
    for bound, thresholds in bounds.items():
        for name, threshold in thresholds.items():
            slices = measured.get("slices", {})
            metric, feature, value = split_rule(name, measured["metrics"], slices)
            key = f"gate.{bound}"
            for label, metrics in _parts(feature, value, f"{key}.{name}", measured):
                yield Rule(
                    metric=f"{metric}{label}",
                    bound=bound,
                    threshold=threshold,
                    value=_value(metric, f"{key}.{name}", metrics),
                    key=key,
                )


def _parts(
    feature: str, value: str | None, key: str, measured: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield a suffix of metric names and the metrics: of all examples or each part of a slice."""
    if not feature:
        yield "", measured["metrics"]
        return
    slices = measured.get("slices", {})
    if feature not in slices:
        known = ", ".join(slices) or "nothing"
        raise ConfigError(
            f"{key}: there is no slice by {feature!r}{nearest(feature, slices)} (sliced by: "
            f"{known}); add it to evaluation.slices"
        )
    rows = {row["value"]: row["metrics"] for row in slices[feature]}
    if value is not None and value not in rows:
        raise ConfigError(
            f"{key}: no example has {feature} {value!r}{nearest(value, rows)} (values: "
            f"{', '.join(rows)})"
        )
    for each in rows if value is None else [value]:
        yield f"@{feature}={each}", rows[each]


def _constant_rules(config: GateConfig, measured: Mapping[str, Any]) -> Iterator[Rule]:
    """Yield the rule that requires the model to be significantly better than the best constant."""
    # Evaluations of earlier versions, and of a metric without a constant, do not have this entry.
    constant = measured.get("constant") or {}
    if config.constant == "reported" or not (paired := constant.get("paired")):
        return
    metric, bound = paired["metric"], paired["bound"]
    yield Rule(
        metric=f"{metric}_over_constant",
        bound="min" if paired["better"] == "higher" else "max",
        threshold=0.0,
        value=math.nan if bound is None else bound,
        key=CONSTANT,
        found={
            "metric": metric,
            "own": measured["metrics"].get(metric),
            "other": paired["constant"],
            "answer": constant["answer"],
            **{name: paired[name] for name in ("difference", "confidence", "examples")},
            "needed": count_required_examples(paired, 0.0),
        },
    )


def _against_champion(
    config: GateConfig, measured: Mapping[str, Any], champion: Mapping[str, Any]
) -> Iterator[Rule]:
    if not champion:
        return
    if champion["incomparable"]:
        note = f"{champion['uri']}: {champion['incomparable']}; give this model another name"
        yield Rule(
            metric="comparable", bound="min", threshold=1, value=0, key=COMPARABLE, note=note
        )
        return
    paired = champion["paired"]
    metric, value = paired["metric"], champion["metrics"].get(paired["metric"])
    margin, note = _margin(config.champion, paired, value, measured.get("constant") or {})
    higher, bound = paired["better"] == "higher", None if value is None else paired["bound"]
    yield Rule(
        metric=f"{metric}{DIFFERENCE}",
        bound="min" if higher else "max",
        threshold=-margin if higher else margin,
        value=math.nan if bound is None else bound,
        key=MARGIN,
        note=note,
        found={
            **{name: paired[name] for name in ("metric", "difference", "confidence", "examples")},
            "own": measured["metrics"].get(metric),
            "other": value,
            "needed": count_required_examples(paired, margin),
        },
    )
    yield from _class_rules(champion, paired["confidence"])


def _margin(
    rule: ChampionRule, paired: Mapping[str, Any], value: Any, constant: Mapping[str, Any]
) -> tuple[float, str]:
    if not rule.share or value is None:
        return rule.compute_margin(0.0), ""
    metric = paired["metric"]
    best = (constant.get("metrics") or {}).get(metric)
    nothing = f"so the margin of {rule.margin} counts as 0"
    if best is None:
        return 0.0, f"the {metric} of a constant prediction is unknown, {nothing}"
    gain = value - best if paired["better"] == "higher" else best - value
    if gain <= 0:
        return 0.0, f"the champion does not beat a constant, {nothing}"
    return rule.compute_margin(gain), ""


def _class_rules(champion: Mapping[str, Any], confidence: float) -> Iterator[Rule]:
    """Yield a rule that limits the loss of recall, for the class with the largest possible loss."""
    rows = [each for each in champion.get("classes", ()) if each["judged"] or each["lost"]]
    if not rows:
        return
    worst, lost = rows[0], champion["class_counts"]["lost"]
    others = [
        f"{shorten_name(each['label'])} ({each['own']:.3g}, champion {each['champion']:.3g})"
        for each in rows[1 : min(lost, _FEW)]
    ]
    if lost > _FEW:
        others.append(f"{lost - _FEW} more")
    yield Rule(
        metric=f"recall{DIFFERENCE}@label={worst['label']}",
        bound="min",
        threshold=-worst["margin"],
        value=worst["bound"],
        key=CLASS_MARGIN,
        note=f"other classes that may be worse: {', '.join(others)}" if lost > 1 else "",
        found={
            **{"metric": "recall", "label": worst["label"], "confidence": confidence},
            **{"own": worst["own"], "other": worst["champion"], "examples": worst["examples"]},
            **{"difference": worst["own"] - worst["champion"], "needed": 0},
        },
    )


def count_required_examples(paired: Mapping[str, Any], margin: float) -> int:
    """Return the number of examples that would prove that the loss is within the margin.

    Returns 0 if there are already enough, or if more examples would not help.
    """
    found, bound, count = paired["difference"], paired["bound"], paired["examples"]
    if found is None or bound is None:
        return 0
    lost, at_most = (-found, -bound) if paired["better"] == "higher" else (found, bound)
    # Assume that the models are equal or, without a margin, that the true gain is the measured one.
    distance = margin if margin > 0 else margin - lost
    if not lost <= margin <= at_most or not distance > 0:
        return 0
    # Compute the number of examples with which this model would pass in nine of ten cases if the
    # variance stayed the same.
    sure, power = (NormalDist().inv_cdf(each) for each in (paired["confidence"], 0.9))
    error = (at_most - lost) / sure if sure else math.inf
    times = ((sure + power) * error / distance) ** 2
    # Suggest no number that is much larger, because the difference may be due to chance.
    if not 1 < times < _MOST_TIMES:
        return 0
    return int(round(count * times, 1 - math.floor(math.log10(count * times))))


def _value(metric: str, key: str, metrics: Mapping[str, Any]) -> float:
    if metric not in metrics:
        hint = present_name(metric, metrics)
        known = ", ".join(sorted(metrics)) or "nothing"
        raise ConfigError(f"{key}: {metric!r} was not measured{hint} (measured: {known})")
    value = metrics[metric]
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(
            f"{key}: {metric!r} is {value!r}, which cannot be compared with a threshold"
        )
    return float(value)


def publish_json(
    tree: Mapping[str, Any], uri: str, *, kind: str, fields: Mapping[str, Any]
) -> storage.Manifest:
    """Publish a directory with the single file `<kind>.json`. Raises like `storage.publish`."""
    with tempfile.TemporaryDirectory(prefix=f"{kind}-") as folder:
        text = json.dumps(tree, indent=2, ensure_ascii=False, allow_nan=False)
        Path(folder, f"{kind}.json").write_text(text + "\n", encoding="utf-8")
        return storage.publish(Path(folder), uri, kind=kind, fields=fields)


def row(rule: Rule) -> dict[str, Any]:
    """Return a rule as JSON."""
    value = rule.value if math.isfinite(rule.value) else None
    return {**asdict(rule), "value": value, "passed": rule.passed}

"""Registration: verifies a published model, registers it and promotes it.

The decision is a published directory with `registration.json`:

    {"decision": "promoted" | "refused", "headline", "reasons": [one line each],
     "rules": [as in decision.json], "version", "promotion", "model": URI,
     "predecessor": URI of the previous champion or "", "lineage"}

A model is registered only if it passes every rule. Every promotion, by a run or by a person, is
announced to the trackers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flotilla.trainer import signing, storage
from flotilla.trainer.config.schema import Config
from flotilla.trainer.features.class_names import are_same
from flotilla.trainer.promotion import registry
from flotilla.trainer.promotion.gate import COMPARABLE, Decision, Rule, publish_json, row
from flotilla.trainer.report.headline import (
    CLASS_MARGIN,
    CONSTANT,
    EXPORTED,
    MARGIN,
    headline,
)
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.runtime.json_records import parse_record
from flotilla.trainer.tracking import addresses, promotions
from flotilla.trainer.tracking.promotions import PromotedModel, is_champion_known

KIND = "registration"
PROMOTED = "promoted"
REFUSED = "refused"
_MEGABYTE = 1 << 20
# Fields of the lineage that trackers receive in addition to the metrics.
_TRACKED = ("run_id", "dataset", "commit", "image")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Registration:
    """The result of a registration. `version` and `promotion` are 0 if the model was refused."""

    uri: str
    promoted: bool
    headline: str
    reasons: tuple[str, ...]
    version: int
    promotion: int


@dataclass(frozen=True, kw_only=True)
class Request:
    """A model to register, with the URIs of the registry's root, the model and the result.

    `by` is the run or the person that requests the registration. `compare` applies the rules of the
    gate to the model and another champion, and returns the decision.
    """

    config: Config
    root: str
    model: str
    output: str
    lineage: Mapping[str, Any]
    by: str
    compare: Callable[[registry.Version], Decision]


def register(request: Request, scratch: Path) -> Registration:
    """Check, register and promote a model, or return the earlier result. Raises `UserError`."""
    if storage.is_published(request.output):
        return _read(request.output)
    while True:
        try:
            return _register(request, scratch)
        except registry.PromotionLostError as lost:
            # Another run's model was promoted first, so try again. The loop ends once no other run
            # interferes.
            _log.info("%s; now comparing the model with the new champion", lost)


def _register(request: Request, scratch: Path) -> Registration:
    root, name = request.root, request.config.name
    after, champion = registry.newest(root, name), registry.champion(root, name)
    ours = champion is not None and registry.find_source(champion) == request.model
    rules: tuple[Rule, ...] = ()
    with storage.check_form(f"the manifest of {request.model}"):
        decided = _read_decision(storage.read_manifest(request.model).fields["decision"])
    lineage = {**request.lineage, "measured": decided.get("measured") or {}}
    if not ours:
        with storage.check_form(f"the exported model {request.model}"):
            rules = tuple(_rules(request, champion))
        if champion:
            further, known = _compare_again(request, champion)
            rules, lineage = (*rules, *further), {**lineage, **known}
    tree = {
        "reasons": [str(each) for each in rules if not each.passed],
        "rules": [row(each) for each in rules],
        "version": 0,
        "promotion": 0,
        "model": request.model,
        "predecessor": champion.uri if champion else "",
        "lineage": lineage,
    }
    if tree["reasons"]:
        return _publish(request, decided, tree)
    made = registry.register(root, name, request.model, lineage=lineage, scratch=scratch)
    try:
        if not ours:
            # Skip the promotion if an earlier attempt already promoted the model.
            after = registry.promote(root, name, made.number, after=after, by=request.by).number
    except registry.PromotionLostError:
        # An earlier attempt may have promoted the model, but died before it published the result.
        last = registry.promotions(root, name)[-1]
        if (last.version, last.by) != (made.number, request.by):
            raise
        after = last.number
    return _publish(request, decided, {**tree, "version": made.number, "promotion": after})


def _compare_again(
    request: Request, champion: registry.Version
) -> tuple[tuple[Rule, ...], dict[str, Any]]:
    """Return the rules of comparisons that the gate did not make, and lineage fields from them.

    Small losses add up over many runs. Therefore the model is also compared with an earlier
    champion: the last one with a proven gain.
    """
    decision = storage.read_manifest(request.model).fields["decision"]
    seen = storage.read_manifest(decision).fields
    rules: tuple[Rule, ...] = ()
    lineage: dict[str, Any] = {}
    gained = seen.get("gained", False)
    if champion.uri != seen.get("champion", ""):
        decided = request.compare(champion)
        # Leave out the comparison with the constant, which does not depend on the champion.
        rules = tuple(each for each in decided.rules if each.key != CONSTANT)
        gained, lineage["decision"] = decided.gained, decided.uri
        lineage["measured"] = dict(decided.measured)
    reference = registry.reference(request.root, request.config.name, champion)
    if reference:
        decided = request.compare(reference)
        rules, gained = (*rules, *_reference_rules(decided, reference)), decided.gained
    if not gained:
        lineage["reference"] = (reference or champion).number
    return rules, lineage


def _reference_rules(decided: Decision, reference: registry.Version) -> Iterator[Rule]:
    name = f"version {reference.number}"
    for rule in decided.rules:
        if rule.key in {MARGIN, CLASS_MARGIN, COMPARABLE}:
            note = f"{rule.note}; no gain has been proved since {name}".removeprefix("; ")
            yield replace(rule, note=note, found={**rule.found, "opponent": name})


def _rules(request: Request, champion: registry.Version | None) -> Iterator[Rule]:
    manifest = signing.verify(request.model)
    parity = storage.read_json(request.model, "parity.json")
    for form, found in parity["formats"].items():
        value, limit = found["max_difference"], found["tolerance"]
        if "metric" in found:
            # Always allow one different prediction. For few examples, one may exceed the tolerance.
            value = found["lost"]
            limit = max(limit, 1 / found["examples"])
        yield _at_most(f"{EXPORTED}{form}", value, limit, "its tolerance")
    count, wanted = len(registry.read_labels(request.model)), manifest.fields["num_labels"]
    note = "" if count == wanted else f"labels.txt has {count} lines, but there are {wanted} labels"
    yield _yes("labelled", count == wanted, "the model's", note)
    limits = request.config.registry
    if limits.max_megabytes:
        size = manifest.total_bytes / _MEGABYTE
        yield _at_most("megabytes", size, limits.max_megabytes, "registry.max_megabytes")
    if limits.max_milliseconds:
        taken = parity["smoke"]["milliseconds"]
        yield _at_most("milliseconds", taken, limits.max_milliseconds, "registry.max_milliseconds")
    if champion:
        with storage.check_form(f"the manifest of {champion.uri}"):
            note = _changes(champion, request.model, manifest.fields)
        yield _yes("same_signature", not note, "the champion's", note)


def _changes(champion: registry.Version, model: str, now: Mapping[str, Any]) -> str:
    before, since = champion.manifest.fields, f"changed since {champion.uri}"
    positive = registry.positive_classes(before, champion.uri)
    for name, now_positive in registry.positive_classes(now, model).items():
        key, was = f"task.outputs.{name}" if name else "task", positive.get(name, now_positive)
        kinds = tuple(registry.read_kinds(each).get(name) for each in (before, now))
        if kinds == ("classification", "binary_classification"):
            return (
                f"the task{f' of {name!r}' * bool(name)} has one output, but {champion.uri} has "
                f"one for each class; set {key}.name: classification, or give this model another "
                "name"
            )
        if not are_same([was], [now_positive]):
            return (
                f"the positive class of {champion.uri} is {was!r}, but that of this model is "
                f"{now_positive!r}; set {key}.positive: {was!r}, or give this model another name"
            )
    # Skip fields that a champion of an earlier version lacks. Its labels are compared below.
    known = [key for key in ("inputs", "task", "num_labels", "labels") if key in before]
    changed = [key for key in known if before[key] != now[key]]
    there, here = registry.read_labels(champion.uri), registry.read_labels(model)
    if not changed and there != here:
        pairs = [f"{a!r} is {b!r} now" for a, b in zip(there, here, strict=False) if a != b]
        changed = ["labels" + f" ({', '.join(pairs[:3])})" * bool(pairs)]
    return f"{', '.join(changed)} {since}; give this model another name" if changed else ""


def _at_most(metric: str, value: float, limit: float, key: str) -> Rule:
    return Rule(metric=metric, bound="max", threshold=limit, value=value, key=key)


def _yes(metric: str, holds: bool, key: str, note: str) -> Rule:
    return Rule(metric=metric, bound="min", threshold=1, value=int(holds), key=key, note=note)


@dataclass(frozen=True, kw_only=True)
class _Judged:
    measured: Mapping[str, Any] | None = None
    rules: tuple[Mapping[str, Any], ...] | None = None


def _read_decision(uri: str) -> dict[str, Any]:
    try:
        tree = storage.read_json(uri, "decision.json")
    except storage.Missing:
        return {}
    if parse_record(_Judged, tree) is None:
        raise storage.Corrupt(
            f"decision.json of {uri} has fields of the wrong type; run the gate again"
        )
    return tree


def _publish(request: Request, decided: Mapping[str, Any], tree: dict[str, Any]) -> Registration:
    verdict = PROMOTED if tree["promotion"] else REFUSED
    facts = {
        "name": request.config.name,
        "version": tree["version"],
        "verdict": verdict,
        "measured": tree["lineage"]["measured"],
        "rules": [*(decided.get("rules") or ()), *tree["rules"]],
    }
    with storage.check_form(f"the decision on {request.model}"):
        tree = {"decision": verdict, "headline": headline(facts), **tree}
    fields = {"decision": verdict, "model": request.model}
    publish_json(tree, request.output, kind=KIND, fields=fields)
    return _read(request.output)


def _read(uri: str) -> Registration:
    if (kind := storage.read_manifest(uri).kind) != KIND:
        raise UserError(f"{uri} is of kind {kind!r}, not {KIND!r}; delete it")
    tree = storage.read_json(uri, "registration.json")
    facts = {"uri": uri, "promoted": tree.get("decision") == PROMOTED}
    # A result of an earlier version has no headline.
    found = parse_record(Registration, {"headline": "", **tree, **facts})
    if found is None:
        raise storage.Corrupt(
            f"registration.json of {uri} does not contain a decision; delete {uri}"
        )
    return found


def announce(root: str, name: str, number: int, hub: str) -> None:
    """Announce the promotion of a version to the trackers. `hub` is `registry.hub`, or empty."""
    at = addresses.find_hub(hub)
    if not (at or addresses.is_tracked()):
        return
    # Read the current champion, because a run may be resumed long after its promotion.
    champion = registry.champion_number(root, name)

    def describe(version: registry.Version) -> PromotedModel:
        origin = version.manifest.fields.get("lineage", {})
        numbers = {f"test_{key}": value for key, value in origin.get("metrics", {}).items()}
        return PromotedModel(
            name=name,
            version=version.number,
            uri=version.uri,
            run_id=str(origin.get("run_id", "")),
            is_champion=champion == version.number,
            properties={**{key: origin.get(key) for key in _TRACKED}, **numbers},
        )

    promotions.announce(
        describe(registry.version(root, name, number)),
        at,
        lambda: [describe(each) for each in registry.versions(root, name)],
    )


def announce_again(root: str, name: str) -> None:
    """Announce the champion to MLflow if MLflow has another one. May raise the client's errors."""
    if not addresses.is_tracked() or not (champion := registry.champion_number(root, name)):
        return
    uri = registry.version(root, name, champion).uri
    if not is_champion_known(name, uri):
        announce(root, name, champion, "")

"""What the pods of a TFJob ask for, role by role, from its manifest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from kubernetes.utils.quantity import parse_quantity

Tree = dict[str, Any]
Amounts = Mapping[str, Decimal]


@dataclass(frozen=True, kw_only=True)
class Role:
    """The pods of one role.

    Attributes:
        name: as the operator calls it.
        count: how many there are.
        requests: what the scheduler sets aside for one.
        limits: the most that one may use.
        pod: the specification of one.
    """

    name: str
    count: int
    requests: Amounts
    limits: Amounts
    pod: Tree


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """What a namespace lays below the pods that name nothing (`LimitRange`)."""

    requests: Mapping[str, str]
    limits: Mapping[str, str]


NO_DEFAULTS = Defaults(requests={}, limits={})


def roles(manifest: Tree, defaults: Defaults = NO_DEFAULTS) -> list[Role]:
    """Return the roles of a TFJob, with what Kubernetes adds to what they say."""
    found = []
    for name, replica in manifest["spec"]["tfReplicaSpecs"].items():
        pod = replica["template"]["spec"]
        resources = pod["containers"][0].get("resources", {})
        limits = resources.get("limits", {})
        # Whoever names a limit alone asks for as much.
        requests = {**defaults.requests, **limits, **resources.get("requests", {})}
        found.append(
            Role(
                name=name,
                count=replica["replicas"],
                requests=_amounts(requests),
                limits=_amounts({**defaults.limits, **limits}),
                pod=pod,
            )
        )
    return found


def defaults_of(limit_ranges: Iterable[Tree]) -> Defaults:
    """Return what the LimitRanges of a namespace give to containers."""
    requests: dict[str, str] = {}
    limits: dict[str, str] = {}
    for limit_range in limit_ranges:
        for each in limit_range["spec"].get("limits", []):
            if each.get("type") == "Container":
                limits |= each.get("default", {})
                requests |= {**each.get("default", {}), **each.get("defaultRequest", {})}
    return Defaults(requests=requests, limits=limits)


def amount(text: object) -> Decimal:
    """Return what a quantity such as `500m` or `2Gi` stands for."""
    return Decimal(parse_quantity(str(text)))


def written(number: Decimal) -> str:
    """Write an amount as Kubernetes reads it: whole, in thousandths, or in binary units."""
    if number != number.to_integral_value():
        return f"{int((number * 1000).to_integral_value(rounding='ROUND_CEILING'))}m"
    whole = int(number)
    for unit, size in (("Gi", 2**30), ("Mi", 2**20), ("Ki", 2**10)):
        if whole and whole % size == 0:
            return f"{whole // size}{unit}"
    return str(whole)


def _amounts(texts: Mapping[str, str]) -> Amounts:
    return {name: amount(text) for name, text in texts.items()}

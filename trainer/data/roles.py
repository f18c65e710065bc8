"""Roles of features, as configured in the data section. Does not import TensorFlow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flotilla.trainer.runtime.errors import ConfigError, nearest

MOST_NAMED = 20


@dataclass(frozen=True, kw_only=True)
class Roles:
    """Names of features by role: `targets` are predicted; `weight` and `group` may be empty."""

    inputs: tuple[str, ...]
    targets: tuple[str, ...]
    weight: str = ""
    group: str = ""


def format_names(features: Iterable[str]) -> str:
    """Format the names of features for a message; a long list is truncated."""
    every = list(features)
    more = f" and {len(every) - MOST_NAMED} more" if len(every) > MOST_NAMED else ""
    return ", ".join(every[:MOST_NAMED]) + more


def find(
    key: str, wanted: Sequence[str], names: Iterable[str], where: str, what: str = "feature"
) -> tuple[str, ...]:
    """Return the features that `data.KEY` names; an outer name selects all features below it."""
    known = list(names)
    found: dict[str, None] = {}
    for each in wanted:
        inner = below(each, known)
        if not inner:
            hint = nearest(each, known) or f" (one of {format_names(known)})"
            raise ConfigError(f"data.{key}: there is no {what} {each!r} in {where}{hint}")
        found.update(dict.fromkeys(inner))
    return tuple(found)


def find_one(key: str, wanted: str, names: Iterable[str], where: str, what: str = "feature") -> str:
    """Return the one feature that `data.KEY` names; empty if the key is empty."""
    found = find(key, [wanted] if wanted else [], names, where, what)
    if len(found) > 1:
        raise ConfigError(
            f"data.{key}: {wanted!r} of {where} matches {format_names(found)}; name one of them"
        )
    return found[0] if found else ""


def require_apart(name: str, roles: Roles) -> None:
    """Raise `ConfigError` if a label also has another role."""
    others = {"inputs": roles.inputs, "weight": (roles.weight,), "group": (roles.group,)}
    for key, features in others.items():
        if both := [each for each in roles.targets if each in features]:
            raise ConfigError(
                f"data.{key}: {both[0]!r} of {name} is also its label; set data.label to another "
                "feature, or remove it from one of the two"
            )


def below(key: str, leaves: list[str]) -> list[str]:
    """Return the feature named `key` if it exists, else all features below it, such as `a/b`."""
    return [key] if key in leaves else [leaf for leaf in leaves if leaf.startswith(f"{key}/")]

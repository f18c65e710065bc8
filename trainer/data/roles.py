"""Roles of features in the data section. This module does not import TensorFlow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.runtime.errors import ConfigError, nearest

MOST_NAMED = 20
LABELS = ("label", "target")


@dataclass(frozen=True, kw_only=True)
class Roles:
    """Names of features by role. Models predict `targets`. `weight` and `group` may be empty."""

    inputs: tuple[str, ...]
    targets: tuple[str, ...]
    weight: str = ""
    group: str = ""


def format_names(names: Iterable[str], most: int = MOST_NAMED) -> str:
    """Format up to `most` names for a message, followed by the number of omitted names."""
    every = list(names)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + more


def find(
    key: str, wanted: Sequence[str], names: Iterable[str], where: str, what: str = "feature"
) -> tuple[str, ...]:
    """Return the features named by `data.KEY`. `a` selects `a/b` and `a/c` if there is no `a`."""
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
    """Return the one feature that `data.KEY` names, or an empty string if the key is empty."""
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
                f"data.{key}: {both[0]!r} of {name} is also its label; remove it from data.{key}, "
                "or set data.label to another feature"
            )


def below(key: str, leaves: list[str]) -> list[str]:
    """Return the feature `key` if it exists, otherwise all features below it, as `a/b` for `a`."""
    return [key] if key in leaves else [leaf for leaf in leaves if leaf.startswith(f"{key}/")]


@dataclass(frozen=True, kw_only=True)
class ColumnRoles(Roles):
    """Roles of columns, and the columns that splits depend on. `kept` are all columns to read."""

    kept: tuple[str, ...]
    split: str = ""
    time: str = ""
    split_group: str = ""


def assign(
    config: DataConfig, names: Sequence[str], where: str = "", index: Sequence[str] = ()
) -> ColumnRoles:
    """Choose the roles of columns. With `data.map`, only the function's results have roles.

    Columns in `index` are left out unless a key names them. `where` is used in messages. Raises
    `ConfigError` if a key names a missing column, or no label can be inferred.
    """
    where, column = where or config.source, "column"
    # Reject "", which means "no column" for a role, and NUL, which ends names in TensorFlow Lite.
    if odd := [name for name in names if not name or "\0" in name]:
        what = f"named {odd[0]!r}" if odd[0] else "without a name"
        raise ConfigError(f"data.source: {where} has a column {what}; rename it")
    by = {
        role: find_one(f"splits.{key}", getattr(config.splits, key), names, where, column)
        for role, key in (("split", "column"), ("time", "time"), ("split_group", "group"))
    }
    dropped = find("drop", config.drop, names, where, column)
    left = [name for name in names if name not in dropped]
    if config.map:
        return ColumnRoles(inputs=(), targets=(), kept=tuple(left), **by)
    one = {
        key: find_one(key, getattr(config, key), names, where, column)
        for key in ("weight", "group")
    }
    find("types", list(config.types), names, where, column)
    left = [name for name in left if name not in index or name in config.types]
    targets = find("label", config.label, names, where, column) or _guess_label(config, left)
    inputs = find("inputs", config.inputs, names, where, column)
    if not inputs:
        taken = {*targets, *one.values(), *by.values()}
        inputs = tuple(name for name in left if name not in taken)
    used = [*inputs, *targets, *one.values(), *by.values()]
    # Do not split by a group that is an input, because its values in test would all be unknown.
    if not any(by.values()) and one["group"] not in inputs:
        by["split_group"] = one["group"]
    kept = tuple(name for name in names if name in left or name in used)
    found = ColumnRoles(inputs=inputs, targets=targets, **one, **by, kept=kept)
    _check(config, found, dropped)
    return found


def _guess_label(config: DataConfig, left: Sequence[str]) -> tuple[str, ...]:
    found = [name for word in LABELS for name in left if name.lower() == word]
    if found:
        return (found[0],)
    hint = f", perhaps {left[-1]!r} (one of {format_names(left)})" if left else ""
    raise ConfigError(
        f"data.label: {config.source} has no column 'label' or 'target'; set data.label to the "
        f"column to predict{hint}"
    )


def _check(config: DataConfig, roles: ColumnRoles, dropped: Sequence[str]) -> None:
    if not roles.inputs:
        raise ConfigError(f"data.inputs: {config.source} has no column left to predict from")
    require_apart(config.source, roles)
    used = {
        "inputs": roles.inputs, "label": roles.targets,
        "weight": (roles.weight,), "group": (roles.group,),
    }  # fmt: skip
    for key, names in used.items():
        if both := [name for name in names if name in dropped and getattr(config, key)]:
            raise ConfigError(
                f"data.drop: {both[0]!r} is also in data.{key}; remove it from one of them"
            )

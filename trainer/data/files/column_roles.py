"""What the columns of files are for, by the configuration and by their names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.config.data import DataConfig
from trainer.data.features import Roles
from trainer.errors import ConfigError, nearest

LABELS = ("label", "target")
_NAMED = 30


@dataclass(frozen=True, kw_only=True)
class ColumnRoles(Roles):
    """Roles, and what splits are drawn by; `kept` are all columns that are read."""

    kept: tuple[str, ...]
    split: str = ""
    time: str = ""
    split_group: str = ""


def assign(config: DataConfig, names: Sequence[str]) -> ColumnRoles:
    """Choose the roles of columns; with `data.map`, which roles are named after, there are none.

    Raises:
        ConfigError: a key names no column, or no label can be told.
    """
    by = {
        key: _one(f"data.splits.{key}", getattr(config.splits, key), names)
        for key in ("column", "time", "group")
    }
    dropped = _several("data.drop", config.drop, names)
    left = [name for name in names if name not in dropped]
    if config.map:
        split = {"split": by["column"], "time": by["time"], "split_group": by["group"]}
        return ColumnRoles(inputs=(), targets=(), kept=tuple(left), **split)
    one = {key: _one(f"data.{key}", getattr(config, key), names) for key in ("weight", "group")}
    _several("data.types", list(config.types), names)
    targets = _several("data.label", config.label, names) or _by_name(config, left)
    inputs = _several("data.inputs", config.inputs, names)
    if not inputs:
        taken = {*targets, *one.values(), *by.values()}
        inputs = [name for name in left if name not in taken]
    _check(config, inputs, targets, dropped, one)
    used = [*inputs, *targets, *one.values(), *by.values()]
    return ColumnRoles(
        inputs=tuple(inputs),
        targets=tuple(targets),
        **one,
        split=by["column"],
        time=by["time"],
        split_group=by["group"] or ("" if by["time"] or by["column"] else one["group"]),
        kept=tuple(name for name in names if name in left or name in used),
    )


def _by_name(config: DataConfig, left: Sequence[str]) -> list[str]:
    found = [name for word in LABELS for name in left if name.lower() == word]
    if found:
        return found[:1]
    raise ConfigError(
        f"data.label: {config.source} has no column 'label' or 'target'; set data.label to the "
        f"column that is to be predicted, perhaps {left[-1] if left else ''!r} (one of "
        f"{_listed(left)})"
    )


def _check(
    config: DataConfig,
    inputs: Sequence[str],
    targets: Sequence[str],
    dropped: Sequence[str],
    one: dict[str, str],
) -> None:
    if not inputs:
        raise ConfigError(f"data.inputs: nothing is left of {config.source} to predict from")
    for key, names in (("inputs", inputs), ("weight", [one["weight"]]), ("group", [one["group"]])):
        if both := [name for name in names if name in targets]:
            raise ConfigError(
                f"data.{key}: {both[0]!r} of {config.source} is the label as well; take it out of "
                "one of the two"
            )
    roles = {"inputs": inputs, "label": targets, **{key: [name] for key, name in one.items()}}
    for key, names in roles.items():
        if both := [name for name in names if name in dropped and getattr(config, key)]:
            raise ConfigError(
                f"data.drop: {both[0]!r} is in data.{key}; take it out of one of the two"
            )


def _several(key: str, wanted: Sequence[str], names: Sequence[str]) -> list[str]:
    found: dict[str, None] = {}
    for each in wanted:
        below = [name for name in names if name == each or name.startswith(f"{each}/")]
        if not below:
            hint = nearest(each, names) or f" (one of {_listed(names)})"
            raise ConfigError(f"{key}: there is no column {each!r}{hint}")
        found.update(dict.fromkeys(below))
    return list(found)


def _one(key: str, wanted: str, names: Sequence[str]) -> str:
    found = _several(key, [wanted] if wanted else [], names)
    if len(found) > 1:
        raise ConfigError(f"{key}: {wanted!r} is {_listed(found)}; name one of them")
    return found[0] if found else ""


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more

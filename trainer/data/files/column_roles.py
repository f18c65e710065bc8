"""Roles of columns, from the configuration and column names. Does not import TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.data.roles import Roles, find, find_one, format_names, require_apart
from flotilla.trainer.runtime.errors import ConfigError

LABELS = ("label", "target")


@dataclass(frozen=True, kw_only=True)
class ColumnRoles(Roles):
    """Roles of columns, and the columns that splits depend on; `kept` are all columns to read."""

    kept: tuple[str, ...]
    split: str = ""
    time: str = ""
    split_group: str = ""


def assign(
    config: DataConfig, names: Sequence[str], where: str = "", index: Sequence[str] = ()
) -> ColumnRoles:
    """Choose the roles of columns. With `data.map`, only the function's results have roles.

    Columns in `index` are left out unless a key names them; `where` is used in messages.

    Raises:
        ConfigError: a key names a missing column, or no label can be inferred.
    """
    where, column = where or config.source, "column"
    # Reject "", which means "no column" for a role, and NUL, which ends names in TensorFlow Lite.
    if odd := [name for name in names if not name or "\0" in name]:
        what = f"named {odd[0]!r}" if odd[0] else "without a name"
        raise ConfigError(f"data.source: {where} has a column {what}; rename it")
    by = {
        key: find_one(f"splits.{key}", getattr(config.splits, key), names, where, column)
        for key in ("column", "time", "group")
    }
    dropped = find("drop", config.drop, names, where, column)
    left = [name for name in names if name not in dropped]
    if config.map:
        split = {"split": by["column"], "time": by["time"], "split_group": by["group"]}
        return ColumnRoles(inputs=(), targets=(), kept=tuple(left), **split)
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
    found = ColumnRoles(
        inputs=inputs,
        targets=targets,
        **one,
        split=by["column"],
        time=by["time"],
        # Do not group by an id that is an input: every test example would have an unknown id.
        split_group=by["group"]
        or ("" if by["time"] or by["column"] or one["group"] in inputs else one["group"]),
        kept=tuple(name for name in names if name in left or name in used),
    )
    _check(config, found, dropped)
    return found


def _guess_label(config: DataConfig, left: Sequence[str]) -> tuple[str, ...]:
    found = [name for word in LABELS for name in left if name.lower() == word]
    if found:
        return (found[0],)
    raise ConfigError(
        f"data.label: {config.source} has no column 'label' or 'target'; set data.label to the "
        f"column to predict, perhaps {left[-1] if left else ''!r} (one of {format_names(left)})"
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

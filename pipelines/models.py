"""`flotilla models`: what the registry holds, and who is champion."""

from __future__ import annotations

import getpass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from pipelines.cli.commands import print_json
from pipelines.cli.display import Terminal, shown_place
from trainer import storage
from trainer.errors import DONE, ConfigError, nearest
from trainer.promotion import registry
from trainer.report.report import figure

_ACCURACY = "accuracy"


def root_of(root: str, workdir: Path) -> str:
    """Return the URI that a person named, or that of the folder of local runs."""
    return root or storage.uri_of(workdir)


def list_(root: str, name: str, *, as_json: bool) -> int:
    """Show every version of one model, or of all."""
    wanted = [_known(root, name)] if name else registry.names(root)
    table = Table(box=None, pad_edge=False)
    for title in ("model", "version", "champion", "accuracy", "global step", "registered", "run"):
        table.add_column(title, overflow="fold")
    rows = [row for each in wanted for row in _rows(root, each)]
    for row in rows:
        table.add_row(
            escape(row["name"]),
            str(row["version"]),
            "champion" if row["champion"] else "",
            figure(row["metrics"].get(_ACCURACY)),
            str(row["global_step"]),
            row["created"],
            escape(row["run_id"]),
        )
    Terminal().print(table if rows else f"no model is registered below {root}")
    if as_json:
        print_json({"status": "done", "models": rows})
    return DONE


def show(root: str, name: str, number: int, *, as_json: bool) -> int:
    """Show one version, the champion where no number is given, with its lineage and promotions."""
    _known(root, name)
    found = registry.version(root, name, number) if number else registry.champion(root, name)
    if found is None:
        raise ConfigError(f"{name} has no champion below {root}; name a version")
    row = _row(name, found, registry.champion_number(root, name))
    lineage = found.manifest.fields["lineage"]
    made = [
        {"promotion": each.number, "version": each.version, "by": each.by, "created": each.created}
        for each in registry.promotions(root, name)
    ]
    table = Table(box=None, pad_edge=False, show_header=False)
    told = {**row, **lineage, "where": shown_place(found.uri)}
    for key, value in told.items():
        table.add_row(key.replace("_", " "), escape(figure(value)))
    terminal = Terminal()
    terminal.print(table)
    for each in made:
        said = f"promotion {each['promotion']}: version {each['version']} by {each['by']}"
        terminal.print(f"{said}, {each['created']}", markup=False)
    if as_json:
        summary = {**row, "lineage": lineage, "promotions": made}
        artifacts = {"model": found.uri}
        print_json({"status": "done", "model": summary, "artifacts": artifacts})
    return DONE


def promote(root: str, name: str, number: int, *, as_json: bool) -> int:
    """Make a version the champion."""
    _known(root, name)
    after = registry.newest(root, name)
    made = registry.promote(root, name, number, after=after, by=_person())
    return _told(name, made, as_json=as_json)


def rollback(root: str, name: str, *, as_json: bool) -> int:
    """Make the version before the champion the champion again."""
    _known(root, name)
    return _told(name, registry.rollback(root, name, by=_person()), as_json=as_json)


def _told(name: str, made: registry.Promotion, *, as_json: bool) -> int:
    Terminal().print(f"{name}: version {made.version} is champion (promotion {made.number})")
    if as_json:
        print_json({"status": "done", "version": made.version, "promotion": made.number})
    return DONE


def _known(root: str, name: str) -> str:
    found = registry.names(root)
    if name not in found:
        hint = nearest(name, found) or (f" (there is {', '.join(found)})" if found else "")
        raise ConfigError(f"no model {name!r} is registered below {root}{hint}")
    return name


def _rows(root: str, name: str) -> list[dict[str, Any]]:
    champion = registry.champion_number(root, name)
    return [_row(name, each, champion) for each in registry.versions(root, name)]


def _row(name: str, version: registry.Version, champion: int) -> dict[str, Any]:
    lineage = version.manifest.fields["lineage"]
    return {
        "name": name,
        "version": version.number,
        "champion": champion == version.number,
        "metrics": lineage["metrics"],
        "global_step": version.manifest.fields["global_step"],
        "created": version.manifest.created,
        "run_id": lineage["run_id"],
    }


def _person() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        # A container may run as a number without a name.
        return "a person"

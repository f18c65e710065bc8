"""Versions of which retention removes the files; what later runs read of them stays.

Below `<root>/registry/models/NAME`:

    retired/000003.json           the lineage of a version that is removed, written before it goes
    promoting/000003-TOKEN.json   a promotion of that version is being made

A promotion writes its mark and then looks whether the version is retired; a removal writes the
record of the lineage and then looks for marks and promotions. Of two at the same time at least one
sees the other.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from trainer import storage
from trainer.errors import UserError
from trainer.json_records import parse_mapping

# A promotion, or a removal, that takes longer was killed.
_SECONDS = 3600.0


def lineages(home: str) -> dict[int, Mapping[str, Any]]:
    """Return the lineage of each version below the model's URI that was, or is being, removed."""
    found = {}
    for name in storage.names(storage.join(home, "retired")):
        number = name.removesuffix(".json")
        if number.isdigit():
            tree = _tree(storage.join(home, "retired", name))
            found[int(number)] = tree.get("lineage", {})
    return found


def retire(home: str, number: int, lineage: Mapping[str, Any]) -> None:
    """Keep the lineage of a version; from now on it cannot be promoted."""
    tree = {"version": number, "at": time.time(), "lineage": dict(lineage)}
    storage.write_bytes(_record(home, number), json.dumps(tree).encode())


def restore(home: str, number: int) -> None:
    """Take `retire` back: the version stays."""
    storage.delete(_record(home, number))


@contextmanager
def promoting(home: str, number: int) -> Iterator[None]:
    """Keep a version from being removed in this block; raises `UserError` if it is retired."""
    mark = storage.join(home, "promoting", f"{number:06d}-{secrets.token_hex(8)}.json")
    storage.write_bytes(mark, json.dumps({"at": time.time()}).encode())
    try:
        at = _tree(_record(home, number)).get("at")
        if isinstance(at, int | float) and time.time() - at < _SECONDS:
            raise UserError(
                f"version {number} is being removed by `flotilla gc`: promote another one, or try "
                "again in an hour if it is there then"
            )
        yield
    finally:
        storage.delete(mark)


def asked_for(root: str, name: str) -> list[int]:
    """Return the versions that are being promoted."""
    above = storage.join(root, "registry", "models", name, "promoting")
    found = []
    for mark in storage.names(above):
        number = mark.partition("-")[0]
        began = _tree(storage.join(above, mark)).get("at", time.time())
        if number.isdigit() and not time.time() - began > _SECONDS:
            found.append(int(number))
    return found


def _record(home: str, number: int) -> str:
    return storage.join(home, "retired", f"{number:06d}.json")


def _tree(uri: str) -> dict[str, Any]:
    try:
        return parse_mapping(storage.read_bytes(uri))
    except (storage.Missing, storage.Corrupt, ValueError):
        return {}

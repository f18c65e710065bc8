"""A promoted model, as the second addresses of its promotion are given it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class PromotedModel:
    """One version in Flotilla's registry, which is what counts.

    Attributes:
        name: of the model.
        version: its number.
        uri: of the version in the registry.
        run_id: of the run that has made it.
        is_champion: whether it is still the champion.
        properties: numbers and texts of its lineage.
    """

    name: str
    version: int
    uri: str
    run_id: str
    is_champion: bool
    properties: Mapping[str, Any]

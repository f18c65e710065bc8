"""Rows that cannot be read: how many, and where the first ones are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trainer.data.files.formats.raw_rows import Piece
from trainer.errors import UserError

_NAMED = 3


@dataclass
class BrokenRows:
    """A count, and the first places: piece, number of the record in it, and what is wrong."""

    count: int = 0
    rows: int = 0
    places: list[tuple[Piece, int, str]] = field(default_factory=list)

    def add(self, piece: Piece, number: int, why: str) -> None:
        """Count a row."""
        self.count += 1
        if len(self.places) < _NAMED:
            self.places.append((piece, number, why))

    def merge(self, other: BrokenRows) -> None:
        """Add what was counted in a later piece."""
        self.count += other.count
        self.rows += other.rows
        self.places = (self.places + other.places)[:_NAMED]

    def first(self, place: Callable[[Piece, int], str]) -> list[str]:
        """Return the first places in words."""
        return [f"{place(piece, number)}: {why}" for piece, number, why in self.places]

    def check(self, name: str, allowed: float, place: Callable[[Piece, int], str]) -> None:
        """Raise `UserError` where more rows are broken than `allowed`, a share of all rows."""
        if not self.count or self.count <= allowed * self.rows:
            return
        where = "; ".join(self.first(place))
        limit = f"more than data.bad_rows ({allowed:g}) allows" if allowed else "none may be"
        more = f", or set data.bad_rows to {_share(self.count, self.rows)}"
        raise UserError(
            f"{name}: {self.count} of {self.rows} rows are broken, and {limit}: {where}; fix "
            f"them{more if self.count < self.rows else ''}"
        )

    def to_json(self, place: Callable[[Piece, int], str]) -> dict[str, Any]:
        """Return what a manifest says of them."""
        return {"count": self.count, "of": self.rows, "first": self.first(place)}


def _share(count: int, rows: int) -> str:
    return f"{min(0.99, max(0.001, 1.1 * count / max(1, rows))):.2g}"

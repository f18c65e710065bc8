"""How a stretch of steps is cut into the portions that the chief hands to free workers."""

from __future__ import annotations

# A portion whose worker dies is done again as a whole: as many steps may count twice.
MOST = 100
# Handing out a portion takes the chief longer than a small step takes a worker.
FEW = 5


def unit_of(steps: int, workers: int, turn: int) -> int:
    """Return of what portions of a stretch are multiples: `turn`, or 1 where steps are too few."""
    # With fewer turns than these the last of them would be most of the time.
    return turn if steps >= 4 * turn * workers else 1


def portions(steps: int, workers: int, unit: int) -> list[int]:
    """Return the sizes of the portions, larger ones first.

    A free worker gets half of its share of what is left, so that few portions are handed out and
    yet all workers end at about the same time, also where one is slower ("guided self-scheduling",
    Polychronopoulos and Kuck 1987, IEEE Transactions on Computers C-36(12)). All are
    multiples of `unit`; what is left over is a portion of its own.
    """
    smallest = max(unit, min(FEW, steps // workers), steps // (4 * workers))
    cut: list[int] = []
    left = steps
    while left >= unit:
        share = max(smallest, left // (2 * workers))
        cut.append(min(left, max(unit, min(MOST, share))) // unit * unit)
        left -= cut[-1]
    return [*cut, left] if left else cut

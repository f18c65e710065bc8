"""What a check is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

State = Literal["ok", "warn", "fail", "skipped"]
SECONDS = 10.0


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        state: `ok`; `warn`: a run may go well all the same; `fail`: it will not; `skipped`: nobody
            looked, and `message` says why.
        message: one line.
        remedy: the command that mends it, or shows more of it; empty where nothing is wrong.
    """

    state: State
    message: str
    remedy: str = ""


class Trace(Protocol):
    """What a check leaves while it looks, and removes again."""

    def stop(self) -> None:
        """Let the check go on to its end."""

    def remove(self) -> None:
        """Remove what was left, from another thread too."""

    @property
    def is_left(self) -> bool:
        """Whether something is left."""

    @property
    def uri(self) -> str:
        """Where it stands."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing to be looked at.

    Attributes:
        name: what it is called in the report.
        look: looks; a `UserError` of it is a finding too.
        needs: names of the checks without which there is nothing to look at.
        seconds: how long it may take.
        trace: what it leaves while it looks.
        show: the command that shows more where it does not come to a finding of its own.
    """

    name: str
    look: Callable[[], Finding]
    needs: tuple[str, ...] = ()
    seconds: float = SECONDS
    trace: Trace | None = None
    show: str = ""

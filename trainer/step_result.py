"""What is said of a pipeline step that has ended, in its event and in its record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """How a pipeline step ended.

    Attributes:
        step: its name.
        status: `done`, `failed` or `interrupted`.
        exit_code: see `trainer.errors`.
        error: one line, empty where there is none.
        traceback: of an error in the user's code, else empty.
        seconds, metrics: of this try; key values for the closing table.
        uri, output: of what the step has published, its URI and its kind, or empty.
    """

    step: str
    status: str
    exit_code: int = 0
    error: str = ""
    traceback: str = ""
    seconds: float = 0.0
    metrics: Mapping[str, Any] = field(default_factory=dict)
    uri: str = ""
    output: str = ""

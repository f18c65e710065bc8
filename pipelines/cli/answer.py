"""What a command answers: the object of `--json`, and the exit code. Loads in milliseconds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.errors import DONE, INTERRUPTED


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer of a command: the keys that scripts rely on, and what the command adds.

    Attributes:
        status: see `docs/reference/command-line.md`.
        code: the exit code.
        run_id: the run, or empty.
        metrics: of the test split, where a model was evaluated.
        artifacts: URI by name.
        message: why it failed or was refused, in one line, or empty.
        more: further keys of this command.
        text: the document on standard output where the object was not asked for.
    """

    status: str = "done"
    code: int = DONE
    run_id: str = ""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    artifacts: Mapping[str, str] = field(default_factory=dict)
    message: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""

    def json(self) -> str:
        """Return the JSON object, on one line."""
        keys = ("status", "run_id", "metrics", "artifacts", "message")
        return json.dumps({key: getattr(self, key) for key in keys} | dict(self.more))


def failure(message: str, code: int, run_id: str = "") -> Answer:
    """Return the answer of a command that failed, or was interrupted."""
    status = "interrupted" if code == INTERRUPTED else "failed"
    return Answer(status=status, code=code, run_id=run_id, message=message)

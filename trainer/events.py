"""What happens in a run, as lines of JSON that a person or a program can follow while it goes on.

Every process of a run appends to the file that `FLOTILLA_EVENTS` names: steps that begin and end,
progress of training, checkpoints, incidents. Without the variable the same goes to the log.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

VARIABLE = "FLOTILLA_EVENTS"
log = logging.getLogger(__name__)


def emit(event: str, **fields: Any) -> None:
    """Append one event; `fields` have to be JSON values.

    One `write` of one line in append mode, so that lines of several processes do not mix.
    """
    line = json.dumps({"event": event, "time": round(time.time(), 3), **fields})
    path = os.environ.get(VARIABLE)
    if not path:
        log.info("%s", line)
        return
    try:
        with open(path, "ab", buffering=0) as file:
            file.write(f"{line}\n".encode())
    except OSError as error:
        # A full disk has to be reported by what cannot go on without it.
        log.warning("cannot write to %s: %s: %s", path, error.strerror, line)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a file in order; a line that is not whole is left out."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            # A full disk tears lines, and the last one may still be on its way.
            with suppress(ValueError):
                yield json.loads(line)

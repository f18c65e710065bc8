"""A run of `flotilla` in a separate process, followed through its events."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from flotilla.trainer.events import Event, newest_progress, parse

# Maximum run time on a busy machine, in seconds.
SECONDS = 900
FLOTILLA = [sys.executable, "-c", "from flotilla.pipelines.cli.__main__ import main; main()"]


def events_of(
    process: subprocess.Popen[bytes], workdir: Path, read: dict[Path, int], seconds: float = SECONDS
) -> Iterator[Event]:
    """Yield a run's events as they are written; `read` keeps the offset reached in each file."""
    deadline = time.monotonic() + seconds
    ended = False
    newest: dict[type[Event], Event] = {}
    while not ended:
        ended = process.poll() is not None
        for path in workdir.glob("*/events.jsonl"):
            with path.open("rb") as lines:
                # Skip the events that were read before; a resumed run appends to the same file.
                lines.seek(read.get(path, 0))
                whole = [line for line in lines if line.endswith(b"\n")]
            read[path] = read.get(path, 0) + sum(map(len, whole))
            yield from filter(None, (parse(line.decode("utf-8", "replace")) for line in whole))
            for progress in newest_progress(path):
                if progress != newest.get(type(progress)):
                    newest[type(progress)] = progress
                    yield progress
        if time.monotonic() > deadline:
            process.kill()
            raise TimeoutError(f"the run has not ended after {seconds:g} s; see {workdir}")
        time.sleep(0.1)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()

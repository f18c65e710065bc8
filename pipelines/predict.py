"""`flotilla predict`: which model is meant, and the process that asks it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flotilla.pipelines import models
from flotilla.trainer import events, storage
from flotilla.trainer.cluster import child_process, termination
from flotilla.trainer.events import Event
from flotilla.trainer.promotion import registry
from flotilla.trainer.runtime import signals
from flotilla.trainer.runtime.errors import USAGE, ConfigError, RunInterruptedError, UserError
from flotilla.trainer.storage.uri import require_uri

FORMS = {".csv": "csv", ".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
STANDARD_OUTPUT = "-"
_VERSION = re.compile(r"(?P<name>.+)@(?P<number>[1-9][0-9]{0,8})")
# Seconds that an interrupted process has to end by itself.
_GRACE = 5.0
_POLL = 0.1
EVENTS, _SUMMARY = "events.jsonl", "summary.json"


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What was written: `closed` where the reader of standard output went away before the end."""

    model: str
    output: str
    rows: int = 0
    skipped: int = 0
    unsound: int = 0
    seconds: float = 0.0
    closed: bool = False

    @property
    def rows_per_second(self) -> float:
        """Rows written in a second, without the time to load the model."""
        return self.rows / self.seconds if self.seconds else 0.0


def model_uri(model: str, root: str) -> str:
    """Return the URI of a model: a URI, a folder or `NAME[@VERSION]`; raises `ConfigError`."""
    if "://" in model:
        require_uri("MODEL", model)
        return model.rstrip("/") if "?" not in model else model
    if "/" in model:
        return storage.uri_of(model)
    found = _VERSION.fullmatch(model)
    name, number = (found["name"], int(found["number"])) if found else (model, 0)
    if "@" in name or not name:
        raise ConfigError(f"MODEL: {model!r} is no model: write NAME, NAME@3 or a URI")
    models.require_known(root, name)
    if number:
        return registry.version(root, name, number).uri
    champion = registry.champion(root, name)
    if champion is None:
        raise ConfigError(f"{name} has no champion below {root}; name a version, as {name}@1")
    return champion.uri


def form_of(output: str, said: str) -> str:
    """Return the form of the output, by word or by the ending of its name; raises `ConfigError`."""
    if output == STANDARD_OUTPUT:
        if said == "parquet":
            raise ConfigError("--to: parquet needs a file; name it by -o")
        return said or "jsonl"
    ending = FORMS.get(Path(output).suffix, "")
    if not ending and not said:
        raise ConfigError(
            f"-o: the name of {output} ends with none of {', '.join(FORMS)}; rename it, or say "
            "the form by --to"
        )
    return said or ending


def check_output(output: str, inputs: tuple[str, ...]) -> None:
    """Refuse an output that is a folder, or one of the inputs; raises `ConfigError`."""
    if "://" in output:
        raise ConfigError(f"-o: {output!r} is no path of this machine: write a file and copy it")
    path = Path(output)
    if os.path.isdir(path):
        raise ConfigError(f"-o: {output} is a folder; name a file in it")
    for each in inputs:
        with suppress(OSError):
            if "://" not in each and path.exists() and path.samefile(each):
                raise ConfigError(f"-o: {output} is an input as well; name another file")


def predict(request: dict[str, Any], on_event: Callable[[Event], None]) -> Prediction:
    """Answer a `Request` as JSON in a process of its own, which writes rows to standard output.

    `on_event` is called with what that process says of its work and of the data. Raises
    `UserError`, and `RunInterruptedError` at a signal: no part of the output is left.
    """
    with tempfile.TemporaryDirectory(prefix="flotilla-predict-") as name:
        folder = Path(name)
        (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
        (folder / EVENTS).touch()
        interrupts: list[int] = []
        with (
            events.Follower(folder / EVENTS) as follower,
            signals.on_interrupt(lambda: interrupts.append(1)),
        ):
            child = _started(folder)
            try:
                while child.poll() is None and not interrupts:
                    with suppress(subprocess.TimeoutExpired):
                        child.wait(_POLL)
                    for event in follower.new():
                        on_event(event)
            finally:
                child_process.end(child, _GRACE)
                _remove_part(child, request["output"])
            for event in follower.new():
                on_event(event)
        if interrupts:
            raise RunInterruptedError("interrupted; nothing of the output is left")
        if child.returncode or not (folder / _SUMMARY).exists():
            raise _failure(folder, child.returncode)
        summary = json.loads((folder / _SUMMARY).read_text(encoding="utf-8"))
        return Prediction(model=request["model"], output=request["output"], **summary)


def _started(folder: Path) -> subprocess.Popen[bytes]:
    words = ["predict", "--request", str(folder / "request.json"), "--workdir", str(folder)]
    variables = {
        events.VARIABLE: str(folder / EVENTS),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TMPDIR": str(folder),
    }
    with (folder / "stderr.log").open("wb") as log:
        # A session of its own: an interrupt reaches it once, from here, not from the terminal.
        return child_process.start(
            "flotilla.trainer", *words, variables=variables, stderr=log, start_new_session=True
        )


def _remove_part(child: subprocess.Popen[bytes], output: str) -> None:
    """Remove what a process that was ended has left of the output."""
    if output != STANDARD_OUTPUT:
        path = Path(output)
        with suppress(OSError):
            path.with_name(f".{path.name}.{child.pid}.part").unlink(missing_ok=True)


def _failure(folder: Path, code: int) -> UserError:
    message = termination.read(folder)
    if not message:
        said = child_process.failure(code, (folder / "stderr.log").read_text(errors="replace"))
        remedy = "; lower --batch-size" if code == -signal.SIGKILL else ""
        message = f"the process that predicts: {said}{remedy}"
    return ConfigError(message) if code == USAGE else UserError(message)

"""Runs `flotilla` as a separate process, and parses its log lines and JSON result."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from flotilla.components.records.step_record import step_records
from flotilla.trainer import events, storage
from flotilla.trainer.events import Event
from flotilla.trainer.events.run_state import reduce_events

FLOTILLA = Path(sys.executable).with_name("flotilla")
Kind = TypeVar("Kind", bound=Event)


@dataclass(frozen=True, kw_only=True)
class Called:
    code: int
    out: str
    err: str
    workdir: Path

    @property
    def answer(self) -> dict[str, Any]:
        [line] = self.out.splitlines()
        tree: dict[str, Any] = json.loads(line)
        return tree

    @property
    def folder(self) -> Path:
        return self.workdir / self.answer["run_id"]

    @property
    def log(self) -> str:
        return (self.folder / "pipeline.log").read_text(encoding="utf-8", errors="replace")

    def events(self, kind: type[Kind]) -> list[Kind]:
        found = events.read(self.folder / "events.jsonl")
        return [each for each in found if isinstance(each, kind)]

    def statuses(self) -> dict[str, str]:
        """Return the status of each step in the latest start of the run."""
        return {each.step: each.status for each in step_records(reduce_events(self.events(Event)))}

    def path_of(self, artifact: str) -> Path:
        path = storage.local_path(self.answer["artifacts"][artifact])
        assert path is not None
        return path

    def read(self, artifact: str, name: str) -> dict[str, Any]:
        tree: dict[str, Any] = json.loads(
            storage.read_file(self.answer["artifacts"][artifact], name)
        )
        return tree


@contextmanager
def calling(
    command: str, workdir: Path, *arguments: str, cwd: Path
) -> Iterator[subprocess.Popen[str]]:
    """Start a command with `--json`; when the block ends, end the command and its children."""
    words = [FLOTILLA, command, "--workdir", workdir, "--json", *arguments]
    pipe = subprocess.PIPE
    process = subprocess.Popen(words, cwd=cwd, stdout=pipe, stderr=pipe, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def call(command: str, workdir: Path, *arguments: str, cwd: Path) -> Called:
    with calling(command, workdir, *arguments, cwd=cwd) as process:
        out, err = process.communicate()
    return Called(code=process.returncode, out=out, err=err, workdir=workdir)


def processes_of(workdir: Path) -> list[psutil.Process]:
    """Return the processes whose command line contains the workdir."""
    found = []
    for process in psutil.process_iter():
        try:
            named = str(workdir) in " ".join(process.cmdline())
        except psutil.Error:
            continue
        if named and process.pid != os.getpid():
            found.append(process)
    return found


def setting(**values: object) -> list[str]:
    pairs = (f"{name.replace('__', '.')}={value}" for name, value in values.items())
    return [word for pair in pairs for word in ("--set", pair)]


def content(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return the modification time and content of every file below a folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}

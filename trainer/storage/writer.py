"""Who writes: what a dead process left is told from what a living one is about to finish."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path


def writer() -> str:
    """Return a text that no other process has, on any machine, in any container."""
    return f"{_machine()}/{os.getpid()}/{_begun(os.getpid())}"


def is_gone(text: str) -> bool:
    """Say whether the process of a `writer` is known to have ended.

    Nothing is known of the processes of another machine.
    """
    number, begun = _here(text)
    return bool(number) and _begun(int(number)) != begun


def is_living(text: str) -> bool:
    """Say whether the process of a `writer` is known to live, likewise."""
    number, begun = _here(text)
    return bool(number) and _begun(int(number)) == begun


def _here(text: str) -> tuple[str, str]:
    """Return the number and the beginning of a process of this machine, nothing of another."""
    machine, _, process = text.partition("/")
    number, _, begun = process.partition("/")
    return (number, begun) if machine == _machine() and number.isdigit() else ("", "")


@cache
def _machine() -> str:
    # Two containers of one machine have processes of the same number.
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return f"{boot}.{os.stat('/proc/self/ns/pid').st_ino}"


def _begun(process: int) -> str:
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # After the name, which may hold anything: state is the first field, the start the 20th.
    state, *fields = stat.rpartition(")")[2].split()
    return "" if state == "Z" else fields[18]

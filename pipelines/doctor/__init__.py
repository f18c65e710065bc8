"""The preflight check, which finds mistakes before a run requests a GPU.

A check examines one thing and returns a `Finding`: a state, a message, and a command that fixes or
explains the problem. `checks` lists the checks of a configuration. All checks run in parallel, each
with a deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from flotilla.components.kubernetes.client import RefusedError, UnreachableError
from flotilla.trainer.runtime.errors import RunInterruptedError, UserError
from flotilla.trainer.runtime.signals import handle_interrupts
from flotilla.trainer.storage.probe import Probe

State = Literal["ok", "warn", "fail", "skipped"]
SECONDS = 10.0
_REFUSED = "the API refused the request"


@dataclass(frozen=True)
class Finding:
    """The result of a check: its state, a message, and a command that fixes or explains it.

    The state `warn` means that a run may still succeed.
    """

    state: State
    message: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check.

    Attributes:
        look: runs the check. A `UserError` or an error of the Kubernetes API becomes a finding.
        needs: names of the checks that must succeed first.
        trace: the test object that the check creates and removes.
        show: the command that shows more if the check does not finish.
    """

    name: str
    look: Callable[[], Finding]
    needs: tuple[str, ...] = ()
    seconds: float = SECONDS
    trace: Probe | None = None
    show: str = ""


# Maximum time to remove the test objects of interrupted or late checks, in seconds.
TIDY_SECONDS = 8.0
# The part of `TIDY_SECONDS` in which the check may still remove its own object, in seconds.
ENDING_SECONDS = 2.0
OnFinding = Callable[[Check, Finding], None]


def examine(checks: Sequence[Check], on_finding: OnFinding) -> tuple[Finding, ...]:
    """Run all checks and return their findings, in order.

    `on_finding` is called with each check and its finding in the same order. On a signal, raises
    `RunInterruptedError` after the test objects of the checks are removed.
    """
    found: dict[str, Finding] = {}
    reported = 0
    with handle_interrupts(_make_interruption):
        while reported < len(checks):
            wave = [
                each
                for each in checks
                if each.name not in found and all(need in found for need in each.needs)
            ]
            failed = {name for name, each in found.items() if each.state in ("fail", "skipped")}
            lacking = {
                each.name: [need for need in each.needs if need in failed]
                for each in wave
                if not failed.isdisjoint(each.needs)
            }
            found |= {
                name: Finding("skipped", f"a required check did not succeed: {', '.join(needs)}")
                for name, needs in lacking.items()
            }
            found |= _side_by_side([each for each in wave if each.name not in lacking])
            while reported < len(checks) and checks[reported].name in found:
                on_finding(checks[reported], found[checks[reported].name])
                reported += 1
    return tuple(found[each.name] for each in checks)


def _make_interruption() -> None:
    raise RunInterruptedError("interrupted")


class _Look:
    """Runs one check in its own thread, which is abandoned at the deadline."""

    def __init__(self, check: Check) -> None:
        self.check = check
        self._finding: Finding | None = None
        self._until = time.monotonic() + check.seconds
        self._thread = threading.Thread(target=self._work, name=check.name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _work(self) -> None:
        try:
            self._finding = self.check.look()
        except (UserError, UnreachableError) as error:
            self._finding = Finding("fail", str(error), self.check.show)
        except RefusedError as error:
            state: State = "warn" if error.is_forbidden else "fail"
            words = "the check lacks a permission" if error.is_forbidden else _REFUSED
            self._finding = Finding(state, f"{words}: {error}", self.check.show)
        except Exception as error:
            words = " ".join(str(error).split())
            message = f"the check itself failed: {type(error).__name__}: {words}"
            self._finding = Finding("fail", message, self.check.show)

    def finding(self) -> Finding:
        self._thread.join(max(0.0, self._until - time.monotonic()))
        late = f"the check did not finish within {self.check.seconds:g} s"
        return self._finding or Finding("fail", late, self.check.show)

    def tidy(self, until: float) -> str:
        """Remove the test object of the check. Return its URI if it could not be removed."""
        trace = self.check.trace
        if trace is None:
            return ""
        trace.stop()
        if self._thread.ident is None:
            return ""
        self._thread.join(min(ENDING_SECONDS, max(0.0, until - time.monotonic())))
        if trace.is_left:
            # The check hangs in another request, so try to remove the object in a new thread.
            second = threading.Thread(target=_remove_trace, args=(trace,), daemon=True)
            second.start()
            second.join(max(0.0, until - time.monotonic()))
        return trace.uri if trace.is_left else ""


def _remove_trace(trace: Probe) -> None:
    with suppress(OSError, UserError):
        trace.remove()


def _side_by_side(checks: Sequence[Check]) -> dict[str, Finding]:
    looks = [_Look(check) for check in checks]
    try:
        for look in looks:
            look.start()
        found = {look.check.name: look.finding() for look in looks}
        left = _tidy_all(looks)
    except RunInterruptedError:
        words = "".join(f"; {uri} may still exist; delete it" for uri in _tidy_all(looks).values())
        raise RunInterruptedError(f"interrupted{words}") from None
    for name, uri in left.items():
        was = found[name]
        found[name] = Finding(
            "fail", f"{was.message}; {uri} may still exist; delete it", was.remedy
        )
    return found


def _tidy_all(looks: Sequence[_Look]) -> dict[str, str]:
    until = time.monotonic() + TIDY_SECONDS
    left = {look.check.name: look.tidy(until) for look in looks}
    return {name: uri for name, uri in left.items() if uri}

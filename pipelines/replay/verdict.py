"""Whether a step ended as it did before: the same failure, or the same figures."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from components.table import TRAIN
from trainer.step_result import StepResult

#: By so much, relative to the value, figures of the same computation may differ: other processors
#: and other numbers of threads add in another order.
TOLERANCE = 1e-5
# Of training only how far it came is the same in each run.
_REACHED = ("global_step",)
# What says where, how often or how fast, and not what was found.
_APART = ("reused", "version", "promotion", "warmed_from", "seconds", "steps_per_second")
_PLACES = (
    # Which task it was, and its log: in a debugger training has no task.
    (re.compile(r" \([a-z]+-\d+, log .*\)$"), ""),
    # Folders of one process, and names that are made anew each time.
    (re.compile(r"/[^\s:;,'\"()]*/(?=[^/\s])"), ""),
    (
        re.compile(r"\b(flotilla|prepare|export|evaluation|version|comparison)-[a-z0-9_]{8}\b"),
        r"\1",
    ),
    (re.compile(r"\b0x[0-9a-f]+\b"), "0x"),
    (re.compile(r"\b(127\.0\.0\.1|localhost):\d+\b"), r"\1"),
    (re.compile(r"\b\d+(\.\d+)? (s|seconds)\b"), r"N \2"),
)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How the replay compares.

    Attributes:
        same: whether it is the same failure, or the same figures.
        words: the comparison in one line.
        differs: by name the two values of each figure that is not the same.
    """

    same: bool
    words: str
    differs: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)


def compare(recorded: StepResult, replayed: StepResult | None) -> Verdict:
    """Compare a step on record with its replay; None where that one left no end.

    A step that was killed left none on record either, see `components.records.step_record`.
    """
    was_killed = _is_killed(recorded)
    if replayed is None:
        words = "its process was ended from within or from outside, as on record"
        if was_killed:
            return Verdict(same=True, words=f"the same failure: {words}")
        return Verdict(same=False, words=f"differs: {_said(recorded)}; here it was killed")
    if was_killed:
        return Verdict(
            same=False,
            words=f"differs: it was killed (memory, a lost node); here {_said(replayed)}",
        )
    if recorded.status != replayed.status:
        words = f"differs: on record {_said(recorded)}; here {_said(replayed)}"
        return Verdict(same=False, words=words)
    if recorded.status != "done":
        return _of_failures(recorded, replayed)
    return _of_metrics(recorded, replayed)


def _is_killed(recorded: StepResult) -> bool:
    return recorded.status == "running" or getattr(recorded, "ended", 0.0) is None


def _said(result: StepResult) -> str:
    return "it was done" if result.status == "done" else f"it {result.status}: {result.error}"


def _of_failures(recorded: StepResult, replayed: StepResult) -> Verdict:
    if _is_same_error(recorded, replayed):
        return Verdict(same=True, words=f"the same failure: {replayed.error}")
    words = f"differs: on record {recorded.error}; here {replayed.error}"
    return Verdict(same=False, words=words)


def _is_same_error(recorded: StepResult, replayed: StepResult) -> bool:
    before, now = _bare(recorded.error), _bare(replayed.error)
    if before == now:
        return True
    # Each launcher has its own words around what a task has raised.
    if recorded.step == TRAIN and now and now in before:
        return True
    raised = [_bare(each.traceback.strip().rpartition("\n")[2]) for each in (recorded, replayed)]
    return bool(raised[0]) and raised[0] == raised[1]


def _bare(text: str) -> str:
    for pattern, plain in _PLACES:
        text = pattern.sub(plain, text)
    return " ".join(text.split())


def _of_metrics(recorded: StepResult, replayed: StepResult) -> Verdict:
    names = [name for name in {**recorded.metrics, **replayed.metrics} if name not in _APART]
    pairs = {name: (recorded.metrics.get(name), replayed.metrics.get(name)) for name in names}
    differs = {name: pair for name, pair in pairs.items() if not _equal(*pair)}
    deciding = differs
    if recorded.step == TRAIN:
        deciding = {name: pair for name, pair in differs.items() if name in _REACHED}
    if not deciding:
        words = f"the same figures: {', '.join(_short(pairs)) or 'it has none'}"
        if reasons := recorded.metrics.get("reasons"):
            words = f"the same decision, {recorded.metrics.get('decision')}: {'; '.join(reasons)}"
        if differs:
            said = _pairs({name: pair for name, pair in differs.items() if _is_plain(pair[1])})
            words = f"as far as on record; training is not repeatable: {', '.join(said)}"
        return Verdict(same=True, words=words, differs=differs)
    return Verdict(same=False, words=f"differs: {', '.join(_pairs(differs))}", differs=differs)


def _short(pairs: Mapping[str, tuple[Any, Any]]) -> list[str]:
    return [f"{name} {_number(now)}" for name, (_, now) in pairs.items() if _is_plain(now)][:6]


def _pairs(differs: Mapping[str, tuple[Any, Any]]) -> list[str]:
    return [f"{name} {_number(now)} and not {_number(was)}" for name, (was, now) in differs.items()]


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float) and value != ""


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _equal(before: Any, now: Any) -> bool:
    numbers = (int, float)
    if isinstance(before, numbers) and isinstance(now, numbers):
        return math.isclose(before, now, rel_tol=TOLERANCE, abs_tol=1e-9)
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        return before.keys() == now.keys() and all(_equal(before[key], now[key]) for key in before)
    if isinstance(before, list | tuple) and isinstance(now, list | tuple):
        return len(before) == len(now) and all(map(_equal, before, now))
    return bool(before == now) or (isinstance(now, str) and _bare(str(before)) == _bare(now))

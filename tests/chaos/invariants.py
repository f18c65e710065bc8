"""All invariants: conditions that hold for every run, whatever faults it had."""

import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

from flotilla.trainer import storage
from flotilla.trainer.checkpoints.index import list_checkpoints, newest_checkpoint
from flotilla.trainer.events import (
    AttemptBegin,
    CheckpointPassedOver,
    CheckpointPublished,
    Event,
    Progress,
    Restart,
    Saved,
    ServersLost,
)
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.strategies.async_parameter_server import MAX_PORTION
from tests.chaos.grown import Shards, faults_of, grown, lost_between
from tests.chaos.plan import OUTAGES, Plan

# Exit code of a command that was killed.
KILLED = -signal.SIGKILL


@dataclass
class Outcome:
    """The results of a run, after all of its resumes.

    Attributes:
        ends: exit code and error lines of each try.
        by_parts: whether servers write their own parts.
        tables: the features whose tables grow.
        halfway: maximum number of ids per shard that a loss may leave inconsistent.
        struck: the kind of each fault that found its target.
        losses: number of faults that may have ended an attempt of the chief.
        cancels: number of faults that requested the end of a try.
        kills: number of faults that killed the command line.
        most_failures: maximum number of failed tries; None if there is no limit.
        torn: the checkpoints that a fault has damaged.
        left: the orphans: processes that outlived the run.
    """

    checkpoints: str
    steps: int
    every: int
    by_parts: bool = False
    tables: tuple[str, ...] = ()
    halfway: int = 0
    ends: list[tuple[int, str]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    struck: list[str] = field(default_factory=list)
    losses: int = 0
    cancels: int = 0
    kills: int = 0
    most_failures: int | None = None
    torn: set[str] = field(default_factory=set)
    left: list[str] = field(default_factory=list)
    tracebacks: int = 0


class Violation(NamedTuple):
    """A violated invariant: the tally total that counts it, and a description."""

    total: str
    words: str


def violations_of(outcome: Outcome) -> list[Violation]:
    return [Violation(total, words) for check, total in INVARIANTS for words in check(outcome)]


def it_ends_blessed(outcome: Outcome) -> Iterator[str]:
    """Every run ends blessed, either directly or after a resume."""
    code, words = outcome.ends[-1]
    if code != 0:
        yield f"it did not end blessed: exit code {code}, {words!r}"


def an_end_before_is_one_line_and_can_be_resumed(outcome: Outcome) -> Iterator[str]:
    """A failed try prints one line with the reason and the way to resume, without a traceback."""
    codes = (1, 130) if outcome.cancels else (1,)
    before = [code for code, _ in outcome.ends[:-1]]
    for code, words in outcome.ends[:-1]:
        if code == KILLED and before.count(KILLED) <= outcome.kills:
            continue
        if code not in codes or "resume with: flotilla" not in words:
            yield f"a try ended with exit code {code} and no way to resume: {words!r}"
    if outcome.tracebacks:
        yield f"{outcome.tracebacks} tracebacks were shown"


def no_try_fails_for_what_is_survived(outcome: Outcome) -> Iterator[str]:
    """A try fails only because of a fault that no try can survive."""
    failed = [words for code, words in outcome.ends if code == 1]
    if outcome.most_failures is not None and len(failed) > outcome.most_failures:
        yield f"{len(failed)} tries failed, and {outcome.most_failures} may: {' | '.join(failed)}"


def no_checkpoint_is_torn(outcome: Outcome) -> Iterator[str]:
    """Every published checkpoint is complete, unless a fault has damaged it."""
    for uri, _ in list_checkpoints(outcome.checkpoints):
        try:
            storage.verify(uri)
        except UserError as error:
            if uri not in outcome.torn:
                yield f"a checkpoint is torn: {error}"


def a_green_end_has_all_steps(outcome: Outcome) -> Iterator[str]:
    """A run that ends blessed has trained all steps."""
    step = newest_checkpoint(outcome.checkpoints)[1]
    if outcome.ends[-1][0] == 0 and step < outcome.steps:
        yield f"the last checkpoint is of step {step}, and {outcome.steps} were asked for"


def no_step_is_added(outcome: Outcome) -> Iterator[str]:
    """A run trains exactly the requested steps; only a lost worker's portion may be repeated."""
    step = newest_checkpoint(outcome.checkpoints)[1]
    if step > outcome.steps + MAX_PORTION * restarts(outcome):
        yield f"the last checkpoint is of step {step}, and {outcome.steps} were asked for"


def few_steps_are_repeated(outcome: Outcome) -> Iterator[str]:
    """A lost server or leader, or a torn checkpoint, costs at most the steps since a checkpoint.

    After an outage of the store, that is the newest checkpoint published before the outage.
    """
    if outcome.by_parts:
        return
    most = outcome.every * (outcome.losses + len(outcome.torn)) + MAX_PORTION * restarts(outcome)
    if not OUTAGES.keys().isdisjoint(outcome.struck):
        most += unpublished(outcome)
    if (steps := repeated(outcome)) > most:
        yield f"{steps} steps were repeated, and {most} are the most"


def with_newest(outcome: Outcome) -> Iterator[tuple[Event, int]]:
    """Yield each event with the step of the newest published, undamaged checkpoint."""
    published: dict[str, int] = {}
    for event in outcome.events:
        if isinstance(event, CheckpointPublished):
            published[event.uri] = event.global_step
        elif isinstance(event, CheckpointPassedOver):
            published.pop(event.uri, None)
        yield event, max(published.values(), default=0)


def no_published_step_is_repeated(outcome: Outcome) -> Iterator[str]:
    """An attempt begins at or after the newest published, undamaged checkpoint."""
    for event, newest in with_newest(outcome):
        if isinstance(event, AttemptBegin) and event.global_step < newest:
            yield f"an attempt began at step {event.global_step}, and {newest} was published"


def values_go_back_to_a_checkpoint_at_most(outcome: Outcome) -> Iterator[str]:
    """The values of lost servers are restored from the newest complete checkpoint."""
    for event, newest in with_newest(outcome):
        if not isinstance(event, ServersLost) or event.recovery != "partial":
            continue
        if event.back_to < newest:
            yield f"values went back to step {event.back_to}, and {newest} is the bound"


def no_row_goes_back_further_than_is_said(outcome: Outcome) -> Iterator[str]:
    """After a loss, a table has at least the rows of the step to which its values went back."""
    # Pairs of a step and the number of rows that each table had allocated by then, including
    # evicted rows.
    before: list[tuple[int, dict[str, int]]] = []
    backs: list[int] = []
    for event in outcome.events:
        if isinstance(event, ServersLost) and event.recovery == "partial":
            backs.append(event.back_to)
        elif isinstance(event, AttemptBegin):
            least = min([event.global_step, *backs])
            before = [pair for pair in before if pair[0] <= least]
            backs.clear()
        elif isinstance(event, Progress) and (counts := event.metrics.get("tables")):
            given = {name: each["rows"] + each["evicted"] for name, each in counts.items()}
            for name, count in given.items():
                most = max((each.get(name, 0) for _, each in before), default=0)
                if count < most:
                    at = event.global_step
                    yield f"{name} had {count} rows at step {at}, and {most} before"
            before.append((event.global_step, given))


def rows_are_whole(outcome: Outcome) -> Iterator[str]:
    """In a checkpoint, an id has one row in one shard, with slots, and all rows are counted.

    If values remained on the servers, an interrupted step may leave an id with two rows, or a row
    that is not counted.
    """
    most, counts = outcome.halfway * _disturbances(outcome), not _has_kept_values(outcome)
    for uri, shards in rows_of(outcome).items():
        for words in faults_of(shards, halfway=most, counts=counts):
            yield f"{storage.name_of(uri)}: {words}"


def no_row_is_lost(outcome: Outcome) -> Iterator[str]:
    """Each later checkpoint has the rows of an earlier one, except evicted rows."""
    most = outcome.halfway * _disturbances(outcome)
    found = rows_of(outcome)
    if _has_kept_values(outcome):
        # An eviction while a checkpoint was written may be missing in its count, so do not limit
        # the number of lost rows.
        most += sum(len(each.ids) for shards in found.values() for each in shards.values())
    for (uri, earlier), (later_uri, later) in combinations(found.items(), 2):
        for words in lost_between(earlier, later, halfway=most):
            yield f"{storage.name_of(uri)} to {storage.name_of(later_uri)}: {words}"


def rows_of(outcome: Outcome) -> dict[str, Shards]:
    found = {}
    for uri, _ in list_checkpoints(outcome.checkpoints) if outcome.tables else ():
        if uri not in outcome.torn:
            created = storage.read_manifest(uri).created
            try:
                found[uri] = grown(uri, created, outcome.tables)
            except UserError:
                # Another invariant reports damaged checkpoints.
                continue
    return found


def _disturbances(outcome: Outcome) -> int:
    return restarts(outcome) + max(0, attempts(outcome) - 1)


def _has_kept_values(outcome: Outcome) -> bool:
    return any(isinstance(each, AttemptBegin) and each.checkpoint >= 0 for each in outcome.events)


def no_process_is_left(outcome: Outcome) -> Iterator[str]:
    """No process outlives its try."""
    for command in outcome.left:
        yield f"a process is left: {command}"


INVARIANTS = (
    (it_ends_blessed, "lost"),
    (an_end_before_is_one_line_and_can_be_resumed, "unclear"),
    (no_try_fails_for_what_is_survived, "lost"),
    (no_checkpoint_is_torn, "torn"),
    (a_green_end_has_all_steps, "wrongly green"),
    (no_step_is_added, "inexact"),
    (few_steps_are_repeated, "lost"),
    (no_published_step_is_repeated, "lost"),
    (values_go_back_to_a_checkpoint_at_most, "lost"),
    (no_row_goes_back_further_than_is_said, "lost"),
    (rows_are_whole, "torn"),
    (no_row_is_lost, "lost"),
    (no_process_is_left, "left"),
)
TOTALS = tuple(dict.fromkeys(total for _, total in INVARIANTS))


def is_exact(outcome: Outcome) -> bool:
    """Return whether the last checkpoint has exactly the requested steps."""
    return newest_checkpoint(outcome.checkpoints)[1] == outcome.steps


def repeated(outcome: Outcome) -> int:
    """Return the number of repeated steps that events report."""
    steps, reached = 0, 0
    for event in outcome.events:
        if isinstance(event, AttemptBegin):
            steps += max(0, reached - event.global_step)
            reached = event.global_step
        elif isinstance(event, Progress):
            reached = event.global_step
    return steps


def unpublished(outcome: Outcome) -> int:
    """Return the number of steps that were lost because saved checkpoints were not published."""
    steps, saved = 0, 0
    for event, newest in with_newest(outcome):
        if isinstance(event, AttemptBegin):
            steps += max(0, saved - newest)
            saved = 0
        elif isinstance(event, Saved):
            saved = event.global_step
    return steps


def restarts(outcome: Outcome) -> int:
    return sum(isinstance(event, Restart) for event in outcome.events)


def attempts(outcome: Outcome) -> int:
    """Return the number of starts and resumes of training."""
    return sum(isinstance(event, AttemptBegin) for event in outcome.events)


COUNTED = ("runs", "blessed", "exact steps", "tries resumed", "failed in one line", "broken")
OF_ALL = ("faults", "missed", "attempts", "restarts", "steps repeated")


class Tally:
    """Totals over many runs, and counts by kind of fault and by strategy."""

    def __init__(self) -> None:
        self._all: Counter[str] = Counter()
        self._rows: dict[str, Counter[str]] = {}

    def add(self, plan: Plan, found: Outcome, violations: Sequence[Violation]) -> None:
        broken = Counter(violation.total for violation in violations)
        counts = Counter({
            "runs": 1,
            "blessed": int(found.ends[-1][0] == 0),
            "exact steps": int(is_exact(found)),
            "tries resumed": len(found.ends) - 1,
            "failed in one line": sum(code == 1 and bool(words) for code, words in found.ends),
            "broken": len(violations),
        })  # fmt: skip
        self._all += counts + broken
        self._all += Counter({
            "faults": len(found.struck),
            "missed": len(plan.faults) - len(found.struck),
            "attempts": attempts(found),
            "restarts": restarts(found),
            "steps repeated": repeated(found),
        })  # fmt: skip
        for name in [plan.strategy, *sorted(set(found.struck))]:
            self._rows[name] = self._rows.get(name, Counter()) + counts

    @property
    def is_violated(self) -> bool:
        return any(self._all[total] for total in TOTALS)

    def table(self) -> str:
        """Return one row per strategy and one per kind of injected fault."""
        width = max(map(len, self._rows), default=0)
        titles = [" " * width, *COUNTED]
        rows = [
            [name.ljust(width), *(str(counts[each]).rjust(len(each)) for each in COUNTED)]
            for name, counts in sorted(self._rows.items())
        ]
        return "\n".join("  ".join(cells).rstrip() for cells in [titles, *rows])

    def __str__(self) -> str:
        return _listed(self._all, (*COUNTED[:-1], *OF_ALL, *TOTALS))


def _listed(counts: Counter[str], names: Iterable[str]) -> str:
    return ", ".join(f"{counts[name]} {name}" for name in names)

"""All invariants: what holds for every run, whatever failed in it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from trainer import storage
from trainer.checkpoints.index import list_checkpoints, newest_checkpoint
from trainer.errors import UserError
from trainer.events import AttemptBegin, Event, Progress, Restart
from trainer.strategies.async_parameter_server import MAX_PORTION

# The exit code of a command line that was killed.
KILLED = -signal.SIGKILL


@dataclass
class Outcome:
    """What is known of a run that has ended, after all of its resumes.

    Attributes:
        ends: exit code and error lines of each try.
        events: of all tries.
        checkpoints: URI below which the run has published.
        steps: how many it had to train.
        every: the steps between checkpoints.
        struck: the kind of each fault that found what it was to hit.
        losses: how many faults may have cost an attempt of the chief.
        cancels: how many faults have requested the end of a try.
        kills: how many faults have killed the command line.
        most_failures: how many tries may fail; None where any fault may be the reason.
        torn: the checkpoints that a fault has torn.
        left: orphans: processes of the run that outlived it.
        tracebacks: how many tracebacks the command line has shown.
    """

    checkpoints: str
    steps: int
    every: int
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
    """An invariant that does not hold: which total counts it, and what was found."""

    total: str
    words: str


def violations_of(outcome: Outcome) -> list[Violation]:
    """Describe each invariant that a run has violated."""
    return [Violation(total, words) for check, total in INVARIANTS for words in check(outcome)]


def it_ends_blessed(outcome: Outcome) -> Iterator[str]:
    """Every run ends blessed, at once or after it was resumed."""
    code, words = outcome.ends[-1]
    if code != 0:
        yield f"it did not end blessed: exit code {code}, {words!r}"


def an_end_before_is_one_line_and_can_be_resumed(outcome: Outcome) -> Iterator[str]:
    """A try that fails says in one line why and how to resume, without a traceback."""
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
    """A try fails only for a fault that cannot be survived within it."""
    failed = [words for code, words in outcome.ends if code == 1]
    if outcome.most_failures is not None and len(failed) > outcome.most_failures:
        yield f"{len(failed)} tries failed, and {outcome.most_failures} may: {' | '.join(failed)}"


def no_checkpoint_is_torn(outcome: Outcome) -> Iterator[str]:
    """Every published checkpoint is whole, unless a fault has torn it."""
    for uri, _ in list_checkpoints(outcome.checkpoints):
        try:
            storage.verify(uri)
        except UserError as error:
            if uri not in outcome.torn:
                yield f"a checkpoint is torn: {error}"


def a_green_end_has_all_steps(outcome: Outcome) -> Iterator[str]:
    """A run that ends blessed has trained all of its steps."""
    step = newest_checkpoint(outcome.checkpoints)[1]
    if outcome.ends[-1][0] == 0 and step < outcome.steps:
        yield f"the last checkpoint is of step {step}, and {outcome.steps} were asked for"


def no_step_is_added(outcome: Outcome) -> Iterator[str]:
    """No more steps are trained than asked for; a lost worker may repeat those of its portion."""
    step = newest_checkpoint(outcome.checkpoints)[1]
    if step > outcome.steps + MAX_PORTION * restarts(outcome):
        yield f"the last checkpoint is of step {step}, and {outcome.steps} were asked for"


def few_steps_are_repeated(outcome: Outcome) -> Iterator[str]:
    """Each lost server or leader repeats the steps since a checkpoint, each torn one as many."""
    most = outcome.every * (outcome.losses + len(outcome.torn)) + MAX_PORTION * restarts(outcome)
    if (steps := repeated(outcome)) > most:
        yield f"{steps} steps were repeated, and {most} are the most"


def no_process_is_left(outcome: Outcome) -> Iterator[str]:
    """When a try has ended, nothing of it runs."""
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
    (no_process_is_left, "left"),
)
TOTALS = tuple(dict.fromkeys(total for _, total in INVARIANTS))


def is_exact(outcome: Outcome) -> bool:
    """Return whether the last checkpoint has exactly the steps that were asked for."""
    return newest_checkpoint(outcome.checkpoints)[1] == outcome.steps


def repeated(outcome: Outcome) -> int:
    """Return the steps that were trained more than once, as far as events report them."""
    steps, reached = 0, 0
    for event in outcome.events:
        if isinstance(event, AttemptBegin):
            steps += max(0, reached - event.global_step)
            reached = event.global_step
        elif isinstance(event, Progress):
            reached = event.global_step
    return steps


def restarts(outcome: Outcome) -> int:
    """Return how often a task was started again."""
    return sum(isinstance(event, Restart) for event in outcome.events)


def attempts(outcome: Outcome) -> int:
    """Return how often training began or went on."""
    return sum(isinstance(event, AttemptBegin) for event in outcome.events)

"""All invariants: what holds for every run, whatever failed in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from trainer import storage
from trainer.checkpoints.index import list_checkpoints, newest_checkpoint
from trainer.errors import UserError
from trainer.events import AttemptBegin, Event, Progress, Restart

# A closure of asynchronous training that a killed worker had begun is done again as a whole.
STEPS_OF_A_CLOSURE = 50


@dataclass
class Lived:
    """What is known of a run when it has ended, resumed as often as it had to be.

    Attributes:
        ends: exit code and last words of each try.
        events: of all tries.
        checkpoints: URI below which the run has published.
        steps: how many it had to train.
        every: the steps between checkpoints.
        losses: how many blows may have cost an attempt of the chief.
        torn: the checkpoints that chaos itself has torn.
        left: processes that were left of the run.
        tracebacks: lines that begin one, on what a person sees.
    """

    checkpoints: str
    steps: int
    every: int
    ends: list[tuple[int, str]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    losses: int = 0
    torn: set[Path] = field(default_factory=set)
    left: list[str] = field(default_factory=list)
    tracebacks: int = 0


def broken(lived: Lived) -> list[str]:
    """Return the invariants that a run has broken, in words."""
    return [words for check in INVARIANTS for words in check(lived)]


def it_ends_blessed(lived: Lived) -> Iterator[str]:
    """Every run ends blessed, at once or after it was resumed."""
    code, words = lived.ends[-1]
    if code != 0:
        yield f"it did not end blessed: exit code {code}, {words!r}"


def an_end_before_is_one_line_and_can_be_resumed(lived: Lived) -> Iterator[str]:
    """A try that fails says in one line why and how to resume, without a traceback."""
    for code, words in lived.ends[:-1]:
        if code != 1 or "resume with: flotilla" not in words:
            yield f"a try ended with exit code {code} and no way to resume: {words!r}"
    if lived.tracebacks:
        yield f"{lived.tracebacks} tracebacks were shown"


def no_checkpoint_is_torn(lived: Lived) -> Iterator[str]:
    """What is published is whole, but for what chaos has torn."""
    for uri, _ in list_checkpoints(lived.checkpoints):
        try:
            storage.verify(uri)
        except UserError as error:
            if storage.local_path(uri) not in lived.torn:
                yield f"a checkpoint is torn: {error}"


def all_steps_are_trained(lived: Lived) -> Iterator[str]:
    """The last checkpoint has all steps; a lost worker may add those of its closure."""
    step = newest_checkpoint(lived.checkpoints)[1]
    most = lived.steps + STEPS_OF_A_CLOSURE * restarts(lived)
    if not lived.steps <= step <= most:
        yield f"the last checkpoint is of step {step}, and {lived.steps} were asked for"


def few_steps_are_repeated(lived: Lived) -> Iterator[str]:
    """Each lost server or leader repeats the steps since a checkpoint, each torn one as many."""
    most = lived.every * (lived.losses + len(lived.torn)) + STEPS_OF_A_CLOSURE * restarts(lived)
    if (steps := repeated(lived)) > most:
        yield f"{steps} steps were repeated, and {most} are the most"


def no_process_is_left(lived: Lived) -> Iterator[str]:
    """When a try has ended, nothing of it runs."""
    for command in lived.left:
        yield f"a process is left: {command}"


INVARIANTS = (
    it_ends_blessed,
    an_end_before_is_one_line_and_can_be_resumed,
    no_checkpoint_is_torn,
    all_steps_are_trained,
    few_steps_are_repeated,
    no_process_is_left,
)


def repeated(lived: Lived) -> int:
    """Return the steps that were trained more than once, as far as events report them."""
    steps, reached = 0, 0
    for event in lived.events:
        if isinstance(event, AttemptBegin):
            steps += max(0, reached - event.global_step)
            reached = event.global_step
        elif isinstance(event, Progress):
            reached = event.global_step
    return steps


def restarts(lived: Lived) -> int:
    """Return how often a task was started again."""
    return sum(isinstance(event, Restart) for event in lived.events)


def attempts(lived: Lived) -> int:
    """Return how often training began or went on."""
    return sum(isinstance(event, AttemptBegin) for event in lived.events)

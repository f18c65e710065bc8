"""Ends a command: prints its text, JSON result or error message, and sets its exit code.

`pipelines/runs/outcome.py` composes the message of a failed run from the events of the failed step.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, NoReturn, get_type_hints

import typer

from flotilla.trainer.runtime import errors
from flotilla.trainer.runtime.masking import printable, remove_credentials
from flotilla.trainer.runtime.signals import handle_interrupts
from flotilla.trainer.runtime.streams import discard, say

AsJson = Annotated[bool, typer.Option("--json",
    help="Print one JSON object, and nothing else, to standard output.")]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The result of a command: the keys that scripts rely on, and the command's own keys in `more`.

    Attributes:
        status: one of the statuses in `docs/reference/command-line.md`.
        metrics: metrics of the test split, if a model was evaluated.
        message: the reason for a failure or refusal in one line, or an empty string.
        text: the text to print to standard output if JSON was not requested.
    """

    status: str = "done"
    code: int = errors.DONE
    run_id: str = ""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    artifacts: Mapping[str, str] = field(default_factory=dict)
    message: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""

    def json(self) -> str:
        """Return the JSON object as a single line."""
        from flotilla.trainer.runtime.json_records import finite

        keys = ("status", "run_id", "metrics", "artifacts", "message")
        tree = {key: getattr(self, key) for key in keys} | dict(self.more)
        return json.dumps(finite(tree, remove_credentials), allow_nan=False, default=str)


def failure(message: str, code: int, run_id: str = "") -> Answer:
    """Return the result of a command that failed or was interrupted."""
    status = "interrupted" if code == errors.INTERRUPTED else "failed"
    return Answer(status=status, code=code, run_id=run_id, message=message)


class DetachedError(errors.RunInterruptedError):
    """The user stopped watching a run, which continues. `run_id` is empty if the id is unknown."""

    def __init__(self, message: str, run_id: str) -> None:
        """Store the message and the run's id."""
        super().__init__(message)
        self.run_id = run_id


def answers(command: Callable[..., Answer]) -> Callable[..., None]:
    """Wrap a command: add the option `--json`, print the result, and exit with its code."""

    def called(**named: Any) -> None:
        as_json = named.pop("as_json")
        try:
            # With `--json`, standard output contains only JSON, so print text to standard error.
            with redirect_stdout(sys.stderr) if as_json else nullcontext():
                answer = command(**named)
            finish(answer, as_json=as_json)
            code = answer.code
        except errors.UserError as error:
            run_id = getattr(error, "run_id", "")
            code = fail(str(error), error.exit_code, as_json=as_json, run_id=run_id)
        except KeyboardInterrupt:
            code = fail("interrupted", errors.INTERRUPTED, as_json=as_json)
        except typer.TyperException:
            raise
        except Exception as error:
            if not as_json:
                raise
            sys.excepthook(type(error), error, error.__traceback__)
            message = f"internal error: {type(error).__name__}: {error}"
            code = fail(" ".join(message.split()), errors.FAILED, as_json=True)
        raise typer.Exit(code)

    option = inspect.Parameter(
        "as_json", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=False, annotation=AsJson
    )
    return copy_signature(called, command, [option])


def copy_signature(
    called: Callable[..., None],
    command: Callable[..., Any],
    more: list[inspect.Parameter],
    without: str = "",
) -> Callable[..., None]:
    """Give `called` the name, help and parameters of `command`, except `without`, plus `more`."""
    hints = get_type_hints(command, include_extras=True)
    own = inspect.signature(command).parameters
    parameters = [each.replace(annotation=hints[name]) for name, each in own.items()]
    parameters = [each for each in parameters if each.name != without] + more
    called.__name__, called.__doc__ = command.__name__, command.__doc__
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    return called


def fail(message: str, code: int, *, as_json: bool, run_id: str = "") -> int:
    """Print an error in one line, and also as JSON if requested. Return `code`."""
    say(f"flotilla: {message}")
    if as_json:
        with suppress(errors.UserError):
            finish(failure(message, code, run_id), as_json=True)
    return code


def warn(text: str) -> None:
    """Print a warning in one line, with the prefix `flotilla: warning:`."""
    say(f"flotilla: warning: {text}")


def finish(answer: Answer, *, as_json: bool) -> None:
    """Write the result of a command to standard output, as a JSON object or as text."""
    write(f"{answer.json()}\n" if as_json else answer.text)


def write(text: str) -> None:
    """Write text to standard output. Raises a `UserError` if that fails."""
    if text:
        # Skip an empty string, because flushing the stream would fail on a full disk.
        with output():
            sys.stdout.write(printable(text))


def show_lines(*lines: object) -> None:
    """Print lines and tables for people to standard output. Raises a `UserError` if that fails."""
    from flotilla.pipelines.cli.display import Terminal

    terminal = Terminal()
    with output():
        for each in lines:
            terminal.print(each)


@contextmanager
def output() -> Iterator[None]:
    """Flush standard output after the block. Raises a `UserError` if a write in the block fails."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        discard(sys.stdout)
    except OSError as error:
        discard(sys.stdout)
        if sys.stdout is sys.stderr:
            return
        raise errors.UserError(f"cannot write to standard output: {error.strerror}") from None


@contextmanager
def detaching(describe: Callable[[], tuple[str, str]]) -> Iterator[None]:
    """Raise a `DetachedError` on SIGINT or SIGTERM in this block. The run itself continues."""
    try:
        with handle_interrupts(_interrupt):
            yield
    except KeyboardInterrupt:
        raise DetachedError(*describe()) from None


def _interrupt() -> NoReturn:
    raise KeyboardInterrupt

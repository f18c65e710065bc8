"""How a command ends: with its exit code, and a user's error in one line."""

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

import typer

from trainer.errors import INTERRUPTED, UserError


def ended(command: Callable[[], int], as_json: bool) -> NoReturn:
    """End the process with the code of `command`; an error of the user is one line."""
    try:
        code = command()
    except UserError as error:
        run_id = getattr(error, "run_id", "")
        code = told(str(error), error.exit_code, as_json=as_json, run_id=run_id)
    raise typer.Exit(code)


def told(message: str, code: int, *, as_json: bool, run_id: str = "") -> int:
    """Say `message` on standard error, and as JSON where that was asked for; return `code`."""
    from pipelines.cli import commands

    # Who cannot hear the words still gets the exit code.
    with suppress(OSError):
        sys.stderr.write(f"flotilla: {message}\n")
        sys.stderr.flush()
    if as_json:
        with suppress(UserError):
            status = "interrupted" if code == INTERRUPTED else "failed"
            commands.print_json({"status": status, "run_id": run_id, "message": message})
    return code

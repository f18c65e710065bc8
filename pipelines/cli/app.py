"""The command line `flotilla`, which parses arguments and calls the commands of the table."""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated, Any

import typer
from typer.completion import completion_init  # type: ignore[attr-defined]

from flotilla.pipelines.cli.commands import HELP_OPTIONS, Group, add_commands
from flotilla.pipelines.cli.completion.shell import VARIABLE, rejoin_words
from flotilla.pipelines.cli.exit import Answer, fail, finish
from flotilla.trainer.runtime.environment import check_variables
from flotilla.trainer.runtime.errors import DONE, FAILED, USAGE, UserError
from flotilla.trainer.runtime.masking import find_credentials
from flotilla.trainer.runtime.output.streams import discard, mask_libraries

app = typer.Typer(
    name="flotilla",
    help="Declarative training pipelines on Kubeflow Pipelines, on a laptop or a cluster.",
    cls=Group,
    context_settings=HELP_OPTIONS,
    # Typer's own completion options guess the shell from the process tree. The command `completion`
    # takes the shell's name instead.
    add_completion=False,
    pretty_exceptions_enable=False,
)

# A removed option of `submit` and `schedule`. The error message names its replacement.
PARAMETER = "--parameter"
REMOVED = {
    "plan": (
        "instead, train for some steps with different numbers of tasks, and compare the runs with "
        "`flotilla compare`"
    )
}


def _print_version(context: typer.Context, is_wanted: bool) -> None:
    if not is_wanted:
        return
    from importlib.metadata import version

    from flotilla.trainer.promotion.lineage import commit

    number, at = version("kfp-flotilla"), commit()
    answer = Answer(
        text=f"flotilla {number}{f' (commit {at})' if at else ''}\n",
        more={"version": number, "commit": at},
    )
    finish(answer, as_json=bool(context.obj))
    raise typer.Exit


@app.callback()
def _flotilla(
    _version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version, and the commit if it is known.",
        ),
    ] = False,
) -> None:
    pass


add_commands(app)


def call(arguments: list[str]) -> int:
    """Run the command line, and return the exit code."""
    as_json = "--json" in arguments
    mask_libraries()
    if arguments[:1] == ["--version"] or arguments[:2] == ["--json", "--version"]:
        # Remove `--json`, which typer would reject, because only the commands have this option.
        arguments = ["--version"]
    if wrong := _argument_with_credentials(arguments) or _refuse_removed(arguments):
        return fail(wrong, USAGE, as_json=as_json)
    if VARIABLE in os.environ:
        rejoin_words(os.environ)
        completion_init()
    try:
        check_variables()
        code: Any = app(
            arguments or ["--help"], prog_name="flotilla", standalone_mode=False, obj=as_json
        )
    except typer.TyperException as error:
        command = getattr(getattr(error, "ctx", None), "command_path", "flotilla")
        words = " ".join(error.format_message().split()).rstrip(".")
        words = words.replace(": Value error, ", ": ")
        return fail(f"{words}; see `{command} --help`", USAGE, as_json=as_json)
    except UserError as error:
        # An environment variable is invalid, or `--version` cannot write to standard output.
        return fail(str(error), error.exit_code, as_json=as_json)
    except OSError as error:
        # Typer prints help texts itself, so report here that it cannot write to standard output.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise
        discard(sys.stdout)
        return fail(f"cannot write to standard output: {error.strerror}", FAILED, as_json=as_json)
    except SystemExit as ended:
        # For a completion, the exit code tells fish whether to complete file names.
        code = ended.code if VARIABLE in os.environ else DONE
        # Outside completion, typer exits only when the reader of a help text has closed the stream.
        if VARIABLE not in os.environ:
            discard(sys.stdout)
    return int(code or DONE)


def _argument_with_credentials(arguments: list[str]) -> str:
    for argument, before in zip(arguments, ["", *arguments], strict=False):
        if why := find_credentials(argument):
            name, equals, _ = argument.partition("=")
            option = name if equals and "://" not in name else before
            where = f"{option}: " if option and "://" not in option else ""
            return (
                f"{where}{why}: every user of this machine can read a command line; pass "
                "credentials in a file or in the environment instead"
            )
    return ""


def _refuse_removed(arguments: list[str]) -> str:
    command = next((each for each in arguments if not each.startswith("-")), "")
    if remedy := REMOVED.get(command):
        return f"{command}: removed in 0.2; {remedy}"
    if command in ("submit", "schedule"):
        for each, after in zip(arguments, [*arguments[1:], ""], strict=True):
            option, _, joined = each.partition("=")
            if option == PARAMETER:
                from flotilla.pipelines.old_parameters import describe_replacement

                given = joined or after
                name = given.partition("=")[0] or given
                return f"{PARAMETER} {name}: no longer supported; {describe_replacement(name)}"
    return ""

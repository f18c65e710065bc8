"""`docs/reference/command-line.md`: every command and option, from the command line itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipelines.reference.tables import NOTICE, code, paragraph, table
from trainer.errors import EXIT_CODES

_HEAD = f"""{NOTICE}
# Command line

`--help` behind a command says the same as this page. Logs and progress go to standard error, tables
and documents to standard output. Every error of the user is one line that names what is wrong,
where, and what to do.
"""
_JSON = """## `--json`

Every command takes it, and prints one JSON object as the last line of standard output, also when it
fails. These keys are always there; what a command adds is said with it.

"""
_KEYS = {
    "status": "`done`, `blessed`, `refused`, `failed` or `interrupted`; of a run elsewhere also "
    "`submitted`, `running`, `canceling`, `ended` or `unknown`",
    "run_id": "the run, or an empty text",
    "metrics": "figures of the test split by name, where a model was evaluated",
    "artifacts": "URI by name: `dataset`, `checkpoint`, `evaluation`, `decision`, `model`, "
    "`registration`, `report`, as far as they were made; of `compile` the files",
    "message": "why it failed or was refused, in one line, or an empty text",
}


def command_line(group: Any) -> str:
    """Return the page for the group of all commands."""
    exits = table(("code", "means"), ((code(n), text) for n, text in EXIT_CODES.items()))
    keys = table(("key", "holds"), ((code(key), text) for key, text in _KEYS.items()))
    commands = "".join(_command(name, each) for name, each in flat(group.commands))
    return f"{_HEAD}\n## Exit codes\n\n{exits}\n{_JSON}{keys}\n{commands}"


def flat(commands: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every command with the words that call it: a group has commands of its own."""
    for name, command in commands.items():
        if below := getattr(command, "commands", None):
            yield from flat(below, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


def _command(name: str, command: Any) -> str:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    usage = " ".join([f"flotilla {name}", *map(_called, arguments), "[OPTIONS]"])
    rows = table(("argument, option", "default", "meaning"), map(_row, command.params))
    more = f"{paragraph(command.epilog)}\n\n" if command.epilog else ""
    usage = f"```text\n{usage}\n```"
    return f"## `flotilla {name}`\n\n{usage}\n\n{paragraph(command.help)}\n\n{more}{rows}\n"


def _called(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _row(parameter: Any) -> tuple[str, str, str]:
    if parameter.param_type_name == "argument":
        name = code(_called(parameter))
    else:
        word = "" if parameter.is_flag else f" {parameter.metavar or _word(parameter)}"
        name = ", ".join(code(f"{option}{word}") for option in _options(parameter))
    default = "" if parameter.default in (None, "", False) else code(str(parameter.default))
    meaning = f"{parameter.help} {_variables(parameter)}".strip()
    return name, "has to be said" if parameter.required else default, meaning


def _options(parameter: Any) -> list[str]:
    return [*parameter.opts, *parameter.secondary_opts]


def _variables(parameter: Any) -> str:
    """Return which variables of the environment stand in for an option."""
    named = parameter.envvar or []
    names = [named] if isinstance(named, str) else named
    return f"Else the variable {' or '.join(map(code, names))}." if names else ""


def _word(option: Any) -> str:
    return str(option.name).upper()

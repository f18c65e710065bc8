"""All commands and options match a golden file, because scripts rely on them."""

import json

import typer

from flotilla.pipelines.cli.app import app


def flat(commands, before=""):
    found = {}
    for name, command in commands.items():
        below = getattr(command, "commands", None)
        found |= flat(below, f"{before}{name} ") if below else {f"{before}{name}": command}
    return found


GROUP = typer.main.get_command(app)
COMMANDS = flat(GROUP.commands)


def surface():
    every = {"": GROUP, **COMMANDS}
    return {name: [described(each) for each in it.params] for name, it in every.items()}


def described(parameter):
    return {
        "names": [*parameter.opts, *parameter.secondary_opts],
        "option": parameter.param_type_name == "option",
        "flag": getattr(parameter, "is_flag", False),
        "required": parameter.required,
        "repeated": parameter.multiple,
        "default": None if parameter.default is None else str(parameter.default),
    }


def test_the_command_line_is_the_golden_file(golden):
    golden("cli.json", json.dumps(surface(), indent=1) + "\n")


def test_every_command_says_what_it_does_and_takes_json():
    for name, command in COMMANDS.items():
        assert command.help, name
        assert "--json" in {option for each in command.params for option in each.opts}, name


def test_every_option_is_explained():
    for name, command in COMMANDS.items():
        assert not [each.opts for each in command.params if not each.help], name

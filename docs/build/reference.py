"""Generates the pages of `docs/reference` from the code.

- `configuration.md`: every key of the configuration, from the config model.
- `parameters.md`: the run parameters of the pipeline, as its YAML declares them.
- `components.md`: what each step does, and the inputs and outputs of its component.
- `command-line.md`: every command and option, from the command line itself.
"""

from __future__ import annotations

import json
import types
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from flotilla.components.table import STAGES, STEPS, StepSpec
from flotilla.pipelines.training import SIGNATURE
from flotilla.trainer.config.base import AUTO, OR_AUTO
from flotilla.trainer.config.form import FIELDS
from flotilla.trainer.config.model import ARGS, ScheduleConfig
from flotilla.trainer.config.schema import Config
from flotilla.trainer.runtime.errors import EXIT_CODES

NOTICE = "<!-- Generated from the code by `make golden`; change the descriptions there. -->"


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table. Vertical bars and line breaks in cells are escaped."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in lines)


def entry(name: str, facts: Iterable[str], meaning: str) -> str:
    """Return a list item: a name, facts in parentheses, and a description."""
    given = "; ".join(filter(None, facts))
    return f"- {name}{f' ({given})' if given else ''}: {' '.join(meaning.split())}\n"


def code(value: object) -> str:
    """Format a value as YAML in Markdown code."""
    return f"`{value if isinstance(value, str) and value else json.dumps(value)}`"


def codes(values: Iterable[object]) -> str:
    """Format several values as Markdown code."""
    return ", ".join(map(code, values))


def paragraph(text: str) -> str:
    """Return a docstring as Markdown: its paragraphs, without indentation and line breaks."""
    parts = (" ".join(part.split()) for part in text.strip().split("\n\n"))
    return "\n\n".join(parts)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


_WORDS = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "`true` or `false`",
    type(None): "`null`",
}
# The text for each kind of bound, and the function that selects the stricter of two bounds.
_BOUNDS: dict[str, tuple[str, Callable[[list[float]], float]]] = {
    "ge": ("at least", max),
    "gt": ("above", max),
    "le": ("at most", min),
    "lt": ("below", min),
}
# Longer deadlines are written in days.
_MOST_HOURS = 48
# Larger bounds only keep a number within the range of its type, so the page omits them.
_NEVER_REACHED = 10_000
_CONFIGURATION_HEAD = f"""{NOTICE}
# Configuration

A run is configured by one YAML file, which any number of `--set section.key=value` override. An
unknown key or an invalid value is rejected before anything starts (exit code 2), with a message
that names the key. A key for which this page gives no default is empty by default.
`configs/digits.yaml` shows every key in one file; [run parameters](parameters.md) are the fields of
KFP's form.

When the dataset is prepared, `auto` is replaced by a number that depends on the number of training
examples. If `data.source` is set and `training.steps` is not, every omitted key that allows
`auto` is `auto`, and validation decides when training ends.

Numbers may be written as `1e-3`. In `cluster.kubernetes` a *name*, a *key*, a *value* and a
*variable* are strings as Kubernetes defines them. A key that is set for one role overrides the same
key of `cluster.kubernetes.pod`: mappings are merged key by key, and any other value that is not
empty replaces the value in `pod`.
"""


def configuration() -> str:
    """Return the page about the configuration."""
    sections = "".join(_section(Config, "", set()))
    return f"{_CONFIGURATION_HEAD}\n{sections}{_relations()}"


def _section(model: type[BaseModel], path: str, seen: set[type[BaseModel]]) -> Iterator[str]:
    """Yield the parts of the page for a section and for its sections that are not in `seen`."""
    title = f"## `{path}`\n\n" if path else "## The file\n\n"
    yield f"{title}{paragraph(model.__doc__ or '')}\n\n"
    seen.add(model)
    fields = model.model_fields.items()
    yield from (_key_entry(path, name, field) for name, field in fields if not _is_linked(field))
    if linked := [_joined(path, name) for name, field in fields if _is_linked(field)]:
        named = ", ".join(f"[`{each}`](#{each.replace('.', '')})" for each in linked)
        yield f"- sections: {named}\n"
    yield "\n"
    if model is ScheduleConfig:
        yield from _schedules(path)
    for name, field in model.model_fields.items():
        inner, where = _inner(field.annotation), _joined(path, name)
        if inner and inner not in seen:
            is_list = get_origin(field.annotation) is tuple
            yield from _section(inner, f"{where}[]" if is_list else where, seen)


def _schedules(path: str) -> Iterator[str]:
    for name, model in ARGS.items():
        yield f"### `{path}.args` of `{name}`\n\n{paragraph(model.__doc__ or '')}\n\n"
        if fields := model.model_fields.items():
            yield from (_key_entry(f"{path}.args", key, field) for key, field in fields)
            yield "\n"


def _key_entry(path: str, name: str, field: FieldInfo) -> str:
    where = code(_joined(path, name))
    inner = _inner(field.annotation)
    if inner and inner is field.annotation:
        return entry(where, ["section"], field.description or "")
    meaning = field.description or paragraph(inner.__doc__ or "" if inner else "")
    kind, allowed = _annotated((field.annotation, *field.metadata)), _allowed(field)
    is_choice = kind == "text" and allowed.startswith("one of")
    return entry(where, ["" if is_choice else kind, _default(field), allowed], meaning)


def _is_linked(field: FieldInfo) -> bool:
    """Return whether a key is a section that another part of the page describes."""
    inner = _inner(field.annotation)
    return inner is not None and inner is field.annotation and not field.description


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _inner(kind: Any) -> type[BaseModel] | None:
    """Return the model of a section that a key holds or lists; None for any other key."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind
    return next(filter(None, map(_inner, get_args(kind))), None)


def _key_type(kind: Any) -> str:
    args, origin = get_args(kind), get_origin(kind)
    if origin is Annotated:
        return _annotated(args)
    if origin is Literal:
        return "text"
    if origin in (Union, types.UnionType):
        return " or ".join(map(_key_type, args))
    if origin is tuple:
        return f"list of {_key_type(args[0])}"
    if origin is dict:
        # The code that uses these values checks them, so their type is left out.
        of = "" if args[1] is Any else f" of {_key_type(args[0])} to {_key_type(args[1])}"
        return f"mapping{of}"
    return "sections" if issubclass(kind, BaseModel) else _WORDS[kind]


def _annotated(args: tuple[Any, ...]) -> str:
    return next((each for each in args[1:] if isinstance(each, str)), "") or _key_type(args[0])


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = list(field.default) if isinstance(field.default, tuple) else field.default
    return "" if value in ("", [], {}) else f"default {code(value)}"


def _allowed(field: FieldInfo) -> str:
    kind = field.annotation
    words = [
        f"{word} {_number(stricter(values))}"
        for name, (word, stricter) in _BOUNDS.items()
        if (values := _bounds(field, name)) and abs(stricter(values)) < _NEVER_REACHED
    ]
    if least := _bounds(field, "min_length"):
        words.append("not empty" if least == [1] else f"{_number(max(least))} or more of them")
    if OR_AUTO in field.metadata:
        words.append(f"or {code(AUTO)}")
    choices = kind if get_origin(kind) is Literal else next(iter(get_args(kind)), None)
    if get_origin(choices) is Literal:
        words.append(f"one of {codes(get_args(choices))}")
    return ", ".join(words)


def _bounds(field: FieldInfo, name: str) -> list[float]:
    found = (getattr(each, name, None) for each in field.metadata)
    return [each for each in found if each is not None]


def _number(value: float) -> str:
    return f"{value:.15g}"


def _relations() -> str:
    """Return the rules between keys, from the docstrings of the checks."""
    checks = Config.__pydantic_decorators__.model_validators
    rules = [" ".join((getattr(Config, name).__doc__ or "").split()) for name in checks]
    listed = "".join(f"- {rule}\n" for rule in rules if rule)
    return f"## Rules between keys\n\n{listed}"


_PARAMETER_TITLES = ("parameter", "type", "default", "key", "meaning")
_PARAMETERS_HEAD = f"""{NOTICE}
# Run parameters

The form of the KFP UI for a new run or schedule, with the defaults that `flotilla compile` writes
into the YAML. Each field is one key of the [configuration](configuration.md), except `image` and
`settings`, which contains all other keys by section. A key that has a field is refused in
`settings`, unless its drop-down has the value `settings`. The first step, `{STEPS[0].name}`, checks
all fields. The UI lists the fields alphabetically, without their meaning, and `settings` as JSON.
"""


def parameters(declared: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page about the parameters that a compiled pipeline declares, by name."""
    keys = {each.name: each.key for each in FIELDS}
    rows = (
        _parameter_row(name, declared[name], keys.get(name, ())) for name in SIGNATURE.parameters
    )
    return f"{_PARAMETERS_HEAD}\n{table(_PARAMETER_TITLES, rows)}"


def _parameter_row(name: str, declared: Mapping[str, Any], key: tuple[str, ...]) -> tuple[str, ...]:
    given = declared.get("defaultValue", "")
    # The YAML stores every number as a double.
    is_whole = isinstance(given, float) and given.is_integer()
    default = json.dumps(int(given) if is_whole else given)
    kind, described = str(declared["parameterType"]), str(declared.get("description", ""))
    return code(name), kind, code(default), code(".".join(key)) if key else "", described


_STEP_TITLES = (
    "step", "stages", "publishes", "deadline of an attempt", "retries", "GPUs"
)  # fmt: skip
_COMPONENTS_HEAD = f"""{NOTICE}
# Components

Each step of the pipeline is a KFP component ([how to use one
alone](../how-to/reuse-components.md)). Data are passed as a `String` with the URI of a published
directory; an optional artifact `NAME_descriptor` describes it. The option `--gpus` of `flotilla
upload` gives GPUs to the steps that may use them.
"""


def components(made: Iterable[Any]) -> str:
    """Return the page about the components, given as KFP component objects."""
    steps = table(_STEP_TITLES, map(_step_row, STEPS))
    return f"{_COMPONENTS_HEAD}\n{steps}\n{''.join(map(_component, made))}"


def _step_row(step: StepSpec) -> tuple[str, ...]:
    return (
        code(step.kfp_name),
        codes(each.name for each in step.stages),
        ", ".join(each.output for each in step.stages if each.output),
        _duration(step.deadline_seconds),
        str(step.retries),
        "yes" if step.may_use_gpus else "",
    )


def _duration(seconds: int) -> str:
    hours = seconds // 3600
    return f"{hours // 24} days" if hours > _MOST_HOURS else f"{hours} h"


def _component(made: Any) -> str:
    spec = made.component_spec
    outputs = (spec.outputs or {}).items()
    given = ", ".join(_inputs(spec))
    made_of = ", ".join(f"{code(name)} ({_artifact_type(each)})" for name, each in outputs)
    described = paragraph(made.description or "")
    listed = f"- Inputs: {given}\n- Outputs: {made_of or 'none'}\n"
    return f"## `{made.name}`\n\n{described}\n\n{listed}\n"


def _inputs(spec: Any) -> Iterator[str]:
    given = spec.inputs or {}
    keys = {each.name for each in FIELDS}
    # The first step takes all run parameters; another step may take a few.
    whole = keys <= given.keys()
    if whole:
        yield "[every run parameter](parameters.md) but the image"
    for name, each in given.items():
        if not (whole and name in keys):
            default = f", default {code(each.default)}" if each.optional else ""
            yield f"{code(name)} ({_artifact_type(each)}{default})"


def _artifact_type(each: Any) -> str:
    # Leave out the version of KFP's schemas, which KFP appends to the type.
    return str(each.type).partition("@")[0]


_COMMANDS_HEAD = f"""{NOTICE}
# Command line

`--help` after a command prints its part of this page. Logs and progress go to standard error,
tables and documents to standard output. Each user error is reported in one line that
says what is wrong, where, and what to do.

On a terminal, a table omits the columns that do not fit. In a file or a pipe, it has all columns
and one line per row, with at least two spaces between columns and `-` for unknown values.
A duration is written as `7.3 s`, `42 s`, `2 min 08 s`, `1 h 05 min` or `2 d 7 h`; in JSON it
is a number of seconds.
"""
_JSON = """## `--json`

Every command accepts `--json`. It then writes exactly one JSON object, on one line, to standard
output, even if it fails or is interrupted; tables and documents go to standard error. A number that
is not finite is `null`. These keys are always present; the section of a command lists the keys that
it adds.

"""
# An option that at least this many commands have, with the same help text, is described once.
_SHARED = 3
_KEYS = {
    "status": "`done`, `blessed`, `refused`, `unchanged`, `failed` or `interrupted`; for a run "
    "that the command did not start itself also `running`, `canceling`, `canceled`, `ended` "
    "or `unknown`; `submitted` by `submit`",
    "run_id": "id of the run, or an empty string",
    "metrics": "metrics of the test split by name, if a model was evaluated",
    "artifacts": f"URI by name: {codes(each.output for each in STAGES if each.output)}, if they "
    "were published; for other commands, the files or pages that they made",
    "message": "reason for a failure or a refusal in one line, or an empty string",
}


def command_line(group: Any) -> str:
    """Return the page about the command line; `group` contains all commands."""
    exits = table(("code", "means"), ((code(n), text) for n, text in EXIT_CODES.items()))
    keys = table(("key", "holds"), ((code(key), text) for key, text in _KEYS.items()))
    own = "".join(map(_option, group.params))
    own = f"## `flotilla`\n\n```text\nflotilla [OPTIONS] COMMAND\n```\n\n{own}\n"
    every = list(flat(group.commands))
    counts = Counter(_option(each) for _, command in every for each in command.params)
    shared = {text for text, count in counts.items() if count >= _SHARED}
    commands = "".join(_command(name, each, shared) for name, each in every)
    listed = "".join(text for text in counts if text in shared)
    common = f"## Options of several commands\n\n{listed}\n" if shared else ""
    begin = f"{_COMMANDS_HEAD}\n## Exit codes\n\n{exits}\n{_JSON}{keys}\n"
    return f"{begin}{common}{own}{commands}"


def flat(commands: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every command with its full name; the commands of a group follow its name."""
    for name, command in commands.items():
        if below := getattr(command, "commands", None):
            yield from flat(below, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


def _command(name: str, command: Any, shared: Container[str]) -> str:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    usage = " ".join([f"flotilla {name}", *map(_called, arguments), "[OPTIONS]"])
    own = [text for each in command.params if (text := _option(each)) not in shared]
    common = [
        _called(each) if each.param_type_name == "argument" else each.opts[-1]
        for each in command.params
        if _option(each) in shared
    ]
    also = (
        f"- [Options of several commands](#options-of-several-commands): {codes(common)}\n"
        if common
        else ""
    )
    epilog = f"{paragraph(command.epilog)}\n\n" if command.epilog else ""
    # For a command without arguments, the title already shows the usage.
    usage = f"```text\n{usage}\n```\n\n" if arguments else ""
    described = f"{paragraph(command.help)}\n\n{epilog}"
    return f"## `flotilla {name}`\n\n{usage}{described}{''.join(own)}{also}\n"


def _called(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _option(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        name = code(_called(parameter))
    else:
        word = "" if parameter.is_flag else f" {parameter.metavar or parameter.name.upper()}"
        options = (*parameter.opts, *parameter.secondary_opts)
        name = ", ".join(code(f"{option}{word}") for option in options)
    has_default = parameter.default not in (None, "", False)
    default = f"default {code(str(parameter.default))}" if has_default else ""
    meaning = f"{parameter.help} {_variables(parameter)}".strip()
    return entry(name, ["required" if parameter.required else default], meaning)


def _variables(parameter: Any) -> str:
    named = parameter.envvar or []
    names = [named] if isinstance(named, str) else named
    return f"Default: the variable {' or '.join(map(code, names))}." if names else ""

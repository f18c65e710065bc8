"""Shell completion: the candidates, and `flotilla completion`, which prints the script of a shell.

Completion reads only local files and never fails. It skips unreadable records.
"""

from __future__ import annotations

import json
import re
import shlex
import types
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, ParamSpec, Union, get_args, get_origin

import typer
from typer.completion import get_completion_script  # type: ignore[attr-defined]

from flotilla.pipelines.cli.exit import Answer, answers

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

Found = list[tuple[str, str]]
Given = ParamSpec("Given")
_RUNS = "runs"
# Shells insert a candidate without quoting it, and zsh evaluates it, so a name that another user
# chose must not contain commands.
_PLAIN = re.compile(r"[\w@%+=:,./][\w@%+=:,./-]*")


def never_fail(complete: Callable[Given, Found]) -> Callable[Given, Found]:
    """Wrap a completion function so that it offers nothing instead of raising an error."""

    @wraps(complete)
    def called(*given: Given.args, **named: Given.kwargs) -> Found:
        try:
            return complete(*given, **named)
        # Return nothing, because a traceback would be printed into the user's command line.
        except Exception:
            return []

    return called


@never_fail
def complete_runs(context: typer.Context) -> Found:
    """Offer the runs below --workdir, newest first, except those already on the command line."""
    from flotilla.pipelines.runs.local_status import run_ids

    named = context.params.get("runs") or ()
    return _offer(run for run in run_ids(_workdir(context)) if run not in named)


@never_fail
def complete_sweeps(context: typer.Context) -> Found:
    """Offer the sweeps below --workdir, newest first."""
    from flotilla.trainer.sweeps.study import FILE

    found = _workdir(context).glob(f"*/{FILE}")
    newest = sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)
    return _offer(path.parent.name for path in newest)


@never_fail
def complete_models(context: typer.Context) -> Found:
    """Offer the registered models."""
    from flotilla.trainer.promotion import registry

    return _offer(registry.names(_root(context)))


@never_fail
def complete_versions(context: typer.Context) -> Found:
    """Offer the versions of the model on the command line, newest first."""
    return _versions(context, str(context.params["name"]))


@never_fail
def complete_model_versions(context: typer.Context, incomplete: str) -> Found:
    """Offer the registered models, or the versions of a model after `NAME@`."""
    name, at, _ = incomplete.partition("@")
    if not at:
        return complete_models(context)
    return [(f"{name}@{number}", text) for number, text in _versions(context, name)]


@never_fail
def complete_steps() -> Found:
    """Offer the steps of a pipeline and their stages."""
    from flotilla.components.table import STEPS

    rows = [row for row in STEPS if not row.is_exit_step]
    found = {row.name: "a step" for row in rows}
    for row in rows:
        for stage in row.stages:
            found.setdefault(stage.name, f"a stage of {row.name}")
    return [*found.items()]


@never_fail
def complete_examples() -> Found:
    """Offer the example configurations."""
    from flotilla.pipelines.configs import list_examples

    return [(each.name, each.description) for each in list_examples()]


def _offer(names: Iterable[str]) -> Found:
    return [(name, "") for name in names if _PLAIN.fullmatch(name)]


def _versions(context: typer.Context, name: str) -> Found:
    from flotilla.trainer.promotion import registry

    root = _root(context)
    champion = max(registry.promotions(root, name), key=lambda each: each.number, default=None)
    numbers = [each.number for each in registry.versions(root, name)]
    is_champion = champion.version if champion else 0
    return [
        (str(number), "the champion" if number == is_champion else "")
        for number in sorted(numbers, reverse=True)
    ]


def _workdir(context: typer.Context) -> Path:
    return Path(context.params.get("workdir") or _RUNS)


def _root(context: typer.Context) -> str:
    from flotilla.pipelines.models import choose_root
    from flotilla.trainer import storage

    given: Any = context.params.get("root")
    root = choose_root(given or "", _workdir(context))
    if storage.local_path(root) is None:
        raise ValueError(root)
    return root


@never_fail
def complete_assignments(incomplete: str) -> Found:
    """Offer the sections and keys after the last dot, or the values of a key after its `=`."""
    key, equals, _ = incomplete.partition("=")
    path, _, last = key.rpartition(".")
    fields = _section(path).model_fields
    if equals:
        return [(f"{key}={value}", "") for value in _values(key, fields[last])]
    before = f"{path}." if path else ""
    return [
        (f"{before}{name}{'.' if _inner(field) else '='}", field.description or "")
        for name, field in fields.items()
    ]


def _section(path: str) -> type[BaseModel]:
    from flotilla.trainer.config.schema import Config

    found: type[BaseModel] = Config
    for name in path.split(".") if path else ():
        inner = _inner(found.model_fields[name])
        if inner is None:
            raise ValueError(f"{path} is not a section")
        found = inner
    return found


def _inner(field: FieldInfo) -> type[BaseModel] | None:
    """Return the model of a section, or None for any other key, such as a list of sections."""
    from pydantic import BaseModel

    # Skip `Literal` types, because they are not classes.
    kinds = [each for each in _kinds(field.annotation) if isinstance(each, type)]
    return next((each for each in kinds if issubclass(each, BaseModel)), None)


def _kinds(kind: Any) -> Iterator[Any]:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        yield from _kinds(args[0])
    elif origin in (Union, types.UnionType):
        for each in args:
            yield from _kinds(each)
    elif origin is None or origin is Literal:
        yield kind


def _values(key: str, field: FieldInfo) -> list[str]:
    from flotilla.trainer.config.base import AUTO, AUTOMATIC, OR_AUTO

    default = AUTO if field.default == AUTOMATIC else field.default
    found = [default] if isinstance(default, str | bool | int | float) else []
    for kind in _kinds(field.annotation):
        found += get_args(kind) if get_origin(kind) is Literal else []
        found += [False, True] if kind is bool else []
    found += _names(key)
    found += [AUTO] if OR_AUTO in field.metadata else []
    texts = (each if isinstance(each, str) else json.dumps(each) for each in found)
    return [*dict.fromkeys(filter(None, texts))]


def _names(key: str) -> tuple[str, ...]:
    from flotilla.trainer.config.base import AUTO
    from flotilla.trainer.config.model import MODELS, OF_MODEL, OPTIMIZERS
    from flotilla.trainer.config.schema import STRATEGIES, TASKS

    known = {
        "model.name": (AUTO, *MODELS),
        "task.name": (AUTO, *TASKS),
        "training.strategy": STRATEGIES,
        "training.optimizer.name": (*OPTIMIZERS, OF_MODEL),
    }
    return known.get(key, ())


VARIABLE = "_FLOTILLA_COMPLETE"
# Bash splits words at spaces, but also at `=`, `:` and `@`, which `--set section.key=value` and
# `MODEL@VERSION` contain. Typer's script passes the pieces of such a word, and bash replaces only
# the text after the last separator. This script passes the whole line, and removes the prefix that
# bash keeps.
_BASH = f"""
_flotilla_completion() {{
    local line="${{COMP_LINE:0:COMP_POINT}}" breaks="${{COMP_WORDBREAKS//[^=:@]/}}" word before=""
    mapfile -t COMPREPLY < <(env COMP_LINE="$line" {VARIABLE}=complete_bash "$1")
    word="${{line##*[[:space:]]}}"
    if [[ -n $breaks && $word != [\\"\\']* && $word == *[$breaks]* ]]; then
        before="${{word%"${{word##*[$breaks]}}"}}"
        COMPREPLY=("${{COMPREPLY[@]#"$before"}}")
    fi
    if [[ ${{#COMPREPLY[@]}} -eq 1 && ${{COMPREPLY[0]}} == *[.=@] ]]; then
        compopt -o nospace
    fi
}}

complete -o default -F _flotilla_completion flotilla
"""


@answers
def completion(
    shell: Annotated[
        Literal["bash", "zsh", "fish"],
        typer.Argument(metavar="SHELL", help="The shell: bash, zsh or fish."),
    ],
) -> Answer:
    """Print the script for shell completion of commands, options and their values.

    The script also completes run ids, models and their versions, steps, and configuration keys
    and their values.
    """
    script = _BASH.strip()
    if shell != "bash":
        script = get_completion_script(prog_name="flotilla", complete_var=VARIABLE, shell=shell)
    return Answer(text=f"{script}\n", more={"script": script})


def rejoin_words(environment: MutableMapping[str, str]) -> None:
    """Set `COMP_WORDS` and `COMP_CWORD` from bash's line in `COMP_LINE`, if that is set."""
    line = environment.get("COMP_LINE", "")
    if not line:
        return
    words = _split(line)
    if line[-1].isspace():
        words.append("")
    environment["COMP_WORDS"] = shlex.join(words)
    environment["COMP_CWORD"] = str(len(words) - 1)


def _split(line: str) -> list[str]:
    """Return the words of a line. A quote in the last word may be unclosed."""
    reader = shlex.shlex(line, posix=True)
    reader.whitespace_split, reader.commenters = True, ""
    words: list[str] = []
    try:
        words += iter(reader.get_token, None)
    except ValueError:
        words.append(reader.token)
    return words

"""`flotilla completion`, which prints the script that a shell needs for completion."""

from __future__ import annotations

import shlex
from collections.abc import MutableMapping
from typing import Annotated, Literal

import typer
from typer.completion import get_completion_script  # type: ignore[attr-defined]

from flotilla.pipelines.cli.exit import Answer, answers

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

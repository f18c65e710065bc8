"""The rows of `table.txt`: a call, its exit code, and a part of its error message."""

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

TABLE = Path(__file__).with_name("table.txt")
_ROW = re.compile(r"(?P<code>\d+) (?P<words>.*) => (?P<line>.+)")
_VARIABLE = re.compile(r"[A-Za-z_]+=.*", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A call of `flotilla`, `trainer` or a shell line (`sh`) that must be refused."""

    text: str
    program: str
    words: tuple[str, ...]
    code: int
    line: str
    variables: dict[str, str] = field(default_factory=dict)


def rows() -> list[Row]:
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    return [_row(line) for line in lines if line and not line.startswith("#")]


def _row(text: str) -> Row:
    match = _ROW.fullmatch(text)
    assert match, f"{TABLE}: {text!r} is not a row"
    call = match["words"]
    ends = {"code": int(match["code"]), "line": match["line"]}
    if call.startswith("sh: "):
        return Row(text=call, program="sh", words=(call.removeprefix("sh: "),), **ends)
    words = shlex.split(call)
    variables = {}
    while words and _VARIABLE.fullmatch(words[0]):
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    program = "flotilla"
    if words[:1] == ["trainer"]:
        program, *words = words
    return Row(text=call, program=program, words=tuple(words), variables=variables, **ends)

"""The rules of `.flotillaignore`, which are those of git: which paths of a folder are left out."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One line: what matches is left out, or taken in again.

    Attributes:
        expression: of paths relative to the folder, with forward slashes.
        leaves_out: false where the line begins with `!`.
        is_of_folders: whether the line ends with a slash.
        origin: who has written it.
    """

    expression: re.Pattern[str]
    leaves_out: bool
    is_of_folders: bool
    origin: str


def rules_of(lines: Iterable[str], origin: str) -> list[Rule]:
    """Return the rules of some lines; a comment, an empty line and a broken one make none."""
    return [rule for line in lines if (rule := _rule(line.rstrip("\r\n"), origin))]


def deciding(rules: Iterable[Rule], path: str, *, is_folder: bool) -> Rule | None:
    """Return the rule that decides about a path: the last that matches; None where none does.

    What is in a folder that is left out is not asked for: as with git, no rule takes it in again.
    """
    found = None
    for rule in rules:
        if (is_folder or not rule.is_of_folders) and rule.expression.fullmatch(path):
            found = rule
    return found


def _rule(line: str, origin: str) -> Rule | None:
    text = re.sub(r"(?<!\\)((?:\\\\)*)[ \t]+$", r"\1", line)
    if not text or text.startswith("#"):
        return None
    is_negated = text.startswith("!")
    text = text[is_negated:]
    is_of_folders = text.endswith("/")
    text = text[:-1] if is_of_folders else text
    is_anchored = "/" in text
    names = text.removeprefix("/").split("/")
    try:
        expression = re.compile(_expression(names, is_anchored=is_anchored), re.DOTALL)
    # As with git: a range such as [z-a] matches nothing.
    except re.error:
        return None
    if not any(names):
        return None
    return Rule(
        expression=expression,
        leaves_out=not is_negated,
        is_of_folders=is_of_folders,
        origin=origin,
    )


def _expression(names: list[str], *, is_anchored: bool) -> str:
    parts = [] if is_anchored else ["(?:.*/)?"]
    *above, last = names
    for name in above:
        parts.append("(?:.*/)?" if name == "**" else f"{_name(name)}/")
    parts.append(".+" if last == "**" else _name(last))
    return "".join(parts)


def _name(pattern: str) -> str:
    made, at = "", 0
    while at < len(pattern):
        letter = pattern[at]
        if letter == "*":
            made += "[^/]*"
        elif letter == "?":
            made += "[^/]"
        elif letter == "\\" and at + 1 < len(pattern):
            at += 1
            made += re.escape(pattern[at])
        elif letter == "[" and (found := re.compile(r"\[([!^]?)(\]?[^\]]*)\]").match(pattern, at)):
            inner = found[2].replace("\\", "\\\\").replace("[", "\\[").replace("]", "\\]")
            inner = inner.replace("^", "\\^").replace("&&", "&\\&").replace("||", "|\\|")
            made += f"(?!/)[{'^' if found[1] else ''}{inner}]"
            at = found.end() - 1
        else:
            made += re.escape(letter)
        at += 1
    return made

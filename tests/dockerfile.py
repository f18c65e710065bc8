"""Parses the Dockerfile and `.dockerignore` as a container engine does."""

import re
import shlex
from collections.abc import Iterable
from pathlib import PurePosixPath


def instructions(text: str) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile in order, each as its name and its arguments."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\s*\n", " ", "\n".join(lines))
    words = (line.split(maxsplit=1) for line in joined.splitlines() if line.strip())
    return [(name.upper(), rest) for name, rest in words]


def stages(text: str) -> dict[str, list[tuple[str, str]]]:
    """Return the instructions of each stage by name. The last stage has the name ""."""
    found: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for instruction, rest in instructions(text):
        if instruction == "FROM":
            name = rest.rpartition(" AS ")[2] if " AS " in rest else ""
            found[name] = []
        elif found:
            found[name].append((instruction, rest))
    return found


def copied(text: str) -> list[str]:
    """Return the sources of every COPY and ADD instruction that reads from the build context."""
    sources = []
    for name, rest in instructions(text):
        words = shlex.split(rest)
        if name in ("COPY", "ADD") and not any(word.startswith("--from=") for word in words):
            sources += [word for word in words if not word.startswith("--")][:-1]
    return sources


def is_ignored(path: str, patterns: Iterable[str]) -> bool:
    """Return whether `.dockerignore` excludes a path; the last matching pattern wins."""
    above = [path, *map(str, PurePosixPath(path).parents)][:-1]
    ignored = False
    for line in patterns:
        pattern = line.strip()
        if pattern and not pattern.startswith("#"):
            expression = _expression(pattern.removeprefix("!").strip("/"))
            if any(re.fullmatch(expression, part) for part in above):
                ignored = not pattern.startswith("!")
    return ignored


def _expression(pattern: str) -> str:
    """Return a pattern as a regular expression: `**` matches any folders, `*` stays in one."""
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    meaning = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(meaning.get(part, re.escape(part)) for part in parts)

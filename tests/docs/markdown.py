"""Parses a Markdown page: code blocks, inline code, links and headings."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^ {0,3}```(\w*)\s*$")
_INLINE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_BREAKS = {"|", "||", "&", "&&", ";", "(", ")", "$", "<", ">", ">>", ">&"}


@dataclass(frozen=True, kw_only=True)
class Block:
    """A code block: its language (empty if it is indented), its first line and its text."""

    language: str
    line: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Page:
    path: Path
    blocks: tuple[Block, ...]
    prose: str

    def of(self, language: str) -> list[Block]:
        return [block for block in self.blocks if block.language == language]

    def commands(self) -> Iterator[tuple[str, list[str]]]:
        """Yield the location and the words of every command in a shell block."""
        for block in (*self.of(""), *self.of("sh")):
            for number, line in _logical(block):
                for words in simple_commands(line):
                    yield f"{self.path}:{number}", words

    def inline(self) -> list[str]:
        return _INLINE.findall(self.prose)

    def links(self) -> list[str]:
        return _LINK.findall(self.prose)

    def fragments(self) -> set[str]:
        return {fragment(heading) for heading in _HEADING.findall(self.prose)}


def read(path: Path, root: Path) -> Page:
    return page(path.relative_to(root), path.read_text(encoding="utf-8"))


def page(path: Path, text: str) -> Page:
    blocks: list[Block] = []
    prose: list[str] = []
    inside: list[str] | None = None
    language, begin, before = "", 0, ""
    for number, line in enumerate(text.splitlines(), start=1):
        fence = _FENCE.match(line)
        is_indented = language == "indented" and (line.startswith("    ") or not line.strip())
        if inside is not None and language != "indented":
            if fence:
                blocks.append(Block(language=language, line=begin, text="\n".join(inside)))
                inside, language = None, ""
            else:
                inside.append(line)
        elif inside is not None and is_indented:
            inside.append(line[4:])
        else:
            if inside is not None:
                blocks.append(Block(language="", line=begin, text="\n".join(inside)))
                inside, language = None, ""
            if fence:
                inside, language, begin = [], fence[1], number + 1
            elif line.startswith("    ") and line.strip() and not before.strip():
                inside, language, begin = [line[4:]], "indented", number
            else:
                prose.append(line)
        before = line
    if inside is not None:
        name = "" if language == "indented" else language
        blocks.append(Block(language=name, line=begin, text="\n".join(inside)))
    return Page(path=path, blocks=tuple(blocks), prose="\n".join(prose))


def simple_commands(line: str) -> list[list[str]]:
    """Return the words of each command in a line, without leading variables and redirections."""
    lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = "#"
    commands: list[list[str]] = [[]]
    for word in lexer:
        if word in _BREAKS:
            commands.append([])
        elif commands[-1] or not re.fullmatch(r"\w+=.*", word):
            commands[-1].append(word)
    return [words for words in commands if words]


def fragment(heading: str) -> str:
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return kept.replace(" ", "-")


def _logical(block: Block) -> Iterator[tuple[int, str]]:
    """Yield the lines of a block; a line that ends with a backslash is joined with the next one."""
    pending, begin = "", block.line
    for number, line in enumerate(block.text.splitlines(), start=block.line):
        begin = begin if pending else number
        if line.endswith("\\"):
            pending += line[:-1] + " "
            continue
        yield begin, pending + line
        pending = ""

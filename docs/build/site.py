"""Hooks of `mkdocs.yml`: pages from outside of `docs/`, and links that also work in the repository.

In the repository, a page may link to any file. The site has the Markdown files of `ADDED` as pages;
a link to another file outside of `docs/` is replaced by its text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
#: The page on the site for each added file. Each path is relative to its root folder.
ADDED = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "report-a-vulnerability.md",
    **{
        f"benchmarks/results/{path.name}": f"measurements/{path.name}"
        for path in sorted((ROOT / "benchmarks" / "results").glob("*.md"))
    },
}
FOLDERS = {"benchmarks/results": "measurements/README.md"}
#: Factors for the rank of a page in search results: `start/` comes first, internal pages last.
BOOSTS = {"start/": 1.5, "decisions/": 0.2, "measurements/": 0.2, "changelog": 0.5}
_SOURCES = {page: source for source, page in ADDED.items()}
_LINK = re.compile(r"\[([^\]]*)\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)")
_FENCED = re.compile(r"(^ {0,3}```.*?^ {0,3}```\s*?$)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside of `docs/`, and the lists of decisions and of measurements."""
    for source, page in ADDED.items():
        content = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=content))
    for folder, title in (("decisions", "Decisions"), ("measurements", "Measurements")):
        pages = [each for each in files if each.src_uri.startswith(f"{folder}/")]
        rows = [f"- [{_title(each)}]({posixpath.basename(each.src_uri)})" for each in pages]
        text = f"# {title}\n\n" + "\n".join(sorted(rows, key=_number)) + "\n"
        files.append(File.generated(config, f"{folder}/README.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Set the search rank of a page; return its text with links changed to pages of the site."""
    where = page.file.src_uri
    boost = next((each for begin, each in BOOSTS.items() if where.startswith(begin)), 1.0)
    page.meta.setdefault("search", {})["boost"] = boost
    source = _SOURCES.get(where, f"docs/{where}")
    parts = _FENCED.split(markdown)
    for index in range(0, len(parts), 2):
        parts[index] = _LINK.sub(lambda link: _resolve(link, source, where), parts[index])
    return "".join(parts)


def _resolve(link: re.Match[str], source: str, where: str) -> str:
    """Convert a link of a repository file to a link on the site, or to text if it has no page."""
    text, target, fragment = link[1], link[2], link[3] or ""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    inside = path.removeprefix("docs/") if path.startswith("docs/") else ""
    page = ADDED.get(path) or FOLDERS.get(path) or inside
    if not page:
        return text
    if inside and (ROOT / path).is_dir():
        page = f"{page}/README.md"
    return f"[{text}]({posixpath.relpath(page, posixpath.dirname(where) or '.')}{fragment})"


def _title(file: File) -> str:
    first: str = file.content_string.partition("\n")[0]
    return first.removeprefix("# ")


def _number(row: str) -> tuple[int, str]:
    """Return the sort key of a list item: decisions by number, others by title."""
    found = re.match(r"- \[(\d+)\.", row)
    return (int(found[1]) if found else 0, row)

"""Parses an HTML page for tests."""

from html.parser import HTMLParser

VOID = {"meta", "br", "link", "img", "input", "hr"}
# SVG elements that may be self-closing.
OWN_END = {"line", "polyline", "circle", "rect"}


class Page(HTMLParser):
    """Checks that tags match, and collects the parts of a page that tests query."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self._heads: list[str] = []
        self._listed: dict[int, str] = {}
        self._id = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        known = dict(attrs)
        self._id = str(known.get("id" if tag == "h2" else "href") or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in OWN_END
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip() and self.open[-1] != "style":
            self.words.append(data.strip())
            number = int(self._id.rpartition("-")[2]) if "section-" in self._id else 0
            if number and self.open[-1] == "h2":
                self._heads.append(data.strip())
            elif number and self.open[-1] == "a":
                self._listed[number] = data.strip()

    @property
    def text(self) -> str:
        return "\n".join(self.words)

    def links(self) -> list[str]:
        """Return the URLs of all links to other pages."""
        found = [value for name, value in self.attributes if name == "href"]
        return [each for each in found if not each.startswith("#")]

    def heads(self) -> list[str]:
        """Return the main headings; the table of contents must list all of them in order."""
        assert [self._listed[at] for at in sorted(self._listed)] == self._heads
        known = ("Test metrics", "Rules of the gate", "Training", "Incidents", "Steps and lineage",
                 "Configuration")  # fmt: skip
        return [name for name in self._heads if name in known]

    @property
    def verdict(self) -> str:
        """Return the run's verdict, which determines the color of the page's header."""
        found = (value.split() for name, value in self.attributes if name == "class")
        return next(words[1] for words in found if words[0] == "verdict")

"""An HTML page, parsed for tests."""

from html.parser import HTMLParser

VOID = {"meta", "br", "link", "img", "input", "hr"}
# SVG elements may be self-closing.
OWN_END = {"line", "polyline", "circle"}


class Page(HTMLParser):
    """Checks that tags match, and collects what a test may ask for."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
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

    @property
    def text(self) -> str:
        return "\n".join(self.words)

    def heads(self) -> list[str]:
        known = ("Test metrics", "Rules of the gate", "Training", "Steps", "Incidents",
                 "Configuration")  # fmt: skip
        return [name for name in known if name in self.words]

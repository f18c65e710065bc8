"""Opens a page in headless Chromium, controlled through `--remote-debugging-pipe`."""

import base64
import json
import os
import selectors
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SECONDS = 60
# Elements that overflow the page, except those in a box that scrolls.
OUTSIDE = """[...document.body.querySelectorAll("*")].filter(each =>
  !each.parentElement.closest(".table, pre, svg") &&
  (each.getBoundingClientRect().right > innerWidth + 0.5 || each.getBoundingClientRect().left < 0)
).map(each => each.outerHTML.slice(0, 120))"""
SCROLLING = """[...document.querySelectorAll(".table")].filter(each =>
  each.scrollWidth > each.clientWidth + 1).map(each => each.innerText.slice(0, 60))"""


def found() -> str | None:
    return next((path for path in map(shutil.which, NAMES) if path), None)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The rendered page at one width.

    Attributes:
        complaints: console errors, exceptions, and what the page's security policy blocked.
        requests: all requests except those for the page and its embedded content.
        outside: elements that overflow the page.
        scrolling: texts of the boxes that scroll horizontally.
        width: width of the whole page, in pixels.
        inner: width of the window, in pixels.
        tones: background and text color, as CSS values.
        picture: screenshot as PNG.
    """

    complaints: list[str]
    requests: list[str]
    outside: list[str]
    scrolling: list[str]
    width: int
    inner: int
    tones: tuple[str, str]
    picture: bytes


class Browser:
    """Controls Chromium over the DevTools protocol: JSON messages, each ended by a zero byte."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._rest, self._number = b"", 0
        self.happened: list[dict[str, Any]] = []
        self._ready = selectors.DefaultSelector()
        self._ready.register(reading, selectors.EVENT_READ)
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    _session = ""

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a DevTools method and return its result; events that arrive earlier are stored."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        answer = self._until(lambda each: each.get("id") == self._number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def evaluate(self, expression: str) -> Any:
        """Evaluate a JavaScript expression in the page and return its value."""
        reply = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    def look(self, page: Path, *, width: int, height: int, scheme: str) -> Seen:
        """Open a page in a window of this size in pixels; `scheme` is `light` or `dark`."""
        self.happened.clear()
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        preference = [{"name": "prefers-color-scheme", "value": scheme}]
        self.ask("Emulation.setEmulatedMedia", features=preference)
        url = page.as_uri()
        self.ask("Page.navigate", url=url)
        if not any(each.get("method") == "Page.loadEventFired" for each in self.happened):
            self._until(lambda each: each.get("method") == "Page.loadEventFired")
        shot = self.ask("Page.captureScreenshot", captureBeyondViewport=True)
        return Seen(
            complaints=[*map(_replied, filter(_is_complaint, self.happened))],
            requests=[each for each in self._requested() if each != url],
            outside=self.evaluate(OUTSIDE),
            scrolling=self.evaluate(SCROLLING),
            width=self.evaluate("document.documentElement.scrollWidth"),
            inner=self.evaluate("innerWidth"),
            tones=(
                self.evaluate("getComputedStyle(document.body).backgroundColor"),
                self.evaluate("getComputedStyle(document.body).color"),
            ),
            picture=base64.b64decode(shot["data"]),
        )

    def _requested(self) -> list[str]:
        sent = (e for e in self.happened if e.get("method") == "Network.requestWillBeSent")
        urls = [each["params"]["request"]["url"] for each in sent]
        return [url for url in urls if not url.startswith("data:")]

    def _until(self, wanted: Any) -> dict[str, Any]:
        end = time.monotonic() + SECONDS
        while True:
            *whole, self._rest = self._rest.split(b"\0")
            messages = [json.loads(each) for each in whole]
            self.happened += messages
            for message in messages:
                if wanted(message):
                    return dict(message)
            if not self._ready.select(max(end - time.monotonic(), 0)):
                raise TimeoutError(f"Chromium said nothing for {SECONDS} s")
            data = os.read(self._reading, 1 << 20)
            assert data, "Chromium has ended"
            self._rest += data


def _is_complaint(message: dict[str, Any]) -> bool:
    method, params = message.get("method"), message.get("params", {})
    if method == "Log.entryAdded":
        return params["entry"]["level"] in ("error", "warning")
    if method == "Runtime.consoleAPICalled":
        return True
    return method in ("Runtime.exceptionThrown", "Network.loadingFailed")


def _replied(message: dict[str, Any]) -> str:
    return json.dumps(message["params"])[:2000]


@contextmanager
def browser(command: str, home: Path) -> Iterator[Browser]:
    """Start Chromium with its profile in `home`, and stop it at the end of the block."""
    to_it, from_it = os.pipe(), os.pipe()
    options = [
        "--headless", "--remote-debugging-pipe", f"--user-data-dir={home}", "--no-first-run",
        "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
        "--disable-component-update", "--hide-scrollbars",
        # Chromium's sandbox needs privileges that containers rarely have, and the pages are
        # trusted.
        "--no-sandbox",
    ]  # fmt: skip
    # Chromium reads commands from file descriptor 3 and writes replies to 4.
    shell = f'exec "$0" "$@" 3<&{to_it[0]} 4>&{from_it[1]}'
    with subprocess.Popen(
        ["/bin/bash", "-c", shell, command, *options],
        pass_fds=(to_it[0], from_it[1]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(home)},
        start_new_session=True,
    ) as process:
        os.close(to_it[0])
        os.close(from_it[1])
        try:
            own = Browser(from_it[0], to_it[1])
            yield own
            own._session = ""
            own.ask("Browser.close")
        finally:
            process.kill()
            os.close(to_it[1])
            os.close(from_it[0])

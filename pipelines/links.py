"""Links to the page of a run: hyperlinks in a terminal, and pages opened in the browser."""

from __future__ import annotations

import os
import re
import socket
import webbrowser
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from urllib.parse import quote

# Terminals that support hyperlinks (OSC 8), recognized by the variables that they set.
_PROGRAMS = ("ghostty", "Hyper", "iTerm.app", "rio", "terminology", "vscode", "WezTerm", "zed")
_TERMS = ("alacritty", "contour", "foot", "wezterm", "xterm-ghostty", "xterm-kitty")
_VARIABLES = ("DOMTERM", "KITTY_WINDOW_ID", "KONSOLE_VERSION", "WT_SESSION")
# Version numbers of VTE 0.50 and later.
_VTE = re.compile(r"[5-9]\d{3}|\d{5,}")
_STDOUT, _STDERR = 1, 2


def takes_links(stream: IO[str], environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether a stream is a terminal that is known to support hyperlinks."""
    term = environment.get("TERM", "")
    if not stream.isatty() or environment.get("NO_COLOR") or term in ("", "dumb"):
        return False
    if forced := environment.get("FORCE_HYPERLINK"):
        return forced != "0"
    # A terminal multiplexer drops hyperlinks or prints their codes, unless configured otherwise.
    if term.startswith(("screen", "tmux")):
        return False
    vte = environment.get("VTE_VERSION", "")
    return (
        term.startswith(_TERMS)
        or environment.get("TERM_PROGRAM") in _PROGRAMS
        or _VTE.fullmatch(vte) is not None
        or any(map(environment.get, _VARIABLES))
    )


def link_address(path: Path) -> str:
    """Return the `file:` URL of a path, with the host name, because the terminal may be remote."""
    return f"file://{quote(socket.gethostname())}{quote(os.fsencode(path.absolute()))}"


def open_page(address: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Open a page in the user's browser. Return whether that succeeded."""
    has_choice = bool(environment.get("BROWSER"))
    is_elsewhere = "SSH_CONNECTION" in environment and "DISPLAY" not in environment
    if is_elsewhere and not has_choice:
        return False
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return False
    # A generic browser runs in this terminal, so it is used only if the user has chosen it.
    is_of_terminal = type(browser) is webbrowser.GenericBrowser
    if is_of_terminal and not has_choice:
        return False
    with _output_to_stderr():
        return browser.open(address)


@contextmanager
def _output_to_stderr() -> Iterator[None]:
    """Redirect the standard output of child programs to standard error in this block."""
    before = os.dup(_STDOUT)
    try:
        os.dup2(_STDERR, _STDOUT)
        yield
    finally:
        os.dup2(before, _STDOUT)
        os.close(before)

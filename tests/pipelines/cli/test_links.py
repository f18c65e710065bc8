"""Tests that a run's page is a hyperlink in terminals that support it, and opens in the browser."""

import io
import os
import subprocess
import sys

import pytest
from rich.text import Text

from flotilla.pipelines.cli import display
from flotilla.pipelines.cli.display import Terminal, show_verdict
from flotilla.pipelines.runs.outcome import RunResult
from flotilla.trainer import storage

KNOWN = {"TERM": "xterm-256color", "TERM_PROGRAM": "WezTerm"}
OSC = "\x1b]8;"


class Screen(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (KNOWN, True),
        ({"TERM": "xterm-kitty"}, True),
        ({"TERM": "xterm", "VTE_VERSION": "7600"}, True),
        ({"TERM": "xterm", "VTE_VERSION": "4999"}, False),
        ({"TERM": "xterm", "VTE_VERSION": "many"}, False),
        ({"TERM": "xterm", "KONSOLE_VERSION": "230401"}, True),
        ({"TERM": "xterm", "WT_SESSION": "a"}, True),
        ({"TERM": "xterm"}, False),
        ({"TERM": "xterm", "FORCE_HYPERLINK": "1"}, True),
        ({**KNOWN, "FORCE_HYPERLINK": "0"}, False),
        ({**KNOWN, "NO_COLOR": "1", "FORCE_HYPERLINK": "1"}, False),
        ({**KNOWN, "TERM": "dumb", "FORCE_HYPERLINK": "1"}, False),
        ({"TERM_PROGRAM": "WezTerm"}, False),
        ({**KNOWN, "TERM": "screen-256color"}, False),
        ({**KNOWN, "TERM": "tmux-256color"}, False),
    ],
)
def test_which_terminals_show_links(environment, expected):
    assert display.takes_links(Screen(), environment) is expected
    assert display.takes_links(io.StringIO(), environment) is False


@pytest.fixture
def displayed(tmp_path, monkeypatch):
    """Return a function that shows a run with a report on a terminal with given variables."""
    report = tmp_path / "a b" / "report.html"

    def show(screen, **variables):
        for name in ("TERM", "TERM_PROGRAM", "NO_COLOR", "FORCE_HYPERLINK", "VTE_VERSION"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        result = RunResult(status="failed", exit_code=1, message="", steps=(), run_id="digits-1")
        monkeypatch.setattr(
            RunResult, "artifacts", property(lambda _: {"report": storage.uri_of(report)})
        )
        monkeypatch.setattr(sys, "stdout", screen)
        show_verdict(Terminal(), result)
        return screen.getvalue()

    return show, report


def test_the_report_is_a_link_with_the_name_of_the_machine(displayed, monkeypatch):
    show, report = displayed
    monkeypatch.setattr(display.socket, "gethostname", lambda: "host one")
    text = show(Screen(), **KNOWN)
    assert f";file://host%20one{str(report).replace(' ', '%20')}\x1b\\{report}" in text


@pytest.mark.parametrize(
    ("screen", "more"),
    [(io.StringIO, {}), (Screen, {"NO_COLOR": "1"}), (Screen, {"TERM": "dumb"})],
)
def test_elsewhere_it_is_its_path(displayed, screen, more):
    show, report = displayed
    text = show(screen(), **{**KNOWN, "FORCE_HYPERLINK": "1", "FORCE_COLOR": "1", **more})
    assert OSC not in text
    assert f"{report}\n" in text


def test_a_name_cannot_end_a_link(tmp_path):
    address = display.link_address(tmp_path / "\x1b\\;x\n%")
    assert address.isprintable()
    assert "\x1b" not in address
    assert Text("x", f"link {address}").plain == "x"


def opened(**environment):
    program = "from flotilla.pipelines.cli.runs import open_page; print(open_page('file:///a%20b'))"
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    return ended.stdout, ended.stderr


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_a_page_is_opened_by_the_browser_of_the_user(tmp_path):
    asked = tmp_path / "opened"
    browser = script(tmp_path / "browser", f'echo noise\nprintf %s "$1" > {asked}')
    assert opened(**{**os.environ, "BROWSER": str(browser)}) == ("True\n", "noise\n")
    assert asked.read_text() == "file:///a%20b"


@pytest.mark.parametrize(
    "environment",
    [{}, {"SSH_CONNECTION": "a", "BROWSER": ""}, {"BROWSER": "/nowhere/browser"}],
)
def test_without_a_browser_or_with_one_in_the_terminal_alone_none_is_opened(environment, tmp_path):
    assert opened(PATH="/nowhere", **environment)[0] == "False\n"
    if not environment:
        for name in ("w3m", "lynx"):
            script(tmp_path / name, "exit 0")
        assert opened(PATH=str(tmp_path))[0] == "False\n"

"""Tests that each line of output stays one line and cannot imitate another line or a command."""

import io
import logging
import re
import subprocess
import sys
from datetime import datetime

import pytest

from flotilla.trainer import events
from flotilla.trainer.runtime import streams
from flotilla.trainer.runtime.streams import split_stamp, stamp_output

HOSTILE = 'a\nflotilla: blessed\r\n{"event": "run_end", "time": 1.0}\n\x1b[2J\u202e'


def test_the_log_and_the_traceback_of_a_bug_are_masked():
    program = (
        "import logging; from flotilla.trainer.runtime import streams\n"
        "streams.log_to_stderr()\n"
        "uri = 'http://u:' + 'sW0rdf1sh' + '@h/x'\n"
        "logging.info('at %s', uri)\n"
        "raise ValueError(uri)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], text=True, capture_output=True, check=False
    )
    assert done.returncode == 1
    assert "at http://***@h/x" in done.stderr
    assert "ValueError: http://***@h/x" in done.stderr
    assert "u:sW0rdf1sh" not in done.stderr
    assert logging.getLogger().level == logging.WARNING


@pytest.fixture
def logged():
    """Return a function that logs a message and returns everything that was logged."""
    root = logging.getLogger()
    handler = logging.StreamHandler(io.StringIO())
    before, root.handlers = root.handlers, [handler]
    hook = sys.excepthook
    streams.log_to_stderr()

    def written(message, *arguments, **more):
        logging.warning(message, *arguments, **more)
        return handler.stream.getvalue()

    yield written
    root.handlers, sys.excepthook = before, hook


def forged(text):
    """Return the lines after the first that could be mistaken for Flotilla's own messages."""
    assert all(line.isprintable() for line in text.splitlines())
    return [line for line in text.splitlines()[1:] if line.startswith(("flotilla:", events.MARK))]


def test_a_message_begins_no_other_line(logged):
    text = logged("column %s", HOSTILE)
    assert len(text.splitlines()) == 4
    assert not forged(text)


def test_a_traceback_is_whole_and_its_message_begins_no_other_line(logged):
    with pytest.raises(ValueError, match="blessed") as caught:
        raise ValueError(HOSTILE)
    text = logged("it failed", exc_info=caught.value)
    assert "\nTraceback (most recent call last):\n  File " in text
    assert "\nValueError: a\n  flotilla: blessed" in text
    assert not forged(text)


def test_a_library_begins_no_other_line_where_nobody_has_set_up_a_log():
    code = (
        "import logging, warnings; from flotilla.trainer.runtime import streams\n"
        "streams.mask_libraries()\n"
        f"logging.getLogger('x').warning('column %s', {HOSTILE!r}); warnings.warn({HOSTILE!r})"
    )
    ended = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    assert "column a" in ended.stderr
    assert "UserWarning: a" in ended.stderr
    assert not forged(ended.stderr)


def test_what_is_said_is_one_line(capsys):
    streams.say(f"  flotilla: {HOSTILE}")
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("  flotilla: a flotilla: blessed")
    assert line.isprintable()


def test_a_line_that_nobody_can_read_ends_nothing():
    code = (
        "from flotilla.trainer.runtime.streams import say\nsay('a'); say('b'); raise SystemExit(3)"
    )
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            [sys.executable, "-c", code], stderr=full, check=False, stdout=subprocess.PIPE
        )
    assert (ended.returncode, ended.stdout) == (3, b"")


TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} "


@pytest.fixture
def output(monkeypatch):
    # Replace `sys.stdout` in the test itself, because pytest uses another one while it sets up.
    def replaced():
        monkeypatch.setattr(sys, "stdout", found := io.StringIO())
        return found

    return replaced


def say(text, end="\n"):
    """Write as `print` does."""
    sys.stdout.write(text)
    sys.stdout.write(end)


def test_a_printed_text_has_its_time_once_and_an_empty_line_none(output):
    written = output()
    with stamp_output():
        say("one line")
        say("two", end=" ")
        say("of it")
        say("a\n  b")
        say("")
        assert sys.stdout.writable()
    say("after")
    expected = f"{TIME}one line\n{TIME}two of it\n{TIME}a\n  b\n\nafter\n"
    assert re.fullmatch(expected, written.getvalue())


def test_a_terminal_and_a_stream_that_has_times_stay_as_they_are(output, monkeypatch):
    written = output()
    with stamp_output():
        inner = sys.stdout
        with stamp_output():
            assert sys.stdout is inner
    monkeypatch.setattr(written, "isatty", lambda: True)
    with stamp_output():
        assert sys.stdout is written


def test_the_time_of_a_line_is_read_again(output):
    written = output()
    before = datetime.now().timestamp()
    with stamp_output():
        say("text")
    moment, text = split_stamp(written.getvalue().rstrip("\n"))
    assert text == "text"
    assert before - 0.002 <= moment <= datetime.now().timestamp()


@pytest.mark.parametrize("line", ["", "text", "2026-13-99 99:99:99,999 text", "2026-01-02 text"])
def test_a_line_without_a_time_is_all_text(line):
    assert split_stamp(line) == (None, line)
    assert split_stamp(f"2026-01-02 03:04:05,678 {line}")[1] == line
